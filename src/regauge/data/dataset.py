"""A prepared dataset on disk: memory-mapped Arrow shards and one `manifest.json`.

    <path>/manifest.json            hashes, counts, lengths and settings
    <path>/tokenizer/               the tokenizer, loadable by transformers
    <path>/train-00000.arrow …      rows; a column has lists of integers, numbers, or lists of these
    <path>/heldout-00000.arrow …
    <path>/heldout-texts-00000.arrow
                                    held-out texts before truncation, if the layout stores them
    <path>/rejected.jsonl           unusable records, each with its reason

This module reads it. It does not depend on tasks, and keeps no rows in memory. The manifest is read
without numpy and pyarrow.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pydantic

from regauge.config import FORMAT, Settings, find_document
from regauge.system.errors import DataError
from regauge.system.files import check_file, sha256
from regauge.system.json_files import describe_mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import numpy as np
    import pyarrow as pa

MANIFEST = "manifest.json"
TOKENIZER_FOLDER, TOKENIZER = "tokenizer", "tokenizer.json"
TOKENIZER_SUFFIXES = {".json", ".txt", ".model", ".jinja"}
"""Suffixes of tokenizer files read by libraries."""
REJECTED = "rejected.jsonl"
REPEAT_REMEDY = "run 'regauge prepare' again, with another data.path"


class FileInfo(Settings):
    """A file in a split."""

    file: str
    """File name in the dataset folder."""
    rows: int
    """Rows in the file."""
    sha256: str
    """SHA-256 of the file."""


class ShardInfo(FileInfo):
    """A file with rows."""

    tokens: int
    """Tokens in the file, without padding."""


class ValueStatistics(Settings):
    """Statistics for a value column; empty for text."""

    min: float | None = None
    """Training minimum; None for text, for categories and without values. Vectors count as
    Euclidean norms."""
    max: float | None = None
    """Training maximum."""
    mean: float | None = None
    """Training mean."""
    std: float | None = None
    """Training standard deviation."""
    ranges: dict[str, tuple[float, float]] = {}
    """Split -> (minimum, maximum); a split without values is missing."""
    num_missing: dict[str, int] = {}
    """Split -> rows without a value."""
    num_distinct: int | None = None
    """Distinct training categories; None if there are too many to count."""
    num_unseen: int | None = None
    """Held-out rows whose category does not occur in training rows."""
    class_counts: dict[str, tuple[int, ...]] = {}
    """Split -> rows per label class; a row with several classes counts in each."""


class ColumnInfo(ValueStatistics):
    """A row column."""

    max_length: int
    """Maximum tokens; a vector's size, or 0 before it is known; 1 for other values."""
    kind: Literal[
        "tokens", "segments", "loss_mask", "integer", "integers", "float", "category", "vector"
    ] = "tokens"
    """"tokens" are token ids. "segments" numbers each token's document. "loss_mask" is 1 for answer
    tokens, else 0. The other kinds are values: an integer, a list of integers, a float, a
    category or a vector of floats."""
    lengths: dict[str, tuple[int, ...]] = {}
    """Split -> length histogram: entry i is the number of rows with i tokens."""
    max_group_size: int = 1
    """Maximum cells per row; more than 1 if records in a group have separate cells."""
    prompt: str = ""
    """Text before each text in the column; the column includes the prompt's tokens."""
    class_names: tuple[str, ...] | None = None
    """Names of label classes 0, 1, …; None if classes are numbers."""

    @property
    def num_classes(self) -> int | None:
        """How many classes an integer column has; None without values."""
        if self.class_names is not None:
            return len(self.class_names)
        highest = [maximum for _, maximum in self.ranges.values()]
        return int(max(highest)) + 1 if highest else None


class SplitInfo(Settings):
    """The training rows or the held-out rows."""

    rows: int
    """Rows in all shards."""
    tokens: int
    """Tokens in all shards, without padding."""
    shards: tuple[ShardInfo, ...]
    """Shards in row order."""
    text_files: tuple[FileInfo, ...] = ()
    """Files with the same rows' texts before truncation; empty if not stored."""

    @property
    def files(self) -> tuple[FileInfo, ...]:
        return (*self.shards, *self.text_files)


class TokenizerInfo(Settings):
    """What a task needs to know about a tokenizer without loading it."""

    sha256: str
    """SHA-256 of `tokenizer.json`."""
    vocab_size: int
    """One more than the largest token id."""
    pad_token_id: int
    """Padding token id."""
    mask_token_id: int | None
    """Mask token id, if the tokenizer has one."""
    sep_token_id: int | None
    """Id of the token after a text, if the tokenizer has one."""
    special_token_ids: tuple[int, ...]
    """Ids never to mask."""
    truncation_side: Literal["left", "right"] = "right"
    """Side on which long texts were truncated."""


class DatasetManifest(Settings):
    """A prepared dataset's description: everything a run depends on."""

    format: int = FORMAT
    """Document format version."""
    layout: str
    """Row layout: a file name in `data/layouts`."""
    columns: dict[str, ColumnInfo]
    """Name -> row column."""
    splits: dict[str, SplitInfo]
    """The splits "train" and "heldout"."""
    tokenizer: TokenizerInfo
    """Tokenizer for the rows."""
    special_tokens: Literal["guessed", "read"] = "guessed"
    """`read` from the tokenizer's post-processor; older versions guessed those around "a"."""
    skipped: dict[str, int] = {}
    """Reason -> records without a row."""
    truncated: dict[str, int] = {}
    """Field -> texts truncated at their limit."""
    warnings: dict[str, int] = {}
    """Layout warning -> records, for example about data missing from the rows."""
    settings: dict[str, Any]
    """Run file tables with an effect on the rows."""
    files: dict[str, str] = {}
    """Path in the dataset, such as `tokenizer/tokenizer.json` -> SHA-256 of every other file; empty
    in datasets from earlier versions."""

    @property
    def fingerprint(self) -> str:
        """Content hash: equal for equal rows, tokenizer and class names in any location."""
        hashes = [shard.sha256 for split in self.splits.values() for shard in split.shards]
        names = [
            json.dumps([name, column.class_names])
            for name, column in sorted(self.columns.items())
            if column.class_names is not None
        ]
        parts = [self.tokenizer.sha256, *hashes, *names]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def real_token_fraction(self) -> float:
        """Fraction of tokens other than padding; 1.0 if rows are not padded on disk."""
        row_lengths = [
            field.max_length for field in self.columns.values() if field.kind == "segments"
        ]
        if not row_lengths:
            return 1.0
        slots = sum(split.rows for split in self.splits.values()) * row_lengths[0]
        return sum(split.tokens for split in self.splits.values()) / max(slots, 1)


class DatasetRows:
    """One split's rows by number; a look-up reads only the pages it needs."""

    def __init__(self, folder: Path, split: SplitInfo) -> None:
        self._shards = [_map_columns(folder / shard.file, shard.rows) for shard in split.shards]
        self._ends = list(accumulate(shard.rows for shard in split.shards))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def take(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Return rows by number.

        A row is a dictionary by column. Its cells are arrays, lists of arrays, or Python numbers.
        """
        return [self._row(int(number)) for number in numbers]

    def read_column(self, name: str) -> np.ndarray:
        """Return a column's values in row order; lists are concatenated."""
        import numpy as np

        parts = [columns[name].values for columns in self._shards]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _row(self, number: int) -> dict[str, Any]:
        shard = bisect.bisect_right(self._ends, number)
        if number < 0 or shard == len(self._ends):
            raise IndexError(f"row {number} of {len(self)}")
        first = self._ends[shard - 1] if shard else 0
        columns = self._shards[shard]
        return {name: column.cell(number - first) for name, column in columns.items()}


class ExtendedRows(DatasetRows):
    """Rows with extra in-memory columns: [rows] arrays by name.

    Row numbers past the last row wrap around.
    """

    def __init__(self, rows: DatasetRows, columns: Mapping[str, np.ndarray]) -> None:
        self._rows = rows
        self._columns = dict(columns)

    def __len__(self) -> int:
        return len(self._rows)

    def read_column(self, name: str) -> np.ndarray:
        return self._columns[name] if name in self._columns else self._rows.read_column(name)

    def take(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        rows = []
        for number in numbers:
            (row,) = self._rows.take([number])
            index = int(number) % len(self)
            cells = {name: values[index].item() for name, values in self._columns.items()}
            rows.append({**row, **cells})
        return rows


class _Column(NamedTuple):
    """Views into a mapped file: cell i is `values[offsets[i]:offsets[i + 1]]`, or `values[i]`."""

    values: Any
    offsets: np.ndarray | None

    def cell(self, index: int) -> Any:
        if self.offsets is None:
            return self.values[index].item()
        start, stop = self.offsets[index], self.offsets[index + 1]
        if isinstance(self.values, _Column):
            return [self.values.cell(item) for item in range(start, stop)]
        return self.values[start:stop]


class Dataset:
    """A prepared dataset; raises DataError if the folder holds none, or a changed one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)

    def rows(self, name: str) -> DatasetRows:
        """Return a split's rows, "train" or "heldout"."""
        return DatasetRows(self.folder, self._split_info(name))

    def heldout_sets(self) -> dict[str, Dataset]:
        """Return the datasets to evaluate separately on their held-out rows; "" is this dataset."""
        return {"": self}

    def read_texts(self, split: str, max_rows: int | None = None) -> list[dict[str, Any]]:
        """Return the untruncated texts of a split's first rows, or of all, by field.

        A row with several records has a list of texts. The result is empty if the dataset does not
        store the texts; the manifest lists the fields it stores.
        """
        texts: list[dict[str, Any]] = []
        for file in self._split_info(split).text_files:
            num_left = None if max_rows is None else max_rows - len(texts)
            texts += _map_table(self.folder / file.file).slice(0, num_left).to_pylist()
        return texts

    def _split_info(self, split: str) -> SplitInfo:
        if split not in self.manifest.splits:
            known = ", ".join(self.manifest.splits)
            raise DataError(f"{self.folder} has no split '{split}'", f"name one of: {known}")
        return self.manifest.splits[split]

    def verify(self) -> None:
        """Hash every file; raises DataError for the first difference."""
        splits = self.manifest.splits.values()
        hashes = {file.file: file.sha256 for split in splits for file in split.files}
        for name, expected in {**hashes, **self.manifest.files}.items():
            _check_hash(self.folder / name, expected)


def read_manifest_file(path: Path) -> DatasetManifest:
    """Read a manifest file; raises DataError if it is missing or damaged."""
    document = find_document(path, REPEAT_REMEDY)
    if document is None:
        raise DataError(
            f"{path.parent} has no prepared dataset", "create it with 'regauge prepare'"
        )
    try:
        return DatasetManifest.model_validate_json(json.dumps(document))
    except pydantic.ValidationError as error:
        raise DataError(f"{path} is damaged: {describe_mismatch(error)}", REPEAT_REMEDY) from None


def read_manifest(folder: Path) -> DatasetManifest:
    """Read a dataset's manifest.

    Raises DataError if it is missing, damaged or in another format, or if a tokenizer file is
    missing, changed or new. The rows are not read.
    """
    path = folder / MANIFEST
    manifest = read_manifest_file(path)
    if missing := {"train", "heldout"} - manifest.splits.keys():
        raise DataError(f"{path} is damaged: it has no split '{min(missing)}'", REPEAT_REMEDY)
    _check_tokenizer_files(folder, manifest)
    return manifest


def assume_manifest(layout: str, columns: dict[str, ColumnInfo]) -> DatasetManifest:
    """Return the manifest of rows that are not prepared; its tokenizer suits every model."""
    tokenizer = TokenizerInfo(
        sha256=hashlib.sha256(b"").hexdigest(),
        vocab_size=1,
        pad_token_id=0,
        mask_token_id=0,
        sep_token_id=0,
        special_token_ids=(),
    )
    return DatasetManifest(
        layout=layout, columns=columns, splits={}, tokenizer=tokenizer, settings={}
    )


def hash_other_files(folder: Path) -> dict[str, str]:
    """Hash the dataset files other than rows and the manifest, by SHA-256."""
    paths = [*sorted((folder / TOKENIZER_FOLDER).rglob("*")), folder / REJECTED]
    return {str(path.relative_to(folder)): sha256(path) for path in paths if path.is_file()}


def _check_tokenizer_files(folder: Path, manifest: DatasetManifest) -> None:
    if not manifest.files:
        return
    for name, expected in manifest.files.items():
        if name != REJECTED:
            _check_hash(folder / name, expected)
    paths = (folder / TOKENIZER_FOLDER).glob("*")
    names = {str(path.relative_to(folder)) for path in paths if path.suffix in TOKENIZER_SUFFIXES}
    if added := names - manifest.files.keys():
        problem = f"{folder / min(added)} was added after the dataset was prepared"
        raise DataError(problem, "remove it")


def _check_hash(path: Path, expected: str) -> None:
    """Raise DataError if a dataset file is missing or has another SHA-256."""
    check_file(path, REPEAT_REMEDY)
    if sha256(path) != expected:
        raise DataError(f"{path} differs from the hash in its manifest", REPEAT_REMEDY)


def _map_columns(path: Path, num_rows: int) -> dict[str, _Column]:
    table = _map_table(path)
    if table.num_rows != num_rows:
        problem = f"{path} has {table.num_rows} rows; its manifest lists {num_rows}"
        raise DataError(problem, REPEAT_REMEDY)
    return {name: _map_column(table.column(name)) for name in table.column_names}


def _map_table(path: Path) -> pa.Table:
    import pyarrow as pa

    check_file(path, "run 'regauge prepare' again")
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}", "run 'regauge prepare' again") from None


def _map_column(chunked: Any) -> _Column:
    """Return views of the mapped memory; `combine_chunks` would copy even a single chunk."""
    array = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
    return _view_array(array)


def _view_array(array: Any) -> _Column:
    """Return views of an array without nulls; its `to_numpy` would import pandas."""
    import numpy as np
    import pyarrow as pa

    if not pa.types.is_list(array.type):
        return _Column(np.from_dlpack(array), None)
    inner, offsets = array.values, np.from_dlpack(array.offsets)
    return _Column(
        _view_array(inner) if pa.types.is_list(inner.type) else np.from_dlpack(inner), offsets
    )
