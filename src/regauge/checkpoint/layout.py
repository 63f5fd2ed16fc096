"""Checkpoint folders on disk: written aside, hashed, and committed by one rename.

    checkpoints/step-00000100/         manifest.json, state.json, *.safetensors
    checkpoints/.step-00000100.part/   one that is being written, or never was finished
    checkpoints/LATEST                 the name of the newest
    checkpoints/BEST                   the name and value of the best, where one is kept

No torch here. A folder is a checkpoint only when its manifest is there and every file in it has
the hash and the size that the manifest says.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from regauge.config import FORMAT
from regauge.errors import SettingsError
from regauge.files import flush, is_temporary, sha256, write_atomic, write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MANIFEST = "manifest.json"
STATE = "state.json"
DOCUMENT_BYTES = 1 << 26
"""Largest manifest or state that is read."""
LATEST = "LATEST"
BEST = "BEST"


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def number_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder name; None for any other name."""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and name != digits else None


def part_of(root: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it counts."""
    return root / f".{name_of(step)}.part"


def digest(path: Path) -> dict[str, Any]:
    """Return the hash and size of a file."""
    return {"sha256": sha256(path), "bytes": path.stat().st_size}


def check_free(target: Path) -> None:
    """Raise SettingsError where something is that is to be written, except an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target} exists", "name another place with --to")


def nothing(_moment: str, *, step: int = 0) -> None:
    """Do nothing at a moment of a save."""


def commit(
    root: Path,
    step: int,
    files: dict[str, dict[str, Any]],
    moment: Callable[[str], None] = nothing,
) -> Path:
    """Turn a part folder into the checkpoint of its step; the rename is the commit."""
    part, final = part_of(root, step), root / name_of(step)
    moment("manifest")
    write_json(part / MANIFEST, {"format": FORMAT, "step": step, "files": files})
    flush([part])
    moment("rename")
    if final.exists():
        old = root / f".{name_of(step)}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        moment("swap")
        part.rename(final)
        shutil.rmtree(old)
    else:
        part.rename(final)
    flush([root])
    moment("latest")
    write_atomic(root / LATEST, f"{final.name}\n")
    return final


def recover(root: Path) -> None:
    """Finish what was stopped while one checkpoint took another's place: the new one is whole."""
    for old in root.glob(".step-*.old"):
        final = root / old.name.removeprefix(".").removesuffix(".old")
        part = root / f".{final.name}.part"
        if not final.exists():
            (part if (part / MANIFEST).exists() else old).rename(final)


def steps(root: Path) -> list[int]:
    """Return the steps that were committed, newest first, whether or not they are whole now."""
    numbers = (number_of(path.name) for path in root.glob("step-*"))
    return sorted((number for number in numbers if number is not None), reverse=True)


def damage(path: Path, *, rank: int = 0, size: int = 1) -> str | None:
    """Return what is wrong with a checkpoint, or None; each of `size` processes hashes a share."""
    files, problem = _listed(path), gap(path)
    if problem or isinstance(files, str):
        return problem
    changed = (name for name in sorted(files)[rank::size] if digest(path / name) != files[name])
    return next((_other(path / name) for name in changed), None)


def gap(path: Path) -> str | None:
    """Return what is missing of a checkpoint, or None; nothing is hashed."""
    files = _listed(path)
    if isinstance(files, str):
        return files
    for name, facts in sorted(files.items()):
        if "/" in name or not (path / name).is_file() or (path / name).is_symlink():
            return f"{path / name} is missing"
        if not isinstance(facts, dict) or (path / name).stat().st_size != facts.get("bytes"):
            return _other(path / name)
    return None


def _other(file: Path) -> str:
    return f"{file} is not what it was when it was saved"


def _listed(path: Path) -> dict[str, Any] | str:
    """Return the files of a checkpoint as its manifest lists them, or what is wrong with it.

    It may come from a stranger: nothing outside of it is read, nothing that its manifest leaves
    out, and no document that would fill the memory.
    """
    if path.is_symlink():
        return f"{path} is a link"
    try:
        for document in (MANIFEST, STATE):
            if (path / document).stat().st_size > DOCUMENT_BYTES:
                return f"{path / document} is larger than any that is written"
        manifest = json.loads((path / MANIFEST).read_text())
        files: dict[str, Any] = dict(manifest["files"])
        if int(manifest.get("format", 0)) > FORMAT:
            return f"{path} was written by a later Regauge"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{path / MANIFEST} cannot be read: {error}"
    unknown = sorted({one.name for one in path.iterdir()} - {MANIFEST} - files.keys())
    return f"{path / unknown[0]} is in no manifest" if unknown else files


def read_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state document."""
    document: dict[str, Any] = json.loads((path / STATE).read_text())
    return document


def best(root: Path) -> dict[str, Any] | None:
    """Return the name and value of the best checkpoint, where one is kept."""
    try:
        document: dict[str, Any] = json.loads((root / BEST).read_text())
    except (OSError, ValueError):
        return None
    return document if (root / document["name"]).is_dir() else None


def retain(root: Path, keep: int, newest: int) -> None:
    """Remove all but the newest checkpoints and the best; then what was never finished.

    Checkpoints after `newest`, the last one written, are damaged ones that the run passed over:
    they do not count, and stay until they are written again.
    """
    kept = best(root)
    for step in [step for step in steps(root) if step <= newest][keep:]:
        if kept is None or kept["name"] != name_of(step):
            shutil.rmtree(root / name_of(step))
    for leftover in [*root.glob(".step-*.part"), *root.glob(".step-*.old")]:
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in filter(is_temporary, list(root.iterdir())):
        leftover.unlink(missing_ok=True)
