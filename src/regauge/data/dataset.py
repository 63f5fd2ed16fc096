"""A prepared dataset on disk: memory-mapped Arrow shards and one `manifest.json` over them.

    <path>/manifest.json            what is there: hashes, counts, lengths, settings
    <path>/tokenizer/               the tokenizer, loadable by transformers
    <path>/train-00000.arrow …      rows; a column has lists of integers, numbers, or lists of these
    <path>/heldout-00000.arrow …
    <path>/heldout-texts-00000.arrow
                                    the held-out rows as they were read, uncut, where the
                                    layout keeps them
    <path>/rejected.jsonl           records that could not be used, each with its reason

This module reads it. It knows nothing of tasks, and holds no row in memory.
"""

from __future__ import annotations

import bisect
import hashlib
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pydantic

from regauge.config import FORMAT, Settings
from regauge.errors import DataError
from regauge.files import sha256

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
_OF_LATER = ("less_than_equal", "extra_forbidden")
"""What pydantic says of a later format, and of a key that is not known yet."""


class File(Settings):
    """One file of a split."""

    file: str
    """Its name in the dataset's folder."""
    rows: int
    """Rows in the file."""
    sha256: str
    """Hash of the file."""


class Shard(File):
    """One file of rows."""

    tokens: int
    """Real tokens in the file; padding does not count."""


class Field(Settings):
    """One column of a row."""

    limit: int
    """Largest length in tokens; 1 for what is no text."""
    kind: Literal["tokens", "segments", "answers", "number", "real", "category"] = "tokens"
    """Token ids; of each its document, or whether it is of an answer; or a value of a record."""
    lengths: dict[str, tuple[int, ...]] = {}
    """Histogram by split: entry i counts the rows with i tokens, up to `limit`."""
    members: int = 1
    """Most of them in one row: more than one where each record of a group has its own."""
    least: float | None = None
    """Smallest value to train on; None where there is none, and for text and categories."""
    most: float | None = None
    """Largest value to train on."""
    mean: float | None = None
    """Mean of the values to train on."""
    deviation: float | None = None
    """Their standard deviation."""
    ranges: dict[str, tuple[float, float]] = {}
    """Smallest and largest value, by split; none where a split has no value."""
    missing: dict[str, int] = {}
    """Rows without a value, by split."""
    distinct: int | None = None
    """Categories to train on; None where they are more than were counted."""
    unseen: int | None = None
    """Held-out rows whose category is not among those to train on."""


class Split(Settings):
    """The rows of one side of the held-out line."""

    rows: int
    """Rows in all shards."""
    tokens: int
    """Real tokens in all shards."""
    shards: tuple[Shard, ...]
    """The files, in the order of the rows."""
    texts: tuple[File, ...] = ()
    """Files of the same rows as texts, uncut; none where they are not kept."""

    @property
    def files(self) -> tuple[File, ...]:
        """Every file of the split."""
        return (*self.shards, *self.texts)


class TokenizerFacts(Settings):
    """What a task must know of the tokenizer without loading it."""

    sha256: str
    """Hash of `tokenizer.json`."""
    vocabulary: int
    """One more than the largest id."""
    pad: int
    """Id that fills rows up."""
    mask: int | None
    """Id that stands for a hidden token; None where the tokenizer has none."""
    separator: int | None
    """Id that ends a text; None where the tokenizer has none."""
    special: tuple[int, ...]
    """Ids that are no text: never masked."""


class Manifest(Settings):
    """Everything about a prepared dataset that a run depends on."""

    format: Annotated[int, pydantic.Field(le=FORMAT)] = FORMAT
    """Version of this document."""
    layout: str
    """What a row is: a name of `data/layouts`."""
    fields: dict[str, Field]
    """The columns of a row."""
    splits: dict[str, Split]
    """The rows to train on, and the held-out ones."""
    tokenizer: TokenizerFacts
    skipped: dict[str, int] = {}
    """Records that became no row, counted by reason."""
    truncated: dict[str, int] = {}
    """Texts that were cut at their limit, counted by field."""
    settings: dict[str, Any]
    """The tables of the run file that decided the rows."""

    @property
    def identity(self) -> str:
        """The content hash: equal for equal rows and tokenizer, wherever they lie."""
        parts = [shard.sha256 for split in self.splits.values() for shard in split.shards]
        return hashlib.sha256("\n".join([self.tokenizer.sha256, *parts]).encode()).hexdigest()

    @property
    def real_token_share(self) -> float:
        """Real tokens over the slots of filled rows; 1.0 where rows are not padded on disk."""
        filled = [field.limit for field in self.fields.values() if field.kind == "segments"]
        if not filled:
            return 1.0
        slots = sum(split.rows for split in self.splits.values()) * filled[0]
        return sum(split.tokens for split in self.splits.values()) / max(slots, 1)


class Rows:
    """The rows of one split, by number; every look-up reads only the pages it needs."""

    def __init__(self, folder: Path, split: Split) -> None:
        self._shards = [_columns(folder / shard.file) for shard in split.shards]
        self._ends = np.cumsum([shard.rows for shard in split.shards]).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def take(self, ids: Iterable[int]) -> list[dict[str, Any]]:
        """Return rows by number, each a dictionary of arrays, lists of arrays and plain numbers."""
        return [self._row(int(number)) for number in ids]

    def _row(self, number: int) -> dict[str, Any]:
        place = bisect.bisect_right(self._ends, number)
        if number < 0 or place == len(self._ends):
            raise IndexError(f"row {number} of {len(self)}")
        first = self._ends[place - 1] if place else 0
        columns = self._shards[place]
        return {name: column.cell(number - first) for name, column in columns.items()}


class _Column(NamedTuple):
    """Views into a mapped file: `values[offsets[i]:offsets[i + 1]]` is a list, else a number."""

    values: Any
    offsets: np.ndarray | None

    def cell(self, index: int) -> Any:
        if self.offsets is None:
            return self.values[index].item()
        start, stop = self.offsets[index], self.offsets[index + 1]
        if isinstance(self.values, _Column):
            return [self.values.cell(place) for place in range(start, stop)]
        return self.values[start:stop]


class Dataset:
    """A prepared dataset, opened; raises DataError for what is no dataset or was changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)

    def split(self, name: str) -> Rows:
        """Return the rows of "train" or "heldout"."""
        return Rows(self.folder, self._facts(name))

    def heldout(self) -> dict[str, Dataset]:
        """Return the datasets whose held-out rows are measured apart, by name; its own has none."""
        return {"": self}

    def texts(self, split: str, rows: int | None = None) -> list[dict[str, Any]]:
        """Return the first rows of a split, or all, as they were read: whole texts by field.

        A row of several records has lists of them. Empty where they are not kept: the manifest says
        which.
        """
        found: list[dict[str, Any]] = []
        for file in self._facts(split).texts:
            left = None if rows is None else rows - len(found)
            found += _texts(self.folder / file.file, left)
        return found

    def _facts(self, split: str) -> Split:
        if split not in self.manifest.splits:
            known = ", ".join(self.manifest.splits)
            raise DataError(f"{self.folder} has no split '{split}'", f"name one of: {known}")
        return self.manifest.splits[split]

    def verify(self) -> None:
        """Hash every file of rows and texts; raises DataError that names the first that differs."""
        for split in self.manifest.splits.values():
            for file in split.files:
                if sha256(self.folder / file.file) != file.sha256:
                    raise DataError(
                        f"{self.folder / file.file} is not what its manifest says",
                        "run 'regauge prepare' into a new folder",
                    )


def read_manifest(folder: Path) -> Manifest:
    """Read a dataset's manifest; raises DataError with the way out."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no prepared dataset", "make it with 'regauge prepare'"
        ) from None
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] in _OF_LATER:
        raise DataError(f"{path} is of a later Regauge", "update Regauge to read it")
    where = ".".join(map(str, first["loc"])) or "all of it"
    raise DataError(f"{path} is damaged: {where}: {first['msg']}", "run 'regauge prepare' again")


def _columns(path: Path) -> dict[str, _Column]:
    table = _mapped(path)
    return {name: _column(table.column(name)) for name in table.column_names}


def _texts(path: Path, rows: int | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _mapped(path).slice(0, rows).to_pylist()
    return found


def _mapped(path: Path) -> pa.Table:
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read: {error}", "run 'regauge prepare' again") from None


def _column(chunked: Any) -> _Column:
    """Return views into the map; `combine_chunks` would copy even the one chunk of a shard."""
    array = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
    return _views(array)


def _views(array: Any) -> _Column:
    if not pa.types.is_list(array.type):
        return _Column(array.to_numpy(), None)
    inner, offsets = array.values, array.offsets.to_numpy()
    return _Column(_views(inner) if pa.types.is_list(inner.type) else inner.to_numpy(), offsets)
