"""A ranking of this project in a plain loop of PyTorch: a program that trains in turns.

The same module, rows of each step, first weights, loss, optimizer and schedule, read from the same
run file; torch's DataLoader, texts padded to the longest of the batch, autocast, one backward pass.

    python benchmarks/peer_loop.py FOLDER RUN_FILE [--style best|compiled|default] [--turn N]
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from peer_parts import Order, in_turns, measuring, optimized, ordered, reading, taken
from peer_trainer import plain
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from regauge.data.dataset import DatasetRows
from regauge.models.ranker import Ranker
from regauge.tasks import _ranking

Batch = dict[str, Tensor]


def main() -> None:
    """Train until nobody wants another turn."""
    order = ordered(__doc__)
    module = _Plain.of(reading(order))
    measured = measuring(order, module)
    in_turns(order, _steps(order, module), measured)


class _Plain(Ranker):
    """A ranker whose encoder gets what any model of transformers does: tokens and their mask."""

    @classmethod
    def of(cls, module: Any) -> _Plain:
        """Return a ranker of this project with transformers' own encoder."""
        module.model = plain(module.model)
        module.__class__ = cls
        return module

    def hidden(self, batch: Batch, *, packed: bool, model: Any = None) -> Tensor:
        del packed
        inner = model or self.model
        mask = (batch["segments"] > 0).long()
        states: Tensor = inner(input_ids=batch["tokens"], attention_mask=mask).last_hidden_state
        return states


def _steps(order: Order, module: nn.Module) -> Iterator[int]:
    """Train, and yield how many rows each step had."""
    settings, task = order.settings, order.settings.task
    weights = [value for value in module.parameters() if value.requires_grad]
    optimizer, decay = optimized(order, weights)
    model = torch.compile(module) if order.style == "compiled" else module
    module.train()
    for batch in _batches(order):
        with torch.autocast(order.device.type, order.dtype, enabled=order.dtype != torch.float32):
            output = model(batch)
        loss, weight = task.loss(output, batch)
        (loss / weight).backward()
        clip_grad_norm_(module.parameters(), settings.optimizer.max_grad_norm)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        yield len(batch["labels"])


def _batches(order: Order) -> DataLoader[Batch]:
    """Return the rows of all steps; they are made beside the training, unless by default."""
    rows = order.dataset.rows("train")
    workers = 0 if order.style == "default" else 1
    return DataLoader(
        _Listed(rows, taken(order)),
        batch_size=order.rows,
        collate_fn=_Together(order),
        num_workers=workers,
    )


class _Listed(torch.utils.data.Dataset[Any]):
    """Rows of a split, as torch takes them."""

    def __init__(self, rows: DatasetRows, numbers: list[int]) -> None:
        self._rows = rows
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._rows.take([self._numbers[place]])[0]


class _Together:
    """Makes a batch of rows."""

    def __init__(self, order: Order) -> None:
        self._task = order.settings.task
        self._pad = order.dataset.manifest.tokenizer.pad
        self._members = order.dataset.manifest.fields[self._task.label].members

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        """Return texts padded to the longest, [rows x texts, length], features and labels."""
        task = self._task
        texts = [torch.tensor(text) for row in rows for text in self._texts(row)]
        lengths = torch.tensor([len(text) for text in texts])
        tokens = pad_sequence(texts, batch_first=True, padding_value=self._pad)
        table = partial(_ranking.build_feature_table, rows, self._members)
        hashes = table(task.categories, np.int64(-1))
        return {
            "tokens": tokens,
            "segments": (torch.arange(tokens.shape[1]) < lengths[:, None]).int(),
            "numbers": torch.from_numpy(table(task.numbers, np.float32(np.nan))),
            "categories": torch.from_numpy(_ranking.buckets(hashes, task.interactions.buckets)),
            "labels": torch.from_numpy(table((task.label,), np.float32(0))[..., 0]),
            "present": torch.from_numpy(
                _ranking.build_candidate_mask(rows, self._members, task.label)
            ),
        }

    def _texts(self, row: dict[str, Any]) -> list[np.ndarray]:
        """Return the texts of the query and of each candidate; those of one that is absent lack."""
        task = self._task
        asked = [row[name] for name in task.query]
        shown = [
            row[name][place] for place in range(len(row[task.label])) for name in task.document
        ]
        empty = np.full(1, self._pad, np.int32)
        absent = self._members * len(task.document) - len(shown)
        return asked + shown + [empty] * absent


if __name__ == "__main__":
    main()
