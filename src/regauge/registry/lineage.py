"""Lineage: a model's data, code, settings and checkpoint."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from regauge import config
from regauge.config.output_files import ENVIRONMENT, RESULT
from regauge.data.settings import DataSettings
from regauge.registry.model_files import PARITY_FILE, ModelFiles, find_manifest
from regauge.run_folders.documents import ResultShape
from regauge.run_folders.run_folder import find_working_folder, locate_run, read_model_metrics
from regauge.system import files
from regauge.system.children import run_tool
from regauge.system.errors import RegaugeError
from regauge.system.hub import CONFIG, read_step
from regauge.system.json_files import DocumentShape, find_json
from regauge.system.log import logger

Document = dict[str, Any]
REPEAT_RUN = "repeat the run, or name another one"
GIT_SECONDS = 10.0


class DatasetManifestShape(DocumentShape):
    """Dataset manifest keys recorded in the lineage."""

    splits: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}
    tokenizer: dict[str, Any] = {}


def find_run(model: ModelFiles, run: Path | None = None) -> Path | None:
    """Return the output folder of the run that trained a model; None if unknown.

    Default: the artifact's origin, or the folder that contains the model.
    """
    origin = model.origin
    located = locate_run(str(run or model.folder.resolve()), model.folder)
    if run is None and origin is not None:
        located = locate_run(origin.path, model.folder, origin.run_id)
        if located is None and origin.run_id is not None:
            message = "%s: its run %s is not in %s, so its data, settings and cost are unknown; %s"
            remedy = "restore that folder, or name the run's with --run"
            logger.warning(message, model.folder, origin.run_id, origin.path, remedy)
    return located[0] if located else None


def collect_lineage(model: ModelFiles, run: Path | None = None) -> Document:
    """Return a model's lineage with the tables data, code, settings and checkpoint.

    A table is empty if its content is unknown. If `run.json` is damaged, a warning is logged, and
    `unknown` names the damage. Raises DataError if another run document is damaged.
    """
    folder = find_run(model, run)
    origin = model.origin
    checkpoint: Document = {
        "path": origin.path if origin else str(model.folder),
        "step": origin.step if origin else "final",
        "weights_sha256": origin.sha256 if origin else _find_weights_hash(model),
    }
    code: Document = {"registered_with": describe_code()}
    lineage: Document = {"data": [], "code": code, "settings": {}, "checkpoint": checkpoint}
    if folder is None:
        return lineage
    environment = config.find_document(folder / ENVIRONMENT, REPEAT_RUN) or {}
    result = config.find_document(folder / RESULT, REPEAT_RUN, ResultShape) or {}
    names = ("code", "packages", "python", "platform", "variables")
    lineage["code"] = {**{name: environment[name] for name in names if name in environment}, **code}
    checkpoint |= {"run": str(folder.resolve()), "model_step": result.get("model_step")}
    try:
        settings = config.find_saved_run(folder, REPEAT_RUN) or {}
        output = settings.get("output", {}).get("folder", "")
        datasets = _list_datasets(settings, find_working_folder(folder, output))
    except RegaugeError as error:
        logger.warning("The model's data and settings are unknown: %s", error.problem)
        return {**lineage, "unknown": f"data, settings and run_id: {error.problem}"}
    identity = settings.pop(config.RUN_IDENTITY)
    lineage |= {
        "data": _describe_datasets(datasets, identity["data_fingerprint"]),
        "settings": settings,
    }
    checkpoint |= {
        "run_id": identity["run_id"],
        "initial_weights": identity.get("weights_checksum"),
        "start": settings["model"].get("init_from") or settings["model"].get("path"),
    }
    return lineage


def collect_folder_lineage(folder: Path) -> Document:
    """Return the lineage of an artifact or a model folder, without hashing its files.

    Raises DataError if a document of the artifact or its run is damaged.
    """
    manifest = find_manifest(folder)
    kind: Literal["artifact", "model"] = "model" if manifest is None else "artifact"
    origin = None if manifest is None else manifest.origin
    return collect_lineage(ModelFiles(folder, kind, "", {}, origin))


def find_figures(model: ModelFiles, run: Path | None = None) -> Document:
    """Return a model's parity figures, metrics and cost; None for unknown ones.

    The metrics are those of the step whose weights the model has.
    """
    folder = find_run(model, run)
    parity = find_json(model.folder / PARITY_FILE, "export the model again")
    result, metrics = {}, {}
    if folder is not None:
        result = config.find_document(folder / RESULT, REPEAT_RUN, ResultShape) or {}
        metrics = read_model_metrics(folder, result, _find_step(model))
    return {
        "parity": parity,
        "evaluation": {"metrics": metrics} if metrics else None,
        "usd": result.get("usd"),
    }


def _find_step(model: ModelFiles) -> int | None:
    """Return the step of a model's weights; None if it is the run's final model."""
    if model.origin is None:
        return read_step(model.folder) if (model.folder / CONFIG).is_file() else None
    return int(model.origin.step) if model.origin.step.isdecimal() else None


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


def _list_datasets(settings: Document, base: Path) -> list[DataSettings]:
    """Return the `data` table of each task in a `run.json`, with paths relative to `base`."""
    tasks, shared = settings["task"], settings["data"]
    tables = [shared] if isinstance(tasks, dict) else [task.get("data") or shared for task in tasks]
    return [
        config.build(DataSettings, table, source="the table data").relocate(base)
        for table in tables
    ]


def _describe_datasets(datasets: list[DataSettings], combined: str) -> list[Document]:
    """Return all datasets of a run, mixed ones included; `combined` is the run's fingerprint."""
    paths = list(dict.fromkeys(path for data in datasets for path in data.paths))
    if len(datasets) == len(paths) == 1:
        return [_describe_dataset(Path(paths[0]), combined)]
    from regauge.data.dataset import read_manifest
    from regauge.data.mixture import read_data_manifest
    from regauge.training.task_schedule import data_fingerprint

    fingerprints: dict[str, str] = {}
    with suppress(RegaugeError):  # a dataset is missing or damaged
        if data_fingerprint([read_data_manifest(data) for data in datasets]) == combined:
            fingerprints = {path: read_manifest(Path(path)).fingerprint for path in paths}
    return [_describe_dataset(Path(path), fingerprints.get(path)) for path in paths]


def _describe_dataset(folder: Path, fingerprint: str | None) -> Document:
    """Return a dataset; without its folder only the path and the fingerprint.

    The fingerprint is unknown if one of several datasets has changed since the run.
    """
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
