"""A small encoder as an artifact, and files of texts that it can read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distributed import datasets
from distributed.runs import settings
from regauge import processes
from regauge.cli import main
from regauge.training.run import attempt

Maker = Callable[[Path], Path]
QUICK = ["proof.texts=32", "candidates.seconds=0.02", "candidates.threads=[1]"]
EAGER = ['candidates.backends=["eager"]', *QUICK]


def trained(folder: Path, task: str = "contrastive", make: Maker = datasets.pairs) -> Path:
    """Return the output folder of a run of a few steps."""
    data = make(folder / "data")
    attempt(settings(folder / "run", data, task, stop={"steps": 4}), processes.World())
    return folder / "run"


def exported(run: Path, folder: Path, *arguments: str) -> Path:
    """Return the artifact of a run's model."""
    assert main(["export", str(run), "--to", str(folder), *(arguments or EAGER)]) == 0
    return folder


def texts(count: int, seed: int = 0) -> list[str]:
    """Return texts of one word to two dozen, of those that the small tokenizer knows."""
    draw = np.random.default_rng(seed)
    return [
        " ".join(f"w{word}" for word in draw.integers(5, datasets.VOCABULARY, length))
        for length in draw.integers(1, 25, count)
    ]


def written(path: Path, count: int, seed: int = 0) -> Path:
    """Write a file of records with an id and a text."""
    lines = ({"id": place, "text": text} for place, text in enumerate(texts(count, seed)))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def in_groups(path: Path, groups: int, rows: int) -> Path:
    """Write a table of groups of records, of which each is a piece."""
    said = texts(groups * rows)
    columns = {"id": list(range(len(said))), "text": said}
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


def table(folder: Path) -> pa.Table:
    """Return all answers of a folder in the order of the records."""
    return pa.concat_tables(pq.read_table(path) for path in sorted((folder / "shards").iterdir()))


def vectors(found: pa.Table) -> np.ndarray:
    """Return the column of vectors, [records, width]."""
    column = found["vector"].combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), -1)


def bits(folder: Path) -> dict[str, bytes]:
    """Return the files of answers, and those of what could not be answered."""
    paths = [path for room in ("shards", "quarantine") for path in (folder / room).iterdir()]
    return {path.name: path.read_bytes() for path in paths}
