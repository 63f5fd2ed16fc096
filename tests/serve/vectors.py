"""Vectors in the output folder of a prediction job, and the artifact that they belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regauge import config
from regauge.config import FORMAT
from regauge.data.sources import Piece
from regauge.data.values import FieldKind
from regauge.inference.backends.eager import EagerBackend
from regauge.inference.export.artifact import Artifact
from regauge.inference.export.manifest import (
    ArtifactManifest,
    Bucket,
    Compilation,
    Dtype,
    ProgramEntry,
    TargetMachine,
    WeightsOrigin,
)
from regauge.inference.export.postprocess import convert_vectors
from regauge.inference.predict.job import JobSlot, PredictJob, write_result
from regauge.inference.predict.settings import PredictSettings
from regauge.inference.predict.shard_files import ShardColumns
from regauge.inference.predict.shard_queue import ShardId
from regauge.models.io_spec import OutputKind
from regauge.system.files import sha256

Kept = dict[str, Sequence[Any]]
"""The values of kept fields by name."""


def build_artifact(folder: Path, width: int, kind: OutputKind = "vectors") -> Artifact:
    """Write the manifest of an artifact and return it."""
    manifest = ArtifactManifest(
        format=FORMAT,
        program=ProgramEntry(output_kind=kind, output_size=width, inputs=()),
        compiled=Compilation(precision="fp32", backend=EagerBackend(), versions={}),
        target=TargetMachine(accelerator="cpu", chip="a chip", threads=1),
        buckets=(Bucket(length=16, batch_sizes=(4,)),),
        origin=WeightsOrigin(path=folder.name, sha256="…"),
        files={},
    )
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "manifest.json").write_text(json.dumps(config.dump(manifest)))
    return Artifact(folder, manifest)


def write_vectors(  # noqa: PLR0913
    folder: Path,
    artifact: Artifact,
    vectors: np.ndarray,
    kept: Kept | None = None,
    *,
    dtype: Dtype = "float32",
    shard_rows: int = 100,
    file_format: str = "parquet",
    is_finished: bool = True,
    kinds: dict[str, FieldKind] | None = None,
) -> Path:
    """Write the output of a finished job, by the functions of `predict`; return its folder.

    Fields without a kind are texts.
    """
    kept = kept or {}
    kinds = dict.fromkeys(kept, "text") | (kinds or {})
    tables = {
        "artifact": str(artifact.folder),
        "source": {"kind": "jsonl", "files": ("texts.jsonl",)},
        "output": {"folder": str(folder), "dtype": dtype, "format": file_format},
    }
    settings = config.build(PredictSettings, tables)
    job = PredictJob(settings, (Piece("texts.jsonl", 1, 1, "stamp", ("texts.jsonl",)),), JobSlot())
    facts = {
        "artifact_sha256": artifact.content_sha256,
        "output": {"format": file_format, "dtype": dtype},
        "keep_fields": kinds,
    }
    job.claim_folder(facts)
    starts = range(0, len(vectors), shard_rows)
    for part, start in enumerate(starts):
        rows = slice(start, start + shard_rows)
        columns = ShardColumns(
            {name: values[rows] for name, values in kept.items()},
            kinds,
            convert_vectors(vectors[rows], dtype),
        )
        is_last = part == len(starts) - 1
        _write_shard(
            job, ShardId(0, part), columns, {"rows": len(vectors[rows]), "is_last": is_last}
        )
    if is_finished:
        write_result(job)
    return folder


def _write_shard(
    job: PredictJob, shard: ShardId, columns: ShardColumns, facts: dict[str, Any]
) -> None:
    paths = []
    for suffix, write in columns.list_files(job.settings.output.format).items():
        path = job.folder / "shards" / f"{shard.name}.{suffix}"
        with path.open("wb") as file:
            write(file)
        paths.append(path)
    counts = ("quarantined", "skipped", "truncated", "tokens", "computed_tokens")
    line = {
        **dict.fromkeys(counts, 0),
        **facts,
        "piece": shard.piece,
        "part": shard.part,
        "bytes": {path.name: path.stat().st_size for path in paths},
        "sha256": {path.name: sha256(path) for path in paths},
        "seconds": {"read": 0.1, "compute": 0.1, "write": 0.1},
    }
    job.commit_shard(line)


def embed_words(text: str, width: int = 64) -> np.ndarray:
    """Return a vector of length 1, [width] fp32, which is similar for texts with equal words."""
    vector = np.zeros(width, np.float32)
    for word in text.lower().split():
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")
        vector += np.random.default_rng(seed).standard_normal(width, np.float32)
    return vector / max(float(np.linalg.norm(vector)), 1e-9)
