"""Weight files in model folders, and the names in them; imports neither torch nor numpy.

A plan reads here what the loader in `weights.py` decides.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from regauge.system.errors import SettingsError
from regauge.system.hub import CONFIG
from regauge.system.json_files import DocumentShape, read_json
from regauge.system.safetensors_io import MappedTensor, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
T = TypeVar("T")
WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Weight name parts that torch.compile, activation checkpointing and FSDP add anywhere."""
DDP_PREFIX = re.compile(r"^(module\.)+")
"""Prefix that DDP adds to all names, once per wrapper."""


class WeightIndex(DocumentShape):
    """A model's weight file index."""

    weight_map: dict[str, str]


def find_weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files: safetensors, or pickles if there are none.

    Raises SettingsError if a file in the index is missing, or if a folder with a configuration has
    only other names, which transformers does not read.
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
    files = sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob("*.safetensors"))
    if files and files[0].suffix == ".safetensors" and (folder / CONFIG).is_file():
        problem = f"{folder} has {files[0].name}, but neither {WEIGHTS_FILE} nor {INDEX_FILE}"
        raise SettingsError(problem, "copy the whole folder again, or rename a single file")
    return files


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


def are_untied(
    path: str, ties: Mapping[str, str], stored: Mapping[str, T], are_equal: Callable[[T, T], bool]
) -> bool:
    """Return whether weights that a model ties, name -> other name, are stored with other values.

    Raises SettingsError if some are not stored: transformers would untie the others alone, which no
    configuration can express. `path` names the folder in messages.
    """
    pairs = [(name, other) for name, other in ties.items() if {name, other} <= stored.keys()]
    if all(are_equal(stored[name], stored[other]) for name, other in pairs):
        return False
    if missing := ties.keys() - stored.keys():
        problem = f"'{path}' unties its output layer only in part: it has no '{min(missing)}'"
        raise SettingsError(problem, "save the whole model with tie_word_embeddings = false")
    return True


def store_untied(folder: Path, ties: Mapping[str, str]) -> bool:
    """Return `are_untied` for a folder; raises SettingsError for pickles and damaged files."""
    refuse_pickles(folder)
    stored: dict[str, MappedTensor] = {}
    for file in find_weight_files(folder):
        try:
            tensors = map_tensors(file)
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(f"{file} cannot be read: {error}", "copy it again") from None
        stored |= {unwrap_name(key): value for key, value in tensors.items()}
    return are_untied(str(folder), ties, stored, MappedTensor.equals)
