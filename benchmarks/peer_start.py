"""One step of a run of this project as Trainer does it, and a line where it is done.

python benchmarks/peer_start.py RUN_FILE TOLD
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import transformers

ROWS = 1000


class Telling(transformers.TrainerCallback):
    """Writes that the first step is done."""

    def __init__(self, told: Path) -> None:
        self._told = told

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Say it."""
        self._told.parent.mkdir(parents=True, exist_ok=True)
        self._told.write_text(json.dumps({"step": state.global_step}))


def main() -> None:
    """Train for a step; nothing of this project is imported."""
    tables = json.loads(Path(sys.argv[1]).read_text())
    data = Path(tables["data"]["path"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(data / "tokenizer")
    config = transformers.BertConfig(vocab_size=len(tokenizer), **tables["model"]["config"])
    with pa.memory_map(str(min(data.glob("train-*.arrow")))) as file:
        rows = pa.ipc.open_file(file).read_all()["tokens"].slice(0, ROWS).to_pylist()
    arguments = transformers.TrainingArguments(
        output_dir=str(Path(sys.argv[2]).parent / "out"),
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
        callbacks=[Telling(Path(sys.argv[2]))],
    ).train()


if __name__ == "__main__":
    main()
