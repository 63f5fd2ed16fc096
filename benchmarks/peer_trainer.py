"""Trains a run file with transformers' Trainer, as an alternating program.

The run file sets text, split, tokenizer, initial weights, rows per step, optimizer and schedule.
Regauge evaluates the held-out rows, with Regauge's masks.

    python benchmarks/peer_trainer.py FOLDER RUN_FILE [--style best|default] [--rows N]
                                      [--steps-per-turn N]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset as Table
from peer_parts import PeerRun, build_evaluation, build_run_module, parse_run
from turns import Turn

from regauge.data.dataset import Dataset


def main() -> None:
    """Train until there is no other turn."""
    run = parse_run(__doc__)
    settings, dataset, is_best = run.settings, run.dataset, run.style == "best"
    module = build_run_module(run)
    module.model = copy_to_transformers(module.model)
    evaluate = build_evaluation(run, module)
    tokenizer = transformers.AutoTokenizer.from_pretrained(dataset.folder / "tokenizer")
    is_mlm = settings.task.kind == "mlm"
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer,
        mlm=is_mlm,
        **({"mlm_probability": settings.task.mlm_probability} if is_mlm else {}),
    )
    length = settings.task.bucket_lengths(dataset.manifest)[-1]
    rows = Table.from_dict({"input_ids": read_token_rows(dataset, length, packed=is_best)})
    trainer = _CountingTrainer(
        model=module.model,
        args=transformers.TrainingArguments(**build_arguments(run, compiled=is_best)),
        train_dataset=rows,
        data_collator=collator,
    )
    trainer.add_callback(TurnCallback(run, lambda: trainer.real_tokens, evaluate))
    trainer.train()


class _CountingTrainer(transformers.Trainer):
    """Counts real tokens."""

    real_tokens = 0

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        self.real_tokens += int(inputs["attention_mask"].sum())
        return super().training_step(model, inputs, *rest, **named)


class TurnCallback(transformers.TrainerCallback):
    """Pauses any Trainer between its turns."""

    def __init__(
        self, run: PeerRun, read_count: Callable[[], int], evaluate: Callable[[], float]
    ) -> None:
        self._turn = Turn(run.folder, run.accelerator)
        self._steps_per_turn = run.steps_per_turn
        self._read_count = read_count
        self._evaluate = evaluate
        self._count = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the first turn."""
        self._turn.wait()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Evaluate and wait for the next turn if this was the last step of a turn."""
        if state.global_step % self._steps_per_turn:
            return
        self._turn.stop()
        before, self._count = self._count, self._read_count()
        count = self._count - before
        self._turn.end(step=state.global_step, count=count, heldout=self._evaluate())


def build_arguments(run: PeerRun, *, compiled: bool) -> dict[str, Any]:
    """Return the arguments of any Trainer for a run with a fixed number of steps."""
    settings, optimizer = run.settings, run.settings.optimizer
    return {
        "output_dir": str(run.folder / "trainer"),
        "per_device_train_batch_size": run.rows,
        "gradient_accumulation_steps": settings.batch.rows // run.rows,
        "max_steps": settings.stop.steps,
        "learning_rate": optimizer.peak_learning_rate,
        "lr_scheduler_type": optimizer.schedule.kind,
        "warmup_steps": optimizer.schedule.num_warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.moment_decay_rates[0],
        "adam_beta2": optimizer.moment_decay_rates[1],
        "adam_epsilon": optimizer.epsilon,
        "max_grad_norm": optimizer.max_grad_norm,
        "save_strategy": "no",
        "report_to": [],
        "seed": settings.seed,
        "disable_tqdm": True,
        "use_cpu": run.device.type == "cpu",
        "bf16": run.dtype == torch.bfloat16,
        "torch_compile": compiled,
    }


def copy_to_transformers(model: Any) -> Any:
    """Return an unmodified model of transformers with the weights of a model of Regauge."""
    config = copy.deepcopy(model.config)
    extra = {} if getattr(model, "pooler", True) is not None else {"add_pooling_layer": False}
    original = type(model)(config, **extra)
    original.load_state_dict(model.state_dict())
    return original


def read_token_rows(dataset: Dataset, length: int, *, packed: bool) -> list[np.ndarray]:
    """Return the training text: one stream cut into rows if packed, else one row a document."""
    if not packed:
        return list(_read_documents(dataset))
    stream = np.concatenate(list(_read_documents(dataset)))
    return list(stream[: len(stream) // length * length].reshape(-1, length))


def _read_documents(dataset: Dataset) -> Iterator[np.ndarray]:
    rows = dataset.rows("train")
    for row in rows.take(range(len(rows))):
        segments = row["segments"]
        for number in range(1, int(segments.max()) + 1):
            yield row["tokens"][segments == number]


if __name__ == "__main__":
    main()
