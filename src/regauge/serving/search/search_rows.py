"""Search rows: vectors and kept fields from `predict`, in one memory-mapped file.

The Parquet files from `predict` are compressed, so reading a single row is slow. They are converted
once, block by block, to an uncompressed Arrow file. The operating system loads and evicts pages, so
the vectors may be larger than the memory.
"""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from regauge import config
from regauge.config.output_files import JOB, RESULT
from regauge.inference.export.manifest import Dtype
from regauge.inference.export.postprocess import restore_vectors
from regauge.inference.predict.job import list_output_paths, read_finished_shards
from regauge.system.errors import DataError, SettingsError, first_line
from regauge.system.files import replace_atomically
from regauge.system.json_files import DocumentShape
from regauge.system.log import logger
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORMAT = 1
"""Version of the derived files; it is part of their names."""
BLOCK_ROWS = 1024
"""Rows per block, the unit read and compared at once. In fp32 it fits into a CPU's cache, and the
product is too small for BLAS to start threads."""
VECTORS, SCALE = "embedding", "scale"
"""Columns written by `predict` next to the kept fields."""
REMEDY = "name the output folder of 'regauge predict'"


class StoredOutput(DocumentShape):
    """Output format and vector type."""

    format: str
    dtype: Dtype


class StoredJob(DocumentShape):
    """What readers need to know about a prediction job."""

    artifact_sha256: str
    output: StoredOutput
    keep_fields: dict[str, str]


class VectorFolder(NamedTuple):
    """The output folder of a finished prediction job."""

    folder: Path
    artifact_sha256: str
    dtype: Dtype
    kept_fields: dict[str, str]
    """Kept field -> kind."""
    files: tuple[Path, ...]
    """Parquet files in record order."""
    num_rows: int
    key: str
    """Content hash, which names the derived files."""


def open_vectors(folder: Path) -> VectorFolder:
    """Open a prediction job's output folder.

    Raises SettingsError if it is missing or the format is not Parquet, and DataError if vectors are
    missing or the job is damaged. Logs a warning if shards are missing.
    """
    document = config.find_document(folder / JOB, REMEDY, StoredJob)
    if document is None:
        raise SettingsError(f"no vectors at {folder}: {JOB} is missing", REMEDY)
    output = document["output"]
    if output["format"] != "parquet":
        problem = f"{folder} has files of the format {output['format']}"
        raise SettingsError(problem, "search needs predict with output.format = parquet")
    lines = read_finished_shards(folder)
    num_rows = sum(line["rows"] for line in lines.values())
    if not num_rows:
        raise DataError(f"{folder}: no finished shard with rows", "run 'regauge predict' again")
    if not (folder / RESULT).is_file():
        message = "%s is incomplete: its job is not finished; searching %s"
        logger.warning(message, folder, format_count(num_rows, "row"))
    hashes = [repr((shard, sorted(lines[shard]["sha256"].items()))) for shard in sorted(lines)]
    key = hashlib.sha256("\n".join((str(FORMAT), *hashes)).encode()).hexdigest()[:16]
    paths = tuple(list_output_paths(folder, lines))
    kinds = document["keep_fields"]
    return VectorFolder(
        folder, document["artifact_sha256"], output["dtype"], kinds, paths, num_rows, key
    )


class SearchRows:
    """Vectors and kept fields of all rows, read from a memory-mapped Arrow file."""

    def __init__(self, path: Path, dtype: Dtype, width: int) -> None:
        """Map a file from `write_rows`; vectors have `width` numbers. Raises DataError."""
        self._dtype, self._width = dtype, width
        self._file = pa.memory_map(str(path))
        try:
            reader = pa.ipc.open_file(self._file)
            self._blocks = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        except pa.ArrowInvalid as error:
            self._file.close()
            raise DataError(f"{path} is damaged: {first_line(error)}", "remove it") from None
        self._starts = np.cumsum([0, *(block.num_rows for block in self._blocks)])
        self._check_width(reader.schema)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._blocks = []
        self._file.close()

    def _check_width(self, schema: pa.Schema) -> None:
        """Raise DataError unless vectors have the same width as the model's outputs."""
        column: Any = schema.field(VECTORS).type if VECTORS in schema.names else pa.null()
        size = column.list_size if pa.types.is_fixed_size_list(column) else "no"
        expected = -(-self._width // 8) if self._dtype == "binary" else self._width
        if size != expected:
            self.close()
            problem = f"the vectors have {size} elements, but the model's have {expected}"
            raise DataError(problem, "predict the vectors with the artifact that is served")

    def iterate_blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each block's first row number and vectors, [rows, width] fp32."""
        for start, block in zip(self._starts.tolist(), self._blocks, strict=False):
            yield start, self._restore(block)

    def read_vectors(self, numbers: np.ndarray) -> np.ndarray:
        """Return vectors by row number, [rows, width] fp32."""
        slices = [self._slice(int(number)) for number in numbers]
        return np.concatenate([np.empty((0, self._width), np.float32), *map(self._restore, slices)])

    def read_fields(self, number: int) -> dict[str, Any]:
        """Return a row's kept fields; raises IndexError for a number without a row."""
        columns = self._slice(number).to_pydict()
        return {name: column[0] for name, column in columns.items() if name not in {VECTORS, SCALE}}

    def _slice(self, number: int) -> pa.RecordBatch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        index = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._blocks[index].slice(number - int(self._starts[index]), 1)

    def _restore(self, block: pa.RecordBatch) -> np.ndarray:
        column = block.column(VECTORS)
        numbers = column.flatten().to_numpy(zero_copy_only=True)
        stored = numbers.reshape(len(column), column.type.list_size)
        scale = block.column(SCALE).to_numpy() if self._dtype == "int8" else None
        return restore_vectors(stored, self._dtype, self._width, scale)


def write_rows(vectors: VectorFolder, path: Path) -> None:
    """Convert a job's Parquet files to one Arrow file, unless it exists; uses little memory.

    Raises DataError if a Parquet file is damaged.
    """
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = format_count(vectors.num_rows, "row")
    logger.info("Converting %s of %s to %s", rows, vectors.folder, path)
    blocks = chain.from_iterable(map(_read_blocks, vectors.files))
    first = next(blocks)
    with (
        replace_atomically(path) as temporary,
        pa.OSFile(str(temporary), "wb") as file,
        pa.ipc.new_file(file, first.schema) as writer,
    ):
        for block in chain((first,), blocks):
            writer.write_batch(block)


def _read_blocks(source: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file in blocks; raises DataError if it is damaged."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source) as file:
            yield from file.iter_batches(batch_size=BLOCK_ROWS)
    except (pa.ArrowException, OSError) as error:
        problem = f"{source} cannot be read: {first_line(error)}"
        raise DataError(problem, "run 'regauge predict' again") from None
