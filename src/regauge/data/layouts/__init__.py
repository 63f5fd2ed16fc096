"""Row layouts: how source records become dataset rows. One layout per file.

A layout defines the settings and record fields that it reads. It encodes a record as rows, or as
row chunks, and builds a shard's columns from these. No other module in `data` depends on the layout
kind. By default, a record is a row with a column for each of its texts and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from regauge import config
from regauge.data import dataset
from regauge.data.classes import LabelClasses
from regauge.data.columns import (
    TOKENS_TYPE,
    VALUE_TYPES,
    ColumnStats,
    ValueKind,
    describe_column,
    encode_value,
)
from regauge.data.settings import LAYOUTS, RowLayout, SplitSettings
from regauge.system import choices
from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import numpy as np

    from regauge.data.settings import TokenizerSettings
    from regauge.data.tokenizer import LoadedTokenizer
    from regauge.data.values import Value

    Lengths = dict[str, np.ndarray]


class UnusableRecord(Exception):  # noqa: N818 (no failure: the record is counted and skipped)
    """A record that becomes no row. It is counted; a rejected one is also written to a file."""

    def __init__(self, reason: str, detail: str = "", *, is_rejected: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        """Short reason from a small set, because reasons are counted."""
        self.detail = detail
        self.is_rejected = is_rejected


class EncodedRecord(NamedTuple):
    record: dict[str, Value]
    ids: list[np.ndarray]
    """Each text's token ids, without special tokens around it."""
    tokenizer: LoadedTokenizer
    truncated: Counter[str]
    """Field -> truncated texts; the layout updates it."""
    warnings: Counter[str]
    """Warning with a remedy -> records; the layout updates it."""


class Layout(ABC):
    """One kind of row, configured by the `rows` table."""

    kind: ClassVar[str]
    """Value of `rows.layout`, the file's name."""
    setting_names: ClassVar[tuple[str, ...]]
    """Keys of `rows` read by the layout; any other key is an error."""
    defaults: ClassVar[dict[str, Any]] = {}
    """Defaults other than `RowLayout`'s."""

    def __init__(self, settings: RowLayout) -> None:
        self.settings = settings
        self.left_out: Counter[str] = Counter()
        """Reason -> records too large for a row."""
        self.classes: dict[str, LabelClasses] = {}
        """Classes per label; known when all records are encoded."""

    @classmethod
    def check_settings(cls, settings: RowLayout) -> None:
        """Raise ValueError if settings contradict each other."""
        del settings

    def check_split(self, split: SplitSettings) -> None:
        """Raise ValueError if this layout's rows do not allow a split."""
        del split

    @abstractmethod
    def text_fields(self) -> tuple[str, ...]:
        """Return a record's required text fields."""

    def value_kinds(self) -> dict[str, ValueKind]:
        """Return value field -> kind."""
        return {}

    def select_text_fields(self, record: dict[str, Value]) -> dict[str, Value]:
        """Return the fields with a row's texts; records with equal ones are duplicates."""
        return {name: record[name] for name in self.text_fields() if name in record}

    def select_fields(self, record: dict[str, Value]) -> dict[str, Value]:
        """Return all fields that a row is made from."""
        names = {*self.value_kinds(), self.settings.group_by}
        values = {name: value for name, value in record.items() if name in names}
        return {**self.select_text_fields(record), **values}

    def label_fields(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self.value_kinds().items() if kind == "label")

    def declared_classes(self) -> dict[str, tuple[str, ...]]:
        """Return field -> class names in the run file; empty for a field without them."""
        return {name: self.settings.labels.get(name, ()) for name in self.label_fields()}

    def set_classes(self, classes: dict[str, LabelClasses]) -> None:
        """Set the label classes; raises DataError if rows cannot have them."""
        self.classes = classes

    @abstractmethod
    def token_limits(self) -> dict[str, int]:
        """Return token column -> maximum tokens."""

    def check_fields(self, field_names: tuple[str, ...]) -> None:
        """Raise SettingsError if a source with these fields lacks a required one."""
        for name in (*self.text_fields(), *self.value_kinds()):
            if name not in field_names:
                if field_names:
                    remedy = did_you_mean(name, field_names)
                else:
                    remedy = "its records have no text; use another source"
                raise SettingsError(f"the source has no field '{name}' with a value", remedy)

    def check_inputs(self, tokenizer: TokenizerSettings) -> None:
        """Raise SettingsError if no row can be made, as far as is known before reading."""
        del tokenizer

    def check_tokenizer(self, tokenizer: LoadedTokenizer) -> None:
        """Raise SettingsError if rows cannot be made with a tokenizer."""
        for name, limit in self.token_limits().items():
            if limit <= tokenizer.num_special_tokens:
                raise SettingsError(
                    f"the limit of '{name}' is {limit} tokens and the tokenizer adds"
                    f" {tokenizer.num_special_tokens} special tokens",
                    "increase the limit",
                )

    def to_document(self) -> dict[str, Any]:
        """Return everything with an effect on a dataset's bytes, JSON-ready."""
        return config.dump(self.settings)

    def write_tokenizer_files(self, folder: Path) -> None:
        """Write the layout's files to the dataset's tokenizer folder."""
        del folder

    def encoded_columns(self) -> list[pa.Field]:
        """Return an encoded record's columns: the cells of a row, or of a row chunk."""
        tokens = [pa.field(name, TOKENS_TYPE) for name in self.token_limits()]
        return [
            *tokens,
            *(pa.field(name, VALUE_TYPES[kind]) for name, kind in self.value_kinds().items()),
        ]

    def record_text_columns(self) -> list[pa.Field]:
        """Return the columns for a held-out record's stored texts, before truncation."""
        return []

    def row_text_columns(self) -> list[pa.Field]:
        """Return the same columns for rows."""
        return self.record_text_columns()

    def select_texts(self, record: dict[str, Value], tokenizer: LoadedTokenizer) -> list[str]:
        """Return a record's texts to encode; raises UnusableRecord."""
        del tokenizer
        for name in self.text_fields():
            if not isinstance(record.get(name), str):
                raise UnusableRecord(f"no text in '{name}'")
        for name in self.text_fields():
            if not str(record[name]).strip():
                raise UnusableRecord(f"empty '{name}'", is_rejected=False)
        return [str(record[name]) for name in self.text_fields()]

    def encode_values(self, record: dict[str, Value]) -> list[int | float | list[str] | np.ndarray]:
        """Return a record's value cells; raises UnusableRecord for a value of another kind."""
        cells = []
        for name, kind in self.value_kinds().items():
            try:
                cells.append(encode_value(record.get(name), kind, self.settings.label_spelling))
            except TypeError as error:
                reason = f"no class in '{name}'" if kind == "label" else f"no {kind} field '{name}'"
                raise UnusableRecord(reason, str(error)) from None
        return cells

    def encode_texts(self, texts: list[str], tokenizer: LoadedTokenizer) -> list[np.ndarray]:
        """Return the token ids of many records' texts."""
        return tokenizer.encode(texts)

    @abstractmethod
    def build_cells(self, encoded: EncodedRecord) -> Iterator[list[Any]]:
        """Yield a record's cells for `encoded_columns`; raises UnusableRecord."""

    def build_rows(self, encoded: Iterable[pa.RecordBatch], pad_id: int) -> Iterator[pa.Table]:
        """Yield encoded records as rows in source order; column 0 is the split."""
        del pad_id
        indices = list(range(1, 1 + len(self.encoded_columns())))
        for batch in encoded:
            yield pa.Table.from_batches([batch.select(indices)])

    def build_row_texts(self, encoded: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        """Yield each row's texts before truncation, in `build_rows` order."""
        columns = self.row_text_columns()
        for batch in encoded:
            yield pa.table(batch.columns[-len(columns) :], schema=pa.schema(columns))

    def count_lengths(self, rows: pa.Table) -> Lengths:
        """Return each row's number of tokens in every token column."""
        return {
            name: pc.list_value_length(rows.column(name)).to_numpy() for name in self.token_limits()
        }

    def count_tokens(self, rows: pa.Table, lengths: Lengths) -> int:
        """Return how many tokens rows with these `lengths` have, without padding."""
        del rows
        return sum(int(counts.sum()) for counts in lengths.values())

    def describe_columns(
        self, stats_by_split: dict[str, ColumnStats]
    ) -> dict[str, dataset.ColumnInfo]:
        """Return the manifest entries for row columns, from their statistics by split."""
        texts = {
            name: dataset.ColumnInfo(
                max_length=limit,
                lengths={
                    split: tuple(stats.lengths[name].tolist())
                    for split, stats in stats_by_split.items()
                },
            )
            for name, limit in self.token_limits().items()
        }
        return texts | {
            name: describe_column(
                kind,
                {split: stats.values[name] for split, stats in stats_by_split.items()},
                self._find_classes(name),
            )
            for name, kind in self.value_kinds().items()
        }

    def _find_classes(self, name: str) -> LabelClasses | None:
        """Return a field's classes; before any record is read, the declared ones."""
        declared = self.declared_classes().get(name)
        unread = LabelClasses({}, declared) if declared else None
        return self.classes.get(name, unread)


def build_layout(settings: RowLayout) -> Layout:
    layout: Layout = choices.load(LAYOUTS, settings.layout)(settings)
    return layout
