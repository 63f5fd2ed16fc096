"""A run of this project as transformers' Trainer does it: a program that trains in turns.

The same text, split, tokenizer, first weights, rows of a step, optimizer and schedule, read from
the same run file. Held-out rows are measured by this project's own path, masks included.

    python benchmarks/peer_trainer.py FOLDER RUN_FILE [--style best|default] [--rows N] [--turn N]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset as Table
from peer_parts import Order, measuring, ordered, reading
from turns import Turn

from regauge.data.dataset import Dataset


def main() -> None:
    """Train until nobody wants another turn."""
    order = ordered(__doc__)
    settings, dataset, best = order.settings, order.dataset, order.style == "best"
    reader = reading(order)
    reader.model = plain(reader.model)
    measured = measuring(order, reader)
    tokenizer = transformers.AutoTokenizer.from_pretrained(dataset.folder / "tokenizer")
    masked = settings.task.kind == "mlm"
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer,
        mlm=masked,
        **({"mlm_probability": settings.task.mlm_probability} if masked else {}),
    )
    length = settings.task.bucket_lengths(dataset.manifest)[-1]
    rows = Table.from_dict({"input_ids": cut(dataset, length, whole=not best)})
    trainer = _Counting(
        model=reader.model,
        args=transformers.TrainingArguments(**written(order, compiled=best)),
        train_dataset=rows,
        data_collator=collator,
    )
    trainer.add_callback(InTurn(order, lambda: trainer.real_tokens, measured))
    trainer.train()


class _Counting(transformers.Trainer):
    """Counts real tokens."""

    real_tokens = 0

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        self.real_tokens += int(inputs["attention_mask"].sum())
        return super().training_step(model, inputs, *rest, **named)


class InTurn(transformers.TrainerCallback):
    """Holds the training of any Trainer up between its turns."""

    def __init__(
        self, order: Order, counted: Callable[[], int], measured: Callable[[], float]
    ) -> None:
        self._turn = Turn(order.folder, order.accelerator)
        self._steps = order.turn
        self._counted = counted
        self._measured = measured
        self._before = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the first turn."""
        self._turn.wait()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Measure, and wait for the next turn, where this one is over."""
        if state.global_step % self._steps:
            return
        self._turn.stop()
        self._before, before = self._counted(), self._before
        count = self._before - before
        self._turn.end(step=state.global_step, count=count, heldout=self._measured())


def written(order: Order, *, compiled: bool) -> dict[str, Any]:
    """Return what any Trainer is told of a run of decided length."""
    settings, optimizer = order.settings, order.settings.optimizer
    return {
        "output_dir": str(order.folder / "trainer"),
        "per_device_train_batch_size": order.rows,
        "gradient_accumulation_steps": settings.batch.rows // order.rows,
        "max_steps": settings.stop.steps,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": optimizer.schedule.kind,
        "warmup_steps": optimizer.schedule.warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.epsilon,
        "max_grad_norm": optimizer.max_grad_norm,
        "save_strategy": "no",
        "report_to": [],
        "seed": settings.seed,
        "disable_tqdm": True,
        "use_cpu": order.device.type == "cpu",
        "bf16": order.dtype == torch.bfloat16,
        "torch_compile": compiled,
    }


def plain(model: Any) -> Any:
    """Return transformers' own model with the weights of one that this project has made."""
    config = copy.deepcopy(model.config)
    extra = {} if getattr(model, "pooler", True) is not None else {"add_pooling_layer": False}
    made = type(model)(config, **extra)
    made.load_state_dict(model.state_dict())
    return made


def cut(dataset: Dataset, length: int, *, whole: bool) -> list[np.ndarray]:
    """Return the training text: its documents one by one, or as one stream cut into rows."""
    if whole:
        return list(_documents(dataset))
    stream = np.concatenate(list(_documents(dataset)))
    return list(stream[: len(stream) // length * length].reshape(-1, length))


def _documents(dataset: Dataset) -> Iterator[np.ndarray]:
    rows = dataset.rows("train")
    for row in rows.take(range(len(rows))):
        segments = row["segments"]
        for number in range(1, int(segments.max()) + 1):
            yield row["tokens"][segments == number]


if __name__ == "__main__":
    main()
