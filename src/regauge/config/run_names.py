"""Run names for people, and ids for machines, from output folders."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

STAGE_FOLDER = re.compile(r"(\d+)-(.+)")
"""Pipeline stage folder: its number and its name."""
_ROUND_FOLDER = re.compile(r"[0-9a-f]{12}")
_ID_DIGITS = 12


def name_run(folder: Path) -> str:
    """Return a run's name: the folder's, with the stage's in a round of a pipeline.

    For example:

        >>> name_run(Path("out/3-train/678b130b2983"))
        '3-train/678b130b2983'
    """
    path = folder.resolve()
    is_round = _ROUND_FOLDER.fullmatch(path.name) and STAGE_FOLDER.fullmatch(path.parent.name)
    return f"{path.parent.name}/{path.name}" if is_round else path.name


def hash_folder(folder: Path) -> str:
    """Return an id for a run without a recorded one, from its absolute path."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:_ID_DIGITS]
