"""Trains a run file of `classify` with transformers' Trainer, as an alternating program.

The run file sets texts, split, tokenizer, initial weights, optimizer and schedule. Regauge
evaluates the held-out texts.

    python benchmarks/peer_classify.py FOLDER RUN_FILE [--style best|ungrouped|default]
                                       [--steps-per-turn N]
"""

from __future__ import annotations

from typing import Any

import transformers
from datasets import Dataset as Table
from peer_parts import PeerRun, build_evaluation, build_run_module, parse_run
from peer_trainer import TurnCallback, build_arguments, copy_to_transformers


def main() -> None:
    """Train until there is no other turn."""
    run = parse_run(__doc__)
    module = build_run_module(run)
    module.model = copy_to_transformers(module.model)
    arguments = build_arguments(run, compiled=False)
    if run.style == "best":
        arguments["train_sampling_strategy"] = "group_by_length"
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.dataset.folder / "tokenizer")
    trainer = _CountingTrainer(
        model=module.model,
        args=transformers.TrainingArguments(**arguments),
        train_dataset=_read_rows(run),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    evaluate = build_evaluation(run, module)
    trainer.add_callback(TurnCallback(run, lambda: trainer.texts, evaluate))
    trainer.train()


class _CountingTrainer(transformers.Trainer):
    """Counts texts."""

    texts = 0

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        self.texts += len(inputs["labels"])
        return super().training_step(model, inputs, *rest, **named)


def _read_rows(run: PeerRun) -> Table:
    """Return the training texts as tokens, with their classes."""
    rows = run.dataset.rows("train")
    (field,), label = run.settings.task.text_fields, run.settings.task.label
    taken = rows.take(range(len(rows)))
    return Table.from_dict(
        {
            "input_ids": [row[field] for row in taken],
            "labels": [int(row[label]) for row in taken],
        }
    )


if __name__ == "__main__":
    main()
