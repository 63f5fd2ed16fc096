"""Trains a ranking run file in a plain PyTorch loop, as an alternating program.

The run file sets module, rows per step, initial weights, loss, optimizer and schedule. The loop
uses torch's DataLoader and autocast, pads texts to the longest of the batch, and computes a step in
one backward pass.

    python benchmarks/peer_loop.py FOLDER RUN_FILE [--style best|compiled|default]
                                   [--steps-per-turn N]
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from peer_parts import (
    PeerRun,
    build_evaluation,
    build_optimizer,
    build_run_module,
    list_rows,
    parse_run,
    train_in_turns,
)
from peer_trainer import copy_to_transformers
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from regauge.data.columns import find_embedding_rows
from regauge.data.dataset import DatasetRows
from regauge.models.ranker import Ranker
from regauge.tasks import rank

Batch = dict[str, Tensor]


def main() -> None:
    """Train until there is no other turn."""
    run = parse_run(__doc__)
    module = _PlainRanker.from_ranker(build_run_module(run))
    evaluate = build_evaluation(run, module)
    train_in_turns(run, _train(run, module), evaluate)


class _PlainRanker(Ranker):
    """A ranker whose encoder gets tokens and their mask, as any model of transformers."""

    @classmethod
    def from_ranker(cls, module: Any) -> _PlainRanker:
        """Return a ranker of Regauge with the encoder of transformers."""
        module.model = copy_to_transformers(module.model)
        module.__class__ = cls
        return module

    def hidden_states(self, batch: Batch, *, packed: bool, model: Any = None) -> Tensor:
        del packed
        encoder = model or self.model
        mask = (batch["segments"] > 0).long()
        states: Tensor = encoder(input_ids=batch["tokens"], attention_mask=mask).last_hidden_state
        return states


def _train(run: PeerRun, module: nn.Module) -> Iterator[int]:
    """Train, and yield the number of rows of each step."""
    settings, task = run.settings, run.settings.task
    weights = [value for value in module.parameters() if value.requires_grad]
    optimizer, schedule = build_optimizer(run, weights)
    model = torch.compile(module) if run.style == "compiled" else module
    module.train()
    for batch in _build_loader(run):
        with torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32):
            output = model(batch)
        loss, weight = task.loss(output, batch)
        (loss / weight).backward()
        clip_grad_norm_(module.parameters(), settings.optimizer.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield len(batch["labels"])


def _build_loader(run: PeerRun) -> DataLoader[Batch]:
    """Return the loader of all steps, with one worker process except by default."""
    rows = run.dataset.rows("train")
    workers = 0 if run.style == "default" else 1
    return DataLoader(
        _RowDataset(rows, list_rows(run)),
        batch_size=run.rows,
        collate_fn=_Collator(run),
        num_workers=workers,
    )


class _RowDataset(torch.utils.data.Dataset[Any]):
    """Rows of a split as a dataset of torch."""

    def __init__(self, rows: DatasetRows, numbers: list[int]) -> None:
        self._rows = rows
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows.take([self._numbers[index]])[0]


class _Collator:
    """Builds a batch from rows."""

    def __init__(self, run: PeerRun) -> None:
        self._task = run.settings.task
        self._pad = run.dataset.manifest.tokenizer.pad_token_id
        self._max_candidates = run.dataset.manifest.columns[self._task.label].max_group_size

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        """Return texts padded to the longest, [rows x texts, length], features and labels."""
        task = self._task
        texts = [torch.tensor(text) for row in rows for text in self._read_texts(row)]
        lengths = torch.tensor([len(text) for text in texts])
        tokens = pad_sequence(texts, batch_first=True, padding_value=self._pad)
        table = partial(rank.build_feature_table, rows, self._max_candidates)
        hashes = table(task.categorical_features, np.int64(-1))
        return {
            "tokens": tokens,
            "segments": (torch.arange(tokens.shape[1]) < lengths[:, None]).int(),
            "numbers": torch.from_numpy(table(task.numeric_features, np.float32(np.nan))),
            "categories": torch.from_numpy(find_embedding_rows(hashes, task.interactions.buckets)),
            "labels": torch.from_numpy(table((task.label,), np.float32(0))[..., 0]),
            "present": torch.from_numpy(
                rank.build_candidate_mask(rows, self._max_candidates, task.label)
            ),
        }

    def _read_texts(self, row: dict[str, Any]) -> list[np.ndarray]:
        """Return the texts of the query and of all candidates; absent candidates are empty."""
        task = self._task
        query = [row[name] for name in task.query]
        documents = [
            row[name][index] for index in range(len(row[task.label])) for name in task.document
        ]
        empty = np.full(1, self._pad, np.int32)
        num_absent = self._max_candidates * len(task.document) - len(documents)
        return query + documents + [empty] * num_absent


if __name__ == "__main__":
    main()
