"""Weight files in model folders, and the names in them; imports no torch.

A plan reads here what the loader in `weights.py` decides.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from regauge.system.errors import SettingsError
from regauge.system.json_files import DocumentShape, read_json
from regauge.system.safetensors_io import map_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.system.safetensors_io import MappedTensor

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Weight name parts that torch.compile, activation checkpointing and FSDP add anywhere."""
DDP_PREFIX = re.compile(r"^(module\.)+")
"""Prefix that DDP adds to all names, once per wrapper."""


class WeightIndex(DocumentShape):
    """A model's weight file index."""

    weight_map: dict[str, str]


def find_weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files: safetensors, or pickles if there are none.

    Raises SettingsError if a file in the index is missing.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE, "copy the whole folder again", WeightIndex)
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
        for file in files:
            if not file.is_file():
                raise SettingsError(f"{file} is missing", "copy the whole folder again")
        return files
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def has_pickled_weights(folder: Path) -> bool:
    """Return whether a folder's weights exist only as pickles."""
    return any(file.suffix == ".bin" for file in find_weight_files(folder))


def refuse_pickles(folder: Path) -> None:
    """Raise SettingsError if a folder's weights are pickles."""
    if has_pickled_weights(folder):
        raise SettingsError(
            f"the weights in '{folder}' are a pickle",
            f"run: regauge import {folder} --to OTHER, and use that folder",
        )


def unwrap_name(name: str) -> str:
    """Return a weight's name in the model without wrappers."""
    return DDP_PREFIX.sub("", WRAPPERS.sub("", name))


def have_other_values(folder: Path, name: str, other: str) -> bool:
    """Return whether a folder stores two weights, with different numbers.

    Raises SettingsError if the weights are a pickle, or if a file cannot be read.
    """
    refuse_pickles(folder)
    stored: dict[str, MappedTensor] = {}
    for file in find_weight_files(folder):
        try:
            tensors = map_tensors(file)
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(f"{file} cannot be read: {error}", "copy it again") from None
        stored |= {unwrap_name(key): value for key, value in tensors.items()}
    if name not in stored or other not in stored:
        return False
    one, two = stored[name], stored[other]
    if one.dtype == two.dtype:
        return not np.array_equal(one.content, two.content)
    return not np.array_equal(one.read_array(), two.read_array())
