"""Checkpoint folders on disk: staged, hashed, and committed by one rename.

    checkpoints/step-00000100/         manifest.json, state.json, *.safetensors
    checkpoints/.step-00000100.part/   staging folder for a save in progress, or a killed one
    checkpoints/LATEST                 name of the newest checkpoint
    checkpoints/BEST                   folder and metric of the best checkpoint, if one is kept

This module does not import torch. A folder is a checkpoint only if it has a manifest, and every
file has the hash and size in the manifest.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regauge.config import FORMAT, find_document
from regauge.system.errors import DataError, SettingsError
from regauge.system.files import fsync_paths, is_temporary, sha256, write_atomic, write_json
from regauge.system.json_files import DocumentShape, read_json
from regauge.system.jsonl import Count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Checkpoint subfolder in a run's output folder."""
MANIFEST = "manifest.json"
STATE = "state.json"
MAX_DOCUMENT_BYTES = 1 << 26
"""Size limit when reading a manifest or state."""
LATEST = "LATEST"
BEST = "BEST"


class ManifestShape(DocumentShape):
    files: dict[str, Any]


class StateShape(DocumentShape):
    """What every reader needs from a checkpoint's state."""

    step: Count


class BestShape(DocumentShape):
    """The best checkpoint's record."""

    checkpoint: str


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step in a checkpoint folder name; None for any other name."""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and name != digits else None


def staging_folder(root: Path, step: int) -> Path:
    """Return the folder where a checkpoint is written before its commit."""
    return root / f".{checkpoint_name(step)}.part"


def describe_file(path: Path) -> dict[str, Any]:
    """Return a file's hash and size, as listed in the manifest."""
    return {"sha256": sha256(path), "bytes": path.stat().st_size}


def ignore_point(_point: str, *, step: int = 0) -> None:
    """Default save hook: do nothing."""


def commit(
    root: Path,
    step: int,
    files: dict[str, dict[str, Any]],
    on_point: Callable[[str], None] = ignore_point,
) -> Path:
    """Turn a staging folder into a step's checkpoint; the rename is the commit.

    `files` maps file name to hash and size.
    """
    staging, final = staging_folder(root, step), root / checkpoint_name(step)
    on_point("manifest")
    write_json(staging / MANIFEST, {"format": FORMAT, "step": step, "files": files})
    fsync_paths([staging])
    on_point("rename")
    if final.exists():
        old = root / f".{checkpoint_name(step)}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        on_point("swap")
        staging.rename(final)
        shutil.rmtree(old)
    else:
        staging.rename(final)
    fsync_paths([root])
    on_point("latest")
    write_atomic(root / LATEST, f"{final.name}\n")
    return final


def recover(root: Path) -> None:
    """Finish a commit killed while it replaced an older checkpoint for the same step."""
    for old in root.glob(".step-*.old"):
        final = root / old.name.removeprefix(".").removesuffix(".old")
        staging = root / f".{final.name}.part"
        if not final.exists():
            (staging if (staging / MANIFEST).exists() else old).rename(final)


def list_steps(root: Path) -> list[int]:
    """Return the committed steps, newest first, whether or not their files are still whole."""
    numbers = (parse_step(path.name) for path in root.glob("step-*"))
    return sorted((number for number in numbers if number is not None), reverse=True)


def build_missing_error(root: Path, step: str | int, key: str) -> SettingsError:
    """Return the error for a missing checkpoint; `key` is the setting that selects the step."""
    steps = ", ".join(map(str, sorted(list_steps(root)))) or "none"
    remedy = f"set {key} to one of: {steps}"
    if step == BEST.lower():
        remedy += "; output.checkpoint.best_metric keeps the best one of a run"
    return SettingsError(f"{root.parent} has no checkpoint '{step}'", remedy)


def find_damage(path: Path, *, rank: int = 0, size: int = 1) -> str | None:
    """Return a checkpoint's damage, or None; each of `size` processes hashes a share."""
    files, problem = _read_file_list(path), find_missing_file(path)
    if problem or isinstance(files, str):
        return problem
    for name in sorted(files)[rank::size]:
        if describe_file(path / name) != files[name]:
            return _describe_change(path / name)
    return None


def find_missing_file(path: Path) -> str | None:
    """Return which checkpoint file is missing or has another size, if any; does not hash."""
    files = _read_file_list(path)
    if isinstance(files, str):
        return files
    for name, facts in sorted(files.items()):
        if "/" in name or not (path / name).is_file() or (path / name).is_symlink():
            return f"{path / name} is missing"
        if not isinstance(facts, dict) or (path / name).stat().st_size != facts.get("bytes"):
            return _describe_change(path / name)
    return None


def _describe_change(file: Path) -> str:
    return f"{file} has changed since it was saved"


def _read_file_list(path: Path) -> dict[str, Any] | str:
    """Return the files in a checkpoint's manifest, or the checkpoint's damage.

    A checkpoint may come from an untrusted source. Therefore only files listed in the manifest and
    inside the folder are read, and only documents that cannot fill the memory.
    """
    if path.is_symlink():
        return f"{path} is a link"
    try:
        for document in (MANIFEST, STATE):
            if (path / document).stat().st_size > MAX_DOCUMENT_BYTES:
                return f"{path / document} is larger than {MAX_DOCUMENT_BYTES:,} bytes"
        manifest = find_document(path / MANIFEST, "save it again", ManifestShape)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except DataError as error:
        return error.problem
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if manifest is None:
        return f"{path / MANIFEST} is missing"
    files: dict[str, Any] = manifest["files"]
    unlisted = sorted({file.name for file in path.iterdir()} - {MANIFEST} - files.keys())
    return f"{path / unlisted[0]} is not in the manifest" if unlisted else files


def list_saved(folder: Path) -> Iterator[tuple[int, float]]:
    """Yield a run's checkpoint steps, newest first, and save times since the epoch.

    `folder` is the output folder. Incomplete or just removed checkpoints are skipped.
    """
    root = folder / CHECKPOINTS
    for step in list_steps(root):
        path = root / checkpoint_name(step)
        with suppress(OSError):
            if find_missing_file(path) is None:
                yield step, (path / MANIFEST).stat().st_mtime


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state document; raises DataError if it is damaged."""
    return read_json(path / STATE, "remove that checkpoint", StateShape)


def read_best(root: Path) -> dict[str, Any] | None:
    """Return the best checkpoint's folder name, metric and value; None if none is kept."""
    try:
        document = read_json(root / BEST, "remove it", BestShape)
    except DataError:
        return None
    return document if (root / document["checkpoint"]).is_dir() else None


def retain(root: Path, keep: int, newest: int) -> None:
    """Remove all but the newest checkpoints and the best one, and the remains of killed saves.

    `newest` is the last saved step. Later checkpoints are damaged ones that the run skipped: they
    do not count, and stay until they are saved again.
    """
    best = read_best(root)
    for step in [step for step in list_steps(root) if step <= newest][keep:]:
        if best is None or best["checkpoint"] != checkpoint_name(step):
            shutil.rmtree(root / checkpoint_name(step))
    for leftover in [*root.glob(".step-*.part"), *root.glob(".step-*.old")]:
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in filter(is_temporary, list(root.iterdir())):
        leftover.unlink(missing_ok=True)
