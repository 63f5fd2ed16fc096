"""Tokenized records, and a batch's input arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.inference.export.buckets import BucketBatch


@dataclass(frozen=True)
class TokenizedTexts:
    """One text per record, tokenized."""

    ids: np.ndarray
    """All texts' tokens, concatenated, [tokens] int32."""
    lengths: np.ndarray
    """Tokens per text, [records] int64."""

    @classmethod
    def from_lists(cls, lists: Sequence[np.ndarray]) -> TokenizedTexts:
        """Return texts, given each one's int32 ids."""
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        ids = np.concatenate(lists) if lists else np.empty(0, np.int32)
        return cls(ids.astype(np.int32, copy=False), lengths)

    @property
    def starts(self) -> np.ndarray:
        """Each text's offset in `ids`, [records]."""
        starts: np.ndarray = np.cumsum(self.lengths) - self.lengths
        return starts

    def select(self, indices: np.ndarray) -> TokenizedTexts:
        lists = np.split(self.ids, np.cumsum(self.lengths)[:-1])
        return TokenizedTexts.from_lists([lists[index] for index in indices])

    def pad_batch(self, starts: np.ndarray, indices: np.ndarray, batch: BucketBatch) -> np.ndarray:
        """Pad texts with zeros to a batch's shape, [rows, length] int32.

        `starts` is the property with this name, computed once by the caller.
        """
        padded = np.zeros((batch.num_rows, batch.length), np.int32)
        positions = np.arange(batch.length)
        is_token = positions < self.lengths[indices][:, None]
        offsets = starts[indices][:, None] + positions
        padded[: len(indices)][is_token] = self.ids[offsets[is_token]]
        return padded


class TextRecords:
    """Records with tokenized texts and features; all have the same number of both."""

    def __init__(
        self, texts: Sequence[TokenizedTexts], features: Sequence[np.ndarray] = ()
    ) -> None:
        """Take one element of `texts` for each text field; features are [records, …]."""
        self.texts = tuple(texts)
        self.features = tuple(features)
        self._starts = [column.starts for column in self.texts]

    @classmethod
    def from_lists(cls, lists: Sequence[np.ndarray]) -> TextRecords:
        """Return records with one text each, given its ids."""
        return cls([TokenizedTexts.from_lists(lists)])

    def __len__(self) -> int:
        return len(self.texts[0].lengths)

    def select(self, indices: np.ndarray) -> TextRecords:
        return TextRecords(
            [column.select(indices) for column in self.texts],
            [values[indices] for values in self.features],
        )

    def slice_arrays(self, index: int) -> list[np.ndarray]:
        """Return one record's arrays: ids and length of each text, then the features."""
        arrays = []
        for column, starts in zip(self.texts, self._starts, strict=True):
            start = starts[index]
            arrays.append(column.ids[start : start + column.lengths[index]])
            arrays.append(column.lengths[index : index + 1])
        return [*arrays, *(values[index : index + 1] for values in self.features)]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each record's longest text, [records]."""
        lengths: np.ndarray = np.max([column.lengths for column in self.texts], axis=0)
        return lengths

    @property
    def num_tokens(self) -> int:
        """Tokens in all records, without padding."""
        return int(sum(column.lengths.sum() for column in self.texts))

    @property
    def texts_per_record(self) -> int:
        """How many separate texts a record has."""
        return len(self.texts)

    def build_inputs(self, batch: BucketBatch) -> tuple[np.ndarray, ...]:
        """Return a program's inputs for a batch: tokens, lengths, then the features.

        Tokens are [rows, length] and lengths [rows], both int32. With several texts per record,
        they are [rows, texts, length] and [rows, texts].
        """
        indices = batch.record_indices
        columns = zip(self.texts, self._starts, strict=True)
        tokens = [column.pad_batch(starts, indices, batch) for column, starts in columns]
        lengths = [_pad_rows(column.lengths.astype(np.int32), batch) for column in self.texts]
        has_several_texts = len(self.texts) > 1
        return (
            np.stack(tokens, 1) if has_several_texts else tokens[0],
            np.stack(lengths, 1) if has_several_texts else lengths[0],
            *(_pad_rows(values, batch) for values in self.features),
        )


class TensorRecords:
    """Custom module records: one row from each input tensor."""

    texts_per_record = 1

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        """Take one array [records, …] for each input tensor."""
        self.arrays = tuple(arrays)

    def __len__(self) -> int:
        return len(self.arrays[0])

    def slice_arrays(self, index: int) -> list[np.ndarray]:
        """Return one record's row in each input tensor."""
        return [values[index : index + 1] for values in self.arrays]

    @property
    def lengths(self) -> np.ndarray:
        """The length 1 for every record, [records]: the shapes do not vary."""
        return np.ones(len(self), np.int64)

    @property
    def num_tokens(self) -> int:
        """Number of records: each counts as one token."""
        return len(self)

    def select(self, indices: np.ndarray) -> TensorRecords:
        return TensorRecords([values[indices] for values in self.arrays])

    def build_inputs(self, batch: BucketBatch) -> tuple[np.ndarray, ...]:
        """Return a module's inputs for a batch, with zeros in empty rows."""
        return tuple(_pad_rows(values, batch) for values in self.arrays)


Records = TextRecords | TensorRecords


def _pad_rows(values: np.ndarray, batch: BucketBatch) -> np.ndarray:
    """Return a batch's record values, with zeros in empty rows, [rows, …]."""
    padded = np.zeros((batch.num_rows, *values.shape[1:]), values.dtype)
    padded[: len(batch.record_indices)] = values[batch.record_indices]
    return padded
