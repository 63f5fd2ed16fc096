"""Loads one process's batches: a step number in, arrays out, built in advance by threads.

A global batch is split into the same microbatches for every world size. If batches may have any
shape, their texts are packed into rows with little padding. Rank r of n processes takes
microbatches r, r + n, …. A rank with fewer microbatches than the others adds an empty one, so that
all ranks join every collective.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey, build_packing
from regauge.data.dataset import ExtendedRows
from regauge.data.row_order import PADDING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from regauge.data.dataset import Dataset, DatasetRows
    from regauge.system.processes import World


EVALUATION = -1
"""Epoch and step in the random key for held-out batches, so that these are equal in every run."""


class Collator(Protocol):
    """Task functions called by a loader."""

    def split_batch(
        self,
        rows: DatasetRows,
        row_numbers: np.ndarray,  # [global batch]
        microbatch_rows: int,
        bucket_lengths: tuple[int, ...],
    ) -> list[MicrobatchPlan]:
        """Split a global batch into microbatches of equal size."""
        ...

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build the arrays for one microbatch."""
        ...


@dataclass(frozen=True)
class CollatorConfig:
    """Token ids and limits for building a batch."""

    vocab_size: int
    """One more than the largest token id."""
    pad_id: int
    mask_id: int | None
    """Mask token id, if the tokenizer has one."""
    special_ids: tuple[int, ...]
    max_group_size: int = 1
    """Maximum records per row."""


@dataclass(frozen=True)
class RankShare:
    """One rank's microbatches in a global batch."""

    rank: int
    """Process index."""
    size: int
    """Number of processes."""

    def select(
        self, plans: list[MicrobatchPlan], bucket_lengths: tuple[int, ...]
    ) -> list[MicrobatchPlan]:
        """Return this rank's microbatches; every rank gets the same number."""
        selected = plans[self.rank :: self.size]
        num_missing = -(-len(plans) // self.size) - len(selected)
        return selected + [plans[-1].build_empty(bucket_lengths[0])] * num_missing


class BatchLoader:
    def __init__(
        self,
        collator: Collator,
        rows: DatasetRows,
        *,
        config: CollatorConfig,
        microbatch_rows: int,
        bucket_lengths: tuple[int, ...],
        share: RankShare,
        seed: int,
    ) -> None:
        self._collator = collator
        self._rows = rows
        self._config = config
        self._microbatch_rows = microbatch_rows
        self._bucket_lengths = bucket_lengths
        self._share = share
        self._seed = seed
        self._packs_texts = False

    def pack_texts(self) -> None:
        """Pack the texts in later training batches, because no shape needs a separate graph."""
        self._packs_texts = True

    def __len__(self) -> int:
        return len(self._rows)

    def add_columns(self, columns: Mapping[str, np.ndarray]) -> None:
        """Add columns to the rows in all later batches: [rows] arrays by name."""
        self._rows = ExtendedRows(self._rows, columns)

    def load_batches(self, row_numbers: np.ndarray, *, epoch: int, step: int) -> list[Arrays]:
        """Return this process's batches for a global batch of row numbers."""
        return list(self._build_batches(row_numbers, RandomKey(self._seed, epoch, step)))

    def _build_batches(self, row_numbers: np.ndarray, key: RandomKey) -> Iterator[Arrays]:
        plans = self._collator.split_batch(
            self._rows, row_numbers, self._microbatch_rows, self._bucket_lengths
        )
        for plan in self._share.select(plans, self._bucket_lengths):
            batch = self._collator.build_batch(self._rows, plan, key, self._config)
            yield batch | build_packing(batch["segments"]) if self._packs_texts else batch

    def count_tokens(self, row_numbers: np.ndarray, *, epoch: int, step: int) -> tuple[int, int]:
        """Count this process's real and computed tokens in a global batch."""
        batches = self._build_batches(row_numbers, RandomKey(self._seed, epoch, step))
        real, computed = map(sum, zip(*map(count_tokens, batches), strict=True))
        return real, computed

    def read_row(self, number: int) -> dict[str, np.ndarray]:
        """Return one dataset row, unchanged."""
        return self._rows.take([number])[0]

    @property
    def largest_shape(self) -> tuple[int, int]:
        """Rows and tokens in the largest batch."""
        return self._microbatch_rows, self._bucket_lengths[-1]

    def build_empty_batch(self, slots: int, length: int) -> Arrays:
        """Return a batch with a given shape and no rows; all weights are 0."""
        row_numbers = np.full(slots, PADDING)
        zeros = np.zeros(slots, np.int64)
        plan = MicrobatchPlan(row_numbers, zeros, zeros, length)
        return self._collator.build_batch(
            self._rows, plan, RandomKey(self._seed, 0, 0), self._config
        )

    def load_evaluation_batches(self, row_numbers: np.ndarray) -> tuple[Iterator[Arrays], int]:
        """Return this process's batches, covering given rows once, and the padded row count.

        Each batch has its rows' `slots`, and whether they are `real`. The padded count includes the
        rows at the end of the last microbatch.
        """
        num_padded = -(-len(row_numbers) // self._microbatch_rows) * self._microbatch_rows
        padded = np.full(num_padded, PADDING, np.int64)
        padded[: len(row_numbers)] = row_numbers
        plans = self._collator.split_batch(
            self._rows, padded, self._microbatch_rows, self._bucket_lengths
        )
        key = RandomKey(self._seed, EVALUATION, EVALUATION)
        local_plans = self._share.select(plans, self._bucket_lengths)

        def build_batch(plan: MicrobatchPlan) -> Arrays:
            is_real = (plan.row_numbers != PADDING).astype(np.float32)
            arrays = self._collator.build_batch(self._rows, plan, key, self._config)
            return {"slots": plan.slots, "real": is_real, **arrays}

        return map(build_batch, local_plans), num_padded


def build_loader(
    task: Collator,
    dataset: Dataset,
    split: str,
    *,
    world: World,
    rows: int,
    bucket_lengths: tuple[int, ...],
    seed: int,
) -> BatchLoader:
    """Return this process's loader for a split; `rows` is the microbatch size."""
    tokenizer = dataset.manifest.tokenizer
    members = max(field.max_group_size for field in dataset.manifest.columns.values())
    return BatchLoader(
        task,
        dataset.rows(split),
        config=CollatorConfig(
            tokenizer.vocab_size,
            tokenizer.pad_token_id,
            tokenizer.mask_token_id,
            tokenizer.special_token_ids,
            members,
        ),
        microbatch_rows=rows,
        bucket_lengths=bucket_lengths,
        share=RankShare(world.rank, world.size),
        seed=seed,
    )


def count_tokens(batch: dict[str, Any]) -> tuple[int, int]:
    """Count a batch's real tokens, and its computed tokens, padding included."""
    segments = batch["segments"]
    return int(np.count_nonzero(segments)), int(batch.get("packed", segments).size)


def prefetch_batches(
    load_step: Callable[[int], list[Arrays]], start: int, stop: int, *, workers: int, max_ahead: int
) -> Generator[list[Arrays]]:
    """Yield the batches for steps start … stop-1; threads build up to `max_ahead` steps early."""
    if workers == 0:
        yield from (load_step(step) for step in range(start, stop))
        return
    waiting: deque[Future[list[Arrays]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="loader") as pool:
        try:
            for step in range(start, stop):
                waiting.append(pool.submit(load_step, step))
                if len(waiting) > max_ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
