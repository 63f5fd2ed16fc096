"""Lineage: a model's data, code, settings and checkpoint."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from regauge import config
from regauge.config.output_files import ENVIRONMENT, RESULT, SAVED_RUN
from regauge.registry.model_files import PARITY_FILE, ModelFiles, find_manifest
from regauge.system import files
from regauge.system.children import run_tool
from regauge.system.json_files import DocumentShape, find_json

Document = dict[str, Any]
REPEAT_RUN = "repeat the run, or name another one"
GIT_SECONDS = 10.0


class TrainedRunShape(DocumentShape):
    """Run settings recorded in the lineage."""

    run: dict[str, Any]
    data: dict[str, Any] = {}
    task: dict[str, Any] | list[dict[str, Any]] = {}
    model: dict[str, Any] = {}


class RunResultShape(DocumentShape):
    """A run's result."""

    metrics: dict[str, Any] = {}
    model_step: int | None = None
    usd: float | None = None


class DatasetManifestShape(DocumentShape):
    """Dataset manifest keys recorded in the lineage."""

    splits: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}
    tokenizer: dict[str, Any] = {}


def find_run(model: ModelFiles, run: Path | None = None) -> Path | None:
    """Return the output folder of the run that trained a model; None if unknown.

    Default: the artifact's origin, or the folder that contains the model.
    """
    origin = [] if model.origin is None else [Path(model.origin.path).expanduser()]
    candidates = [*origin, model.folder.parent] if run is None else [run]
    return next((folder for folder in candidates if (folder / SAVED_RUN).is_file()), None)


def collect_lineage(model: ModelFiles, run: Path | None = None) -> Document:
    """Return a model's lineage with the tables data, code, settings and checkpoint.

    A table is empty if its facts are unknown. Raises DataError if a run document is damaged.
    """
    folder = find_run(model, run)
    origin = model.origin
    checkpoint: Document = {
        "path": origin.path if origin else str(model.folder),
        "step": origin.step if origin else "final",
        "weights_sha256": origin.sha256 if origin else _find_weights_hash(model),
    }
    code: Document = {"registered_with": describe_code()}
    if folder is None:
        return {"data": [], "code": code, "settings": {}, "checkpoint": checkpoint}
    settings = config.find_saved_run(folder, REPEAT_RUN) or {}
    TrainedRunShape.model_validate(settings)
    identity = settings.pop(config.RUN_IDENTITY, {})
    environment = config.find_document(folder / ENVIRONMENT, REPEAT_RUN) or {}
    result = config.find_document(folder / RESULT, REPEAT_RUN, RunResultShape) or {}
    checkpoint |= {
        "run": str(folder.resolve()),
        "run_id": identity.get("run_id"),
        "initial_weights": identity.get("weights_checksum"),
        "model_step": result.get("model_step"),
        "start": settings.get("model", {}).get("init_from") or settings["model"].get("path"),
    }
    names = ("code", "packages", "python", "platform", "variables")
    code = {**{name: environment[name] for name in names if name in environment}, **code}
    return {
        "data": _describe_datasets(settings, str(identity.get("data_fingerprint"))),
        "code": code,
        "settings": settings,
        "checkpoint": checkpoint,
    }


def collect_folder_lineage(folder: Path) -> Document:
    """Return the lineage of an artifact or a model folder, without hashing its files.

    Raises DataError if a document of the artifact or its run is damaged.
    """
    manifest = find_manifest(folder)
    kind: Literal["artifact", "model"] = "model" if manifest is None else "artifact"
    origin = None if manifest is None else manifest.origin
    return collect_lineage(ModelFiles(folder, kind, "", {}, origin))


def find_figures(model: ModelFiles, run: Path | None = None) -> Document:
    """Return a model's parity figures, metrics and cost; None for unknown ones."""
    folder = find_run(model, run)
    parity = find_json(model.folder / PARITY_FILE, "export the model again")
    result = {}
    if folder is not None:
        result = config.find_document(folder / RESULT, REPEAT_RUN, RunResultShape) or {}
    metrics = result.get("metrics")
    return {
        "parity": parity,
        "evaluation": {"metrics": metrics} if metrics else None,
        "usd": result.get("usd"),
    }


def describe_code() -> Document:
    """Return the Regauge version, and the working folder's commit if it is in git.

    `has_changes` is whether tracked files differ from that commit.
    """
    code: Document = {"regauge": version("regauge")}
    commit = _run_git("rev-parse", "HEAD")
    if commit:
        changes = _run_git("status", "--porcelain", "--untracked-files=no")
        code |= {"commit": commit, "has_changes": bool(changes)}
    return code


def _run_git(*arguments: str) -> str | None:
    """Return git's output in the working folder; None if git fails or is missing."""
    git = shutil.which("git")
    if git is None:
        return None
    try:
        done = run_tool([git, *arguments], GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _describe_datasets(settings: Document, fingerprint: str) -> list[Document]:
    tasks = settings.get("task", {})
    tables = [settings.get("data", {})]
    if not isinstance(tasks, dict):
        tables = [task.get("data") or settings.get("data", {}) for task in tasks]
    return [_describe_dataset(Path(table["path"]), fingerprint) for table in tables]


def _describe_dataset(folder: Path, fingerprint: str) -> Document:
    """Return a dataset; without its folder only the path, and the fingerprint from the run."""
    path = folder / config.MANIFEST
    document = {"path": str(folder), "fingerprint": fingerprint}
    manifest = config.find_document(path, REPEAT_RUN, DatasetManifestShape)
    if manifest is None:
        return document
    splits = manifest["splits"]
    rows = {name: split.get("rows") for name, split in splits.items()}
    return {
        **document,
        "manifest_sha256": files.sha256(path),
        "rows": rows,
        "source": manifest.get("settings", {}).get("source"),
        "tokenizer_sha256": manifest.get("tokenizer", {}).get("sha256"),
    }


def _find_weights_hash(model: ModelFiles) -> str | None:
    """Return the hash of the only weight file; None if there are several."""
    hashes = [item.sha256 for name, item in model.hashes.items() if name.endswith(".safetensors")]
    return hashes[0] if len(hashes) == 1 else None
