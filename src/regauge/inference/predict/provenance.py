"""Output folder provenance: which model, data, code and settings made the files.

    lineage.json    the model with its lineage, and its version in a registry, if any

It is written when a job starts. `trace_output` combines it with `job.json` and the ledgers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.config.output_files import JOB
from regauge.inference.predict.job import SHARDS, list_output_paths, read_finished_shards
from regauge.registry.lineage import collect_folder_lineage, describe_code
from regauge.registry.model_reference import parse_reference
from regauge.system.errors import RegaugeError, SettingsError
from regauge.system.files import sha256
from regauge.system.json_files import DocumentShape
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.inference.export.artifact import Artifact
    from regauge.inference.predict.job import PredictJob
    from regauge.registry.registered_version import RegisteredVersion
    from regauge.registry.registry import Registry

LINEAGE = "lineage.json"
REMEDY = "name an output folder of predict, or a file in it"


class LineageShape(DocumentShape):
    """`lineage.json`."""

    content_sha256: str
    model: str
    registry: dict[str, Any] | None = None
    lineage: dict[str, Any] | None = None
    code: dict[str, Any] = {}


class PredictedJobShape(DocumentShape):
    """Facts about a job in its provenance."""

    artifact_sha256: str
    source: dict[str, Any]
    pieces: dict[str, Any]


def resolve_version(artifact: str) -> RegisteredVersion | None:
    """Return the version that an artifact name refers to; None if it is not a registry's.

    Raises the errors from `parse_reference` and from the registry.
    """
    reference = parse_reference(artifact)
    return None if reference is None else reference.resolve()


def write_lineage(job: PredictJob, artifact: Artifact, version: RegisteredVersion | None) -> None:
    """Write a job's model lineage, unless an equal job has written it."""
    if (job.folder / LINEAGE).exists():
        return
    document = {
        "format": config.FORMAT,
        "content_sha256": artifact.content_sha256,
        "model": str(artifact.folder.resolve()),
        "registry": None if version is None else _describe_version(version),
        "lineage": _find_lineage(artifact, version),
        "code": describe_code(),
    }
    job.write_shared(LINEAGE, document)


def trace_output(path: Path, registry: Registry | None = None) -> dict[str, Any]:
    """Return which data, code, settings, checkpoint, artifact and version made some vectors.

    `path` is a `predict` output folder, or a file in it, which is hashed. A registry is searched
    for the model's version if the job has not recorded it.

    Raises SettingsError for another path, and DataError if a job document is damaged.
    """
    folder = _find_output_folder(path)
    job = config.find_document(folder / JOB, REMEDY, PredictedJobShape)
    if job is None:
        raise SettingsError(f"{path} was not written by predict: {JOB} is missing", REMEDY)
    recorded = config.find_document(folder / LINEAGE, REMEDY, LineageShape) or {}
    content_sha256 = job["artifact_sha256"]
    version = recorded.get("registry")
    lineage = recorded.get("lineage") or {}
    if version is None and registry is not None:
        match = _search_registry(registry, content_sha256)
        version = None if match is None else _describe_version(match)
        lineage = lineage if match is None else match.document["lineage"]
    options = {name: value for name, value in job.items() if name not in {"pieces", "format"}}
    return {
        "path": str(path),
        **_describe_files(folder, path),
        "artifact": {"sha256": content_sha256, "folder": recorded.get("model")},
        "registry": version,
        "checkpoint": lineage.get("checkpoint"),
        "data": lineage.get("data"),
        "code": lineage.get("code"),
        "settings": lineage.get("settings"),
        "unknown": lineage.get("unknown"),
        "predict": {"code": recorded.get("code"), "inputs": list(job["pieces"]), "job": options},
    }


def _describe_version(version: RegisteredVersion) -> dict[str, Any]:
    return {
        "address": version.storage.address,
        "model": version.model,
        "version": version.number,
        "registered_at": version.document["created_at"],
        "registered_by": version.document["created_by"],
    }


def _find_lineage(artifact: Artifact, version: RegisteredVersion | None) -> dict[str, Any] | None:
    """Return a model's lineage; None, with a warning, if the run is damaged."""
    if version is not None:
        lineage: dict[str, Any] = version.document["lineage"]
        return lineage
    try:
        return collect_folder_lineage(artifact.folder)
    except RegaugeError as error:
        logger.warning("The lineage of the model is unknown: %s", error.problem)
        return None


def _find_output_folder(path: Path) -> Path:
    """Return a path's output folder; raises SettingsError if the path does not exist."""
    if not path.exists():
        raise SettingsError(f"{path} does not exist", REMEDY)
    if path.is_dir():
        return path.parent if path.name == SHARDS and (path.parent / JOB).is_file() else path
    return path.parent.parent if path.parent.name == SHARDS else path.parent


def _describe_files(folder: Path, path: Path) -> dict[str, Any]:
    """Return whether a file is unchanged since it was written, or how many files were written."""
    lines = read_finished_shards(folder)
    if path.is_dir():
        return {"files": len(list(list_output_paths(folder, lines))), "rows": _sum_rows(lines)}
    hashes = {name: line["sha256"][name] for line in lines.values() for name in line["sha256"]}
    if path.name not in hashes:
        raise SettingsError(f"{path} is not an output file of its job", REMEDY)
    rows = next(line["rows"] for line in lines.values() if path.name in line["sha256"])
    digest = sha256(path)
    return {"sha256": digest, "unchanged": digest == hashes[path.name], "rows": rows}


def _sum_rows(lines: Mapping[Any, Mapping[str, Any]]) -> int:
    return sum(line["rows"] for line in lines.values())


def _search_registry(registry: Registry, content_sha256: str) -> RegisteredVersion | None:
    """Return any model's newest version with this content; None if there is none."""
    for name in registry.list_models():
        for version in reversed(registry.list_versions(name)):
            if version.content_sha256 == content_sha256:
                return version
    return None
