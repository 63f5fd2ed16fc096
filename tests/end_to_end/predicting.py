"""Export a small model as an artifact; write its input files and read its output files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distributed import datasets
from distributed.runs import settings
from regauge.cli import main
from regauge.inference.export.artifact import hash_files
from regauge.system import processes
from regauge.system.json_files import CHECKSUM
from regauge.training.run import attempt

MakeDataset = Callable[[Path], Path]
QUICK = ["parity.num_texts=32", "candidates.timing_seconds=0.02", "candidates.threads=[1]"]
EAGER = ['candidates.backends=["eager"]', *QUICK]


def train_model(
    folder: Path, task: str = "contrastive", make: MakeDataset = datasets.write_pairs
) -> Path:
    """Train for a few steps; return the output folder of the run."""
    data = make(folder / "data")
    attempt(settings(folder / "run", data, task, stop={"steps": 4}), processes.World())
    return folder / "run"


def export_run(run: Path, folder: Path, *arguments: str) -> Path:
    """Export the model of a run; return the folder of the artifact."""
    assert main(["export", str(run), "--to", str(folder), *(arguments or EAGER)]) == 0
    return folder


def update_manifest(
    folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None
) -> None:
    """Change the manifest of an artifact, with the hashes of the present files."""
    path = folder / "manifest.json"
    document: dict[str, Any] = json.loads(path.read_text())
    document.pop(CHECKSUM, None)
    document["files"] = {name: item.model_dump() for name, item in hash_files(folder).items()}
    change(document)
    path.write_text(json.dumps(document))


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Return texts of 1 to 24 words that the small tokenizer has in its vocabulary."""
    draw = np.random.default_rng(seed)
    return [
        " ".join(f"w{word}" for word in draw.integers(5, datasets.VOCABULARY, length))
        for length in draw.integers(1, 25, count)
    ]


def write_records(path: Path, count: int, seed: int = 0) -> Path:
    """Write a file of records with an id and a text."""
    lines = ({"id": index, "text": text} for index, text in enumerate(random_texts(count, seed)))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def write_row_groups(path: Path, groups: int, rows: int) -> Path:
    """Write a Parquet file; each of its row groups is a piece."""
    texts = random_texts(groups * rows)
    columns = {"id": list(range(len(texts))), "text": texts}
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


def read_table(folder: Path) -> pa.Table:
    """Return the output of a job as one table, in the order of the records."""
    return pa.concat_tables(pq.read_table(path) for path in sorted((folder / "shards").iterdir()))


def vector_column(table: pa.Table) -> np.ndarray:
    """Return the column of vectors, [records, width]."""
    column = table["embedding"].combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), -1)


def read_output_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the output files and the quarantine files, by name."""
    paths = [path for name in ("shards", "quarantine") for path in (folder / name).iterdir()]
    return {path.name: path.read_bytes() for path in paths}
