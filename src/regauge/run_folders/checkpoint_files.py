"""Checkpoint folders on disk: staged, hashed, and committed by one rename.

    checkpoints/step-00000100/         manifest.json, state.json, *.safetensors
    checkpoints/.step-00000100.part/   staging folder of a save in progress, or one that was killed
    checkpoints/LATEST                 name of the newest checkpoint
    checkpoints/BEST                   folder and metric of the best checkpoint, if one is kept

No torch here. A folder is a checkpoint only if it has a manifest, and every file has the hash and
the size in the manifest.
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
"""Subfolder of the checkpoints in the output folder of a run."""
MANIFEST = "manifest.json"
STATE = "state.json"
MAX_DOCUMENT_BYTES = 1 << 26
"""Maximum size of a manifest or state that is read."""
LATEST = "LATEST"
BEST = "BEST"


class ManifestShape(DocumentShape):
    """The manifest of a checkpoint."""

    files: dict[str, Any]


class StateShape(DocumentShape):
    """What every reader of a checkpoint's state needs."""

    step: Count


class BestShape(DocumentShape):
    """The record of the best checkpoint."""

    checkpoint: str


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step of a checkpoint's folder name; None for any other name."""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and name != digits else None


def staging_folder(root: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before its commit."""
    return root / f".{checkpoint_name(step)}.part"


def describe_file(path: Path) -> dict[str, Any]:
    """Return the hash and the size of a file, as the manifest lists them."""
    return {"sha256": sha256(path), "bytes": path.stat().st_size}


def ignore_point(_point: str, *, step: int = 0) -> None:
    """Do nothing at a point of a save."""


def commit(
    root: Path,
    step: int,
    files: dict[str, dict[str, Any]],
    on_point: Callable[[str], None] = ignore_point,
) -> Path:
    """Turn a staging folder into the checkpoint of its step; the rename is the commit.

    `files` is the hash and size of each file by its name.
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
    """Finish a commit that was killed while it replaced an older checkpoint of the same step."""
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
    """Return the error for a step of which a run has no checkpoint; `key` selects the step."""
    steps = ", ".join(map(str, sorted(list_steps(root)))) or "none"
    remedy = f"set {key} to one of: {steps}"
    if step == BEST.lower():
        remedy += "; output.checkpoint.best_metric keeps the best one of a run"
    return SettingsError(f"{root.parent} has no checkpoint '{step}'", remedy)


def find_damage(path: Path, *, rank: int = 0, size: int = 1) -> str | None:
    """Return the damage of a checkpoint, or None; each of `size` processes hashes a share of it."""
    files, problem = _read_file_list(path), find_missing_file(path)
    if problem or isinstance(files, str):
        return problem
    for name in sorted(files)[rank::size]:
        if describe_file(path / name) != files[name]:
            return _describe_change(path / name)
    return None


def find_missing_file(path: Path) -> str | None:
    """Return which file of a checkpoint is missing or has another size, or None; hashes nothing."""
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
    """Return the files in a checkpoint's manifest, or the damage of the checkpoint.

    A checkpoint may come from an untrusted source. Therefore no file outside of it is read, no file
    that its manifest does not list, and no document that would fill the memory.
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
    """Yield the steps of the checkpoints of a run, newest first, and their times since the epoch.

    `folder` is the output folder. Checkpoints that are incomplete or just removed are skipped.
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
    """Return the folder name, metric and value of the best checkpoint; None if none is kept."""
    try:
        document = read_json(root / BEST, "remove it", BestShape)
    except DataError:
        return None
    return document if (root / document["checkpoint"]).is_dir() else None


def retain(root: Path, keep: int, newest: int) -> None:
    """Remove all but the newest checkpoints and the best one, and the remains of killed saves.

    `newest` is the step that was saved last. Checkpoints after it are damaged ones that the run
    skipped: they do not count, and stay until they are saved again.
    """
    best = read_best(root)
    for step in [step for step in list_steps(root) if step <= newest][keep:]:
        if best is None or best["checkpoint"] != checkpoint_name(step):
            shutil.rmtree(root / checkpoint_name(step))
    for leftover in [*root.glob(".step-*.part"), *root.glob(".step-*.old")]:
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in filter(is_temporary, list(root.iterdir())):
        leftover.unlink(missing_ok=True)
