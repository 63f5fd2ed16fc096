"""Records as a program takes them: their texts as tokens, and their features, cut into batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from regauge.artifacts.buckets import BucketBatch


@dataclass(frozen=True)
class Texts:
    """A text of each record, as tokens."""

    ids: np.ndarray
    """Of all of them behind each other, [tokens] int32."""
    lengths: np.ndarray
    """[records] int64"""

    @classmethod
    def of(cls, lists: Sequence[np.ndarray]) -> Texts:
        """Return texts of which each is given as its ids, int32."""
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        ids = np.concatenate(lists) if lists else np.empty(0, np.int32)
        return cls(ids.astype(np.int32, copy=False), lengths)

    @property
    def starts(self) -> np.ndarray:
        """Where in `ids` each begins, [records]."""
        found: np.ndarray = np.cumsum(self.lengths) - self.lengths
        return found

    def some(self, members: np.ndarray) -> Texts:
        """Return some of the texts, by their places."""
        parts = np.split(self.ids, np.cumsum(self.lengths)[:-1])
        return Texts.of([parts[member] for member in members])

    def padded(self, starts: np.ndarray, members: np.ndarray, batch: BucketBatch) -> np.ndarray:
        """Return the texts of some records, [rows, length] int32, with zeros behind and below."""
        filled = np.zeros((batch.rows, batch.length), np.int32)
        places = np.arange(batch.length)
        real = places < self.lengths[members][:, None]
        filled[: len(members)][real] = self.ids[(starts[members][:, None] + places)[real]]
        return filled


class Rows:
    """Records, each with as many texts and features as all others."""

    def __init__(self, texts: Sequence[Texts], features: Sequence[np.ndarray] = ()) -> None:
        """Take a text of every record in each of `texts`; features are [records, …]."""
        self.texts = tuple(texts)
        self.features = tuple(features)
        self._starts = [each.starts for each in self.texts]

    @classmethod
    def of(cls, lists: Sequence[np.ndarray]) -> Rows:
        """Return records of one text each, given as its ids."""
        return cls([Texts.of(lists)])

    def __len__(self) -> int:
        return len(self.texts[0].lengths)

    def some(self, members: np.ndarray) -> Rows:
        """Return some of the records, by their places."""
        return Rows(
            [each.some(members) for each in self.texts], [each[members] for each in self.features]
        )

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each record's longest text, [records]."""
        found: np.ndarray = np.max([each.lengths for each in self.texts], axis=0)
        return found

    @property
    def tokens(self) -> int:
        """Real tokens of all records."""
        return int(sum(each.lengths.sum() for each in self.texts))

    @property
    def apart(self) -> int:
        """How many texts a record has."""
        return len(self.texts)

    def inputs(self, batch: BucketBatch) -> tuple[Tensor, ...]:
        """Return what a program takes of a batch: tokens, lengths, then each of the features.

        Tokens are [rows, length] and lengths [rows], both int32; of several texts a record
        [rows, texts, length] and [rows, texts].
        """
        members = batch.members
        every = zip(self.texts, self._starts, strict=True)
        tokens = [each.padded(starts, members, batch) for each, starts in every]
        lengths = [_filled(each.lengths.astype(np.int32), batch) for each in self.texts]
        several = len(self.texts) > 1
        arrays = [
            np.stack(tokens, 1) if several else tokens[0],
            np.stack(lengths, 1) if several else lengths[0],
            *(_filled(each, batch) for each in self.features),
        ]
        return tuple(map(torch.from_numpy, arrays))


class Tensors:
    """Records of a module of one's own: a row of each of its tensors."""

    apart = 1

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        """Take arrays, each [records, …]."""
        self._arrays = tuple(arrays)

    def __len__(self) -> int:
        return len(self._arrays[0])

    @property
    def lengths(self) -> np.ndarray:
        """Return one for each record: nothing of them varies, [records]."""
        return np.ones(len(self), np.int64)

    @property
    def tokens(self) -> int:
        """How many records there are."""
        return len(self)

    def some(self, members: np.ndarray) -> Tensors:
        """Return some of the records, by their places."""
        return Tensors([each[members] for each in self._arrays])

    def inputs(self, batch: BucketBatch) -> tuple[Tensor, ...]:
        """Return what a module takes of a batch, with zeros for rows that are empty."""
        return tuple(torch.from_numpy(_filled(each, batch)) for each in self._arrays)


Records = Rows | Tensors


def _filled(values: np.ndarray, batch: BucketBatch) -> np.ndarray:
    """Return what belongs to a batch's members, with zeros for rows that have none."""
    found = np.zeros((batch.rows, *values.shape[1:]), values.dtype)
    found[: len(batch.members)] = values[batch.members]
    return found
