"""Trains one step of a run file with Trainer, and writes a line at the end of the step.

python benchmarks/peer_start.py RUN_FILE STEP_FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import transformers

ROWS = 1000


class StepWriter(transformers.TrainerCallback):
    """Writes a line when the first step is done."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Write the number of the step."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"step": state.global_step}))


def main() -> None:
    """Train one step, without an import of Regauge."""
    run_file, step_file = map(Path, sys.argv[1:])
    tables = json.loads(run_file.read_text())
    data = Path(tables["data"]["path"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(data / "tokenizer")
    config = transformers.BertConfig(vocab_size=len(tokenizer), **tables["model"]["config"])
    with pa.memory_map(str(min(data.glob("train-*.arrow")))) as file:
        rows = pa.ipc.open_file(file).read_all()["tokens"].slice(0, ROWS).to_pylist()
    arguments = transformers.TrainingArguments(
        output_dir=str(step_file.parent / "out"),
        per_device_train_batch_size=tables["batch"]["rows"],
        max_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(
        model=transformers.BertForMaskedLM(config),
        args=arguments,
        train_dataset=[{"input_ids": row} for row in rows],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer),
        callbacks=[StepWriter(step_file)],
    ).train()


if __name__ == "__main__":
    main()
