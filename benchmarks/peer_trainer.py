"""A run of this project as transformers' Trainer does it: a program that trains in turns.

The same text, split, tokenizer, first weights, rows of a step, optimizer and schedule, read from
the same run file. Held-out rows are measured by this project's own path, masks included.

    python benchmarks/peer_trainer.py FOLDER RUN_FILE [--style best|default] [--rows N] [--turn N]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset as Table
from turns import Turn

from regauge import config, processes
from regauge.accelerators import join, take
from regauge.accelerators.cpu import Cpu
from regauge.data import mixing
from regauge.data.order import sample
from regauge.data.shards import Dataset
from regauge.training.objectives import feed
from regauge.training.scoring import Heldout
from regauge.training.settings import Training


def main() -> None:
    """Train until nobody wants another turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--style", choices=("best", "default"), default="best")
    parser.add_argument("--rows", type=int, help="rows that are computed at a time")
    parser.add_argument("--turn", type=int, default=5, help="steps of a turn")
    arguments = parser.parse_args()
    tables = config.read(arguments.run_file)
    tables["output"] = {"folder": str(arguments.folder)}
    settings = config.build(Training, tables)
    best = arguments.style == "best"
    dataset = mixing.opened(settings.data)
    model, measured = _model(settings, dataset, best=best)
    tokenizer = transformers.AutoTokenizer.from_pretrained(dataset.folder / "tokenizer")
    masked = settings.task.kind == "mlm"
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer, mlm=masked, **({"mlm_probability": settings.task.mask_share} if masked else {})
    )
    length = settings.task.ladder(dataset.manifest)[-1]
    rows = Table.from_dict({"input_ids": _rows(dataset, length, whole=not best)})
    trainer = _Counting(
        model=model,
        args=_arguments(settings, arguments, best=best),
        train_dataset=rows,
        data_collator=collator,
    )
    trainer.add_callback(_InTurn(Turn(arguments.folder), trainer, arguments.turn, measured))
    trainer.train()


class _Counting(transformers.Trainer):
    """Counts real tokens."""

    real_tokens = 0

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        self.real_tokens += int(inputs["attention_mask"].sum())
        return super().training_step(model, inputs, *rest, **named)


class _InTurn(transformers.TrainerCallback):
    """Holds the training up between its turns."""

    def __init__(self, turn: Turn, trainer: _Counting, steps: int, measured: Any) -> None:
        self._turn = turn
        self._trainer = trainer
        self._steps = steps
        self._measured = measured
        self._before = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._turn.wait()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step % self._steps:
            return
        self._turn.stop()
        self._before, before = self._trainer.real_tokens, self._before
        tokens = self._before - before
        self._turn.end(step=state.global_step, tokens=tokens, heldout=self._measured())


def _arguments(settings: Training, own: Any, *, best: bool) -> transformers.TrainingArguments:
    """Return what Trainer takes for a run of decided length, on the CPU."""
    optimizer = settings.optimizer
    rows = own.rows or settings.batch.rows
    return transformers.TrainingArguments(
        output_dir=str(own.folder / "trainer"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=settings.batch.rows // rows,
        max_steps=settings.stop.steps,
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type=optimizer.schedule.kind,
        warmup_steps=optimizer.schedule.warmup_steps,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        max_grad_norm=optimizer.clip_norm,
        save_strategy="no",
        report_to=[],
        seed=settings.seed,
        disable_tqdm=True,
        use_cpu=True,
        **({"bf16": True, "torch_compile": True} if best else {}),
    )


def _model(settings: Training, dataset: Dataset, *, best: bool) -> tuple[Any, Any]:
    """Return transformers' own model with the first weights of a run, and what measures it."""
    task, manifest = settings.aims[0].task, dataset.manifest
    reader = task.module(settings.model, manifest, settings.seed)
    plain = copy.deepcopy(reader.model.config)
    model = type(reader.model)(plain)
    model.load_state_dict(reader.model.state_dict())
    reader.model = model
    reader.compute_dtype = torch.bfloat16 if best else torch.float32
    accelerator, world = Cpu(), processes.World()
    device = take(accelerator, 0, settings.execution.threads or processes.share_of_cores(world))
    join(accelerator, world, settings.execution.timeout_seconds)
    own = feed(
        task, dataset, "heldout", world=world, rows=settings.batch.microbatch,
        ladder=task.ladder(manifest), seed=settings.seed,
    )  # fmt: skip
    numbers = sample(len(own), settings.evaluation.rows, manifest.identity)
    heldout = Heldout(task, accelerator, lambda: None, device, own, numbers)

    def measured() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=best):
            loss = heldout.metrics(reader)["loss"]
        reader.train()
        return loss

    return model, measured


def _rows(dataset: Dataset, length: int, *, whole: bool) -> list[np.ndarray]:
    """Return the training text: its documents one by one, or as one stream cut into rows."""
    if whole:
        return list(_documents(dataset))
    stream = np.concatenate(list(_documents(dataset)))
    return list(stream[: len(stream) // length * length].reshape(-1, length))


def _documents(dataset: Dataset) -> Iterator[np.ndarray]:
    rows = dataset.split("train")
    for row in rows.take(range(len(rows))):
        segments = row["segments"]
        for number in range(1, int(segments.max()) + 1):
            yield row["tokens"][segments == number]


if __name__ == "__main__":
    main()
