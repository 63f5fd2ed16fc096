"""Row layouts: how the records of a source become the rows of a dataset. One layout per file.

A layout defines the settings and the record fields that it reads. It encodes a record as rows, or
as chunks of rows, and it builds the columns of a shard from these. No other module of `data`
depends on the kind of layout. By default, a record is a row with a column for each of its texts and
values.
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
        """A short reason from a small set, because reasons are counted."""
        self.detail = detail
        self.is_rejected = is_rejected


class EncodedRecord(NamedTuple):
    """A record whose texts are encoded."""

    record: dict[str, Value]
    ids: list[np.ndarray]
    """Token ids of each text, without special tokens around it."""
    tokenizer: LoadedTokenizer
    truncated: Counter[str]
    """Number of truncated texts by field; the layout updates it."""
    warnings: Counter[str]
    """Number of records by warning, each with a remedy; the layout updates it."""


class Layout(ABC):
    """One kind of row, configured by the table `rows`."""

    kind: ClassVar[str]
    """The value of `rows.layout`, which is the name of the file."""
    setting_names: ClassVar[tuple[str, ...]]
    """The keys of `rows` that the layout reads; any other key is an error."""
    defaults: ClassVar[dict[str, Any]] = {}
    """Defaults of settings that differ from the defaults of `RowLayout`."""

    def __init__(self, settings: RowLayout) -> None:
        self.settings = settings
        self.left_out: Counter[str] = Counter()
        """Number of records that did not fit into a row, by reason."""
        self.classes: dict[str, LabelClasses] = {}
        """The classes of each label; they are known when all records are encoded."""

    @classmethod
    def check_settings(cls, settings: RowLayout) -> None:
        """Raise ValueError if settings contradict each other."""
        del settings

    def check_split(self, split: SplitSettings) -> None:
        """Raise ValueError if the rows of this layout do not allow a split."""
        del split

    @abstractmethod
    def text_fields(self) -> tuple[str, ...]:
        """Return the text fields that a record must have."""

    def value_kinds(self) -> dict[str, ValueKind]:
        """Return the kinds of the fields that are values, by name."""
        return {}

    def label_fields(self) -> tuple[str, ...]:
        """Return the names of the fields with classes."""
        return tuple(name for name, kind in self.value_kinds().items() if kind == "label")

    def declared_classes(self) -> dict[str, tuple[str, ...]]:
        """Return the class names of the run file by field; empty for a field without them."""
        return {name: self.settings.labels.get(name, ()) for name in self.label_fields()}

    def set_classes(self, classes: dict[str, LabelClasses]) -> None:
        """Set the classes of the labels; raises DataError if rows cannot have them."""
        self.classes = classes

    @abstractmethod
    def token_limits(self) -> dict[str, int]:
        """Return the maximum number of tokens of each column of tokens."""

    def check_fields(self, field_names: tuple[str, ...]) -> None:
        """Raise SettingsError if a source with these fields lacks one that the layout needs."""
        for name in (*self.text_fields(), *self.value_kinds()):
            if name not in field_names:
                if field_names:
                    remedy = did_you_mean(name, field_names)
                else:
                    remedy = "its records have no text; use another source"
                raise SettingsError(f"the source has no field '{name}' with a value", remedy)

    def check_inputs(self, tokenizer: TokenizerSettings) -> None:
        """Raise SettingsError if it is known before reading that no row can be made."""
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
        """Return everything of the layout that determines the bytes of a dataset, JSON-ready."""
        return config.dump(self.settings)

    def write_tokenizer_files(self, folder: Path) -> None:
        """Write the files that the layout adds to the folder of the dataset's tokenizer."""
        del folder

    def encoded_columns(self) -> list[pa.Field]:
        """Return the columns of an encoded record: the cells of a row, or of a chunk of one."""
        tokens = [pa.field(name, TOKENS_TYPE) for name in self.token_limits()]
        return [
            *tokens,
            *(pa.field(name, VALUE_TYPES[kind]) for name, kind in self.value_kinds().items()),
        ]

    def record_text_columns(self) -> list[pa.Field]:
        """Return the columns of texts that are stored of a held-out record, before truncation."""
        return []

    def row_text_columns(self) -> list[pa.Field]:
        """Return the same columns for rows."""
        return self.record_text_columns()

    def select_texts(self, record: dict[str, Value], tokenizer: LoadedTokenizer) -> list[str]:
        """Return the texts of a record to encode; raises UnusableRecord."""
        del tokenizer
        for name in self.text_fields():
            if not isinstance(record.get(name), str):
                raise UnusableRecord(f"no text in '{name}'")
        for name in self.text_fields():
            if not str(record[name]).strip():
                raise UnusableRecord(f"empty '{name}'", is_rejected=False)
        return [str(record[name]) for name in self.text_fields()]

    def encode_values(self, record: dict[str, Value]) -> list[int | float | list[str] | np.ndarray]:
        """Return the cells of a record's values; raises UnusableRecord for one of another kind."""
        cells = []
        for name, kind in self.value_kinds().items():
            try:
                cells.append(encode_value(record.get(name), kind))
            except TypeError as error:
                reason = f"no class in '{name}'" if kind == "label" else f"no {kind} field '{name}'"
                raise UnusableRecord(reason, str(error)) from None
        return cells

    def encode_texts(self, texts: list[str], tokenizer: LoadedTokenizer) -> list[np.ndarray]:
        """Return the token ids of the texts of many records."""
        return tokenizer.encode(texts)

    @abstractmethod
    def build_cells(self, encoded: EncodedRecord) -> Iterator[list[Any]]:
        """Yield the cells of `encoded_columns` that a record gives; raises UnusableRecord."""

    def build_rows(self, encoded: Iterable[pa.RecordBatch], pad_id: int) -> Iterator[pa.Table]:
        """Yield the rows of encoded records in the order of the source; column 0 is the split."""
        del pad_id
        indices = list(range(1, 1 + len(self.encoded_columns())))
        for batch in encoded:
            yield pa.Table.from_batches([batch.select(indices)])

    def build_row_texts(self, encoded: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        """Yield the texts of each row before truncation, in the order of `build_rows`."""
        columns = self.row_text_columns()
        for batch in encoded:
            yield pa.table(batch.columns[-len(columns) :], schema=pa.schema(columns))

    def count_lengths(self, rows: pa.Table) -> Lengths:
        """Return the number of tokens of each row in every column of tokens."""
        return {
            name: pc.list_value_length(rows.column(name)).to_numpy() for name in self.token_limits()
        }

    def count_tokens(self, rows: pa.Table, lengths: Lengths) -> int:
        """Return the number of tokens of rows with these `lengths`, without padding."""
        del rows
        return sum(int(counts.sum()) for counts in lengths.values())

    def describe_columns(
        self, stats_by_split: dict[str, ColumnStats]
    ) -> dict[str, dataset.ColumnInfo]:
        """Return the manifest entries of the columns of a row, from their statistics by split."""
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
        """Return the classes of a field; before any record is read, the declared ones."""
        declared = self.declared_classes().get(name)
        unread = LabelClasses({}, declared) if declared else None
        return self.classes.get(name, unread)


def build_layout(settings: RowLayout) -> Layout:
    """Return the layout that a table `rows` defines."""
    layout: Layout = choices.load(LAYOUTS, settings.layout)(settings)
    return layout
