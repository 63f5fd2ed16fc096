"""What a row is: one layout per file, which says everything that is particular to it.

A layout names the settings that it reads and the fields of a record that it needs; it turns a
record into encoded rows, or parts of rows, and these into the columns of a shard. Nothing else in
`data` asks which layout it has. What a file leaves out is the simplest answer: a record is a row,
with a column for each of its texts and numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from regauge import choices, config
from regauge.choices import did_you_mean
from regauge.data import dataset
from regauge.data.columns import TOKENS, VALUES, Found, Kind, described, value
from regauge.data.settings import LAYOUTS, RowLayout, Split
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import numpy as np

    from regauge.data.settings import Tokenizer
    from regauge.data.sources import Value
    from regauge.data.tokenizer import Encoder

    Lengths = dict[str, np.ndarray]

WORDS: dict[Kind, str] = {"number": "integer", "real": "real", "category": "category"}
"""How the kinds of values are called where one is missing."""


class Unfit(Exception):  # noqa: N818 (it ends nothing: a record is counted and passed over)
    """Why a record becomes no row; what is bad about it is written down as well."""

    def __init__(self, reason: str, detail: str = "", *, bad: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        """One of few, because they are counted."""
        self.detail = detail
        self.bad = bad


class Encoded(NamedTuple):
    """A record whose texts are encoded."""

    record: dict[str, Value]
    ids: list[np.ndarray]
    """Those of each of its texts, without special tokens around them."""
    encoder: Encoder
    truncated: Counter[str]
    """Texts that are cut, by field; a layout counts them here."""


class Layout(ABC):
    """One kind of row, made by its settings."""

    kind: ClassVar[str]
    """The value of `rows.layout`: the name of the file."""
    keys: ClassVar[tuple[str, ...]]
    """The settings of `rows` that it reads; any other one is refused."""
    defaults: ClassVar[dict[str, Any]] = {}
    """Settings whose default is another one here."""

    def __init__(self, settings: RowLayout) -> None:
        self.settings = settings
        self.left_out: Counter[str] = Counter()
        """Records that no row has room for, by reason, of those that were laid out."""

    @classmethod
    def check(cls, settings: RowLayout) -> None:
        """Raise ValueError for settings that do not fit together."""
        del settings

    def check_split(self, split: Split) -> None:
        """Raise ValueError where rows of the layout cannot be split so."""
        del split

    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """Return the text fields that a record must have."""

    def values(self) -> dict[str, Kind]:
        """Return the fields that are no text, each with its kind."""
        return {}

    @abstractmethod
    def limits(self) -> dict[str, int]:
        """Return the columns of a row that hold tokens, with the most tokens of each."""

    def check_fields(self, known: tuple[str, ...]) -> None:
        """Raise SettingsError where these are all fields of a source, and not enough."""
        for name in (*self.reads(), *self.values()):
            if name not in known:
                remedy = did_you_mean(name, known) if known else "its records hold no text"
                raise SettingsError(f"the source has no field '{name}'", remedy)

    def check_inputs(self, tokenizer: Tokenizer) -> None:
        """Raise SettingsError where it is known before anything is read that no row can be made."""
        del tokenizer

    def check_tokenizer(self, encoder: Encoder) -> None:
        """Raise SettingsError where rows cannot be made with a tokenizer."""
        for name, limit in self.limits().items():
            if limit <= encoder.overhead:
                raise SettingsError(
                    f"'{name}' has {limit} tokens and the tokenizer's special ones take them all",
                    "raise its limit",
                )

    def document(self) -> dict[str, Any]:
        """Return everything of the layout that decides the bytes of a dataset."""
        return config.dump(self.settings)

    def finish(self, tokenizer: Path) -> None:
        """Write what the layout adds to the folder of the dataset's tokenizer."""
        del tokenizer

    def columns(self) -> list[pa.Field]:
        """Return what is encoded of a record: the columns of a row, or of a part of one."""
        tokens = [pa.field(name, TOKENS) for name in self.limits()]
        return [*tokens, *(pa.field(name, VALUES[kind]) for name, kind in self.values().items())]

    def kept(self) -> list[pa.Field]:
        """Return the columns of the whole texts that are kept of a held-out record."""
        return []

    def kept_of_row(self) -> list[pa.Field]:
        """Return the same columns of a row."""
        return self.kept()

    def texts(self, record: dict[str, Value], encoder: Encoder) -> list[str]:
        """Return the texts of a record that are to be encoded; raises Unfit."""
        del encoder
        for name in self.reads():
            if not isinstance(record.get(name), str):
                raise Unfit(f"no text in '{name}'")
        for name in self.reads():
            if not str(record[name]).strip():
                raise Unfit(f"empty '{name}'", bad=False)
        return [str(record[name]) for name in self.reads()]

    def cells(self, record: dict[str, Value]) -> list[int | float]:
        """Return the cells of a record's values; raises Unfit for one of the wrong kind."""
        found = []
        for name, kind in self.values().items():
            try:
                found.append(value(record.get(name), kind))
            except TypeError as error:
                raise Unfit(f"no {WORDS[kind]} field '{name}'", str(error)) from None
        return found

    def encode(self, texts: list[str], encoder: Encoder) -> list[np.ndarray]:
        """Return the ids of texts of many records."""
        return encoder.encode(texts)

    @abstractmethod
    def rows(self, encoded: Encoded) -> Iterator[list[Any]]:
        """Yield the cells of `columns` that a record gives; raises Unfit."""

    def laid_out(self, encoded: Iterable[pa.RecordBatch], pad: int) -> Iterator[pa.Table]:
        """Yield the rows of encoded records in the source's order; their first column is apart."""
        del pad
        places = list(range(1, 1 + len(self.columns())))
        for batch in encoded:
            yield pa.Table.from_batches([batch.select(places)])

    def laid_texts(self, encoded: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        """Yield the whole texts of each row, in the order of `laid_out`."""
        columns = self.kept_of_row()
        for batch in encoded:
            yield pa.table(batch.columns[-len(columns) :], schema=pa.schema(columns))

    def lengths(self, rows: pa.Table) -> Lengths:
        """Return how many tokens each row has in every column of `limits`."""
        return {name: pc.list_value_length(rows.column(name)).to_numpy() for name in self.limits()}

    def tokens(self, rows: pa.Table, lengths: Lengths) -> int:
        """Return how many real tokens rows of these `lengths` have."""
        del rows
        return sum(int(found.sum()) for found in lengths.values())

    def fields(self, found: dict[str, Found]) -> dict[str, dataset.Field]:
        """Return the columns of a row for the manifest, of what was found in each split."""
        texts = {
            name: dataset.Field(
                limit=limit,
                lengths={
                    split: tuple(each.lengths[name].tolist()) for split, each in found.items()
                },
            )
            for name, limit in self.limits().items()
        }
        return texts | {
            name: described(kind, {split: each.values[name] for split, each in found.items()})
            for name, kind in self.values().items()
        }


def layout_of(settings: RowLayout) -> Layout:
    """Return the layout that a table of a run file describes."""
    found: Layout = choices.load(LAYOUTS, settings.layout)(settings)
    return found
