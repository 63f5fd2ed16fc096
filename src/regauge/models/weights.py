"""Weight files in transformers folders: matching to a model, reading by rows, writing.

Only safetensors files are read. A process that keeps part of a weight reads only that part.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from regauge.data.tokenizer import copy_tokenizer_files
from regauge.models.tensors import find_tied_weights, set_tensor
from regauge.models.weight_files import (
    INDEX_FILE,
    WEIGHTS_FILE,
    are_untied,
    find_weight_files,
    refuse_pickles,
    unwrap_name,
)
from regauge.system import safetensors_io
from regauge.system.errors import SettingsError
from regauge.system.hub import ADAPTER_CONFIG, CONFIG
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

MAX_FILE_BYTES = 5_000_000_000
"""Maximum size of a weight file; larger models get several files and an index."""
POOLER_PREFIX = "pooler."
"""Weight name prefix of an encoder's pooling layer."""
COMPARED_ROWS = 4096
"""Rows of two stored weights that are compared at once."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a file; only the slices that are read use memory."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, rows: slice) -> Tensor:
        """Read a slice of the weight's rows."""
        with torch.device("cpu"), safe_open(self.file, framework="pt") as tensors:
            value: Tensor = tensors.get_slice(self.name)[rows]
        return value


def list_weights(folder: Path) -> dict[str, StoredWeight]:
    """Return the weights of a folder by their stored names; reads only the file headers."""
    refuse_pickles(folder)
    files = find_weight_files(folder)
    return {name: weight for file in files for name, weight in list_file_weights(file).items()}


def list_file_weights(file: Path) -> dict[str, StoredWeight]:
    """Return the weights of a file by their stored names; reads only the header."""
    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise SettingsError(f"{file} cannot be read: {error}", "copy it again") from None
    return {name: StoredWeight(file, name, shape) for name, shape in shapes.items()}


def read_weight_file(file: Path) -> dict[str, Tensor]:
    return {name: weight[:] for name, weight in list_file_weights(file).items()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {name: weight[:] for name, weight in list_weights(folder).items()}


class WeightMatch(NamedTuple):
    """A folder's weights, matched to a model's."""

    sources: dict[str, StoredWeight]
    """Stored weights by their names in the model."""
    missing: list[str]
    """Model weights that are not stored; all belong to a head."""
    unexpected: list[str]
    """Stored weights that the model does not have in this shape."""


def match_weights(
    model: PreTrainedModel, stored: Mapping[str, StoredWeight], path: str
) -> WeightMatch:
    """Match a folder's stored weights to a model's.

    Stored names may contain wrappers, lack the base model's prefix, or be older ones that
    transformers renames. A head weight with another shape, such as for other classes, is not used.
    Raises SettingsError if a base model weight is missing or has another shape; `path` names the
    folder in messages.
    """
    names_by_id: dict[int, str] = {}  # a tied weight has the first of its names
    names: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for full_name, value in model.named_parameters(remove_duplicate=False):
        name = names_by_id.setdefault(id(value), base_weight_name(full_name))
        names[base_weight_name(full_name)] = name
        shapes[name] = tuple(value.shape)
    sources: dict[str, StoredWeight] = {}
    unexpected = []
    for stored_name, name in match_names(model, stored).items():
        match = names.get(name, "")
        if not match:
            unexpected.append(stored_name)
        elif stored_name == match or match not in sources:
            sources[match] = stored[stored_name]
    base_names = {names_by_id[id(value)] for value in model.base_model.parameters()}
    for name in [name for name, weight in sources.items() if weight.shape != shapes[name]]:
        weight = sources.pop(name)
        unexpected.append(weight.name)
        if name in base_names:
            raise SettingsError(
                f"'{path}': '{name}' is {weight.shape}, but {CONFIG} implies {shapes[name]}",
                f"name a folder whose {CONFIG} and weights are of one model",
            )
    missing = [name for name in shapes if name not in sources and not is_adapter_weight(name)]
    pooler = f"{model.base_model_prefix}.{POOLER_PREFIX}"  # it counts as head
    missing_base = [name for name in missing if name in base_names and not name.startswith(pooler)]
    if missing_base:
        raise _wrong_model_error(model, path, missing_base, len(base_names))
    return WeightMatch(sources, missing, unexpected)


def base_weight_name(name: str) -> str:
    """Return a weight's name in the model without LoRA adapters."""
    return name.replace(".base_layer.", ".")


def is_adapter_weight(name: str) -> bool:
    """Return whether a weight name belongs to a LoRA adapter."""
    return ".lora_A." in name or ".lora_B." in name


def match_names(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Return stored name -> name in the model, or an unknown name.

    Names are unwrapped, and renamed as transformers does. Buffers that the model computes, such as
    position ids, are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
    known = {base_weight_name(name): name for name in model.state_dict()}
    names = {}
    for stored_name in stored:
        name = unwrap_name(stored_name)
        if name not in known:
            name, _ = rename_source_key(name, renamings, [], model.base_model_prefix, known)
        names[stored_name] = name
    unknown = set(names.values()) - known.keys()
    report: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=unknown)
    model._adjust_missing_and_unexpected_keys(report)  # noqa: SLF001 - lists computed buffers
    computed = unknown - report.unexpected_keys
    return {stored_name: name for stored_name, name in names.items() if name not in computed}


def starts_untied(
    model: PreTrainedModel, stored: Mapping[str, Tensor | StoredWeight], path: str
) -> bool:
    """Return `are_untied` for stored weights; then transformers loads both of a pair."""
    weights = {
        name: stored[stored_name] for stored_name, name in match_names(model, stored).items()
    }
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    return are_untied(path, ties, weights, _have_equal_values)


def untie(model: PreTrainedModel) -> None:
    """Give each layer a weight of its own, and record it in the configuration."""
    for name, *others in find_tied_weights(model):
        for other in others:
            set_tensor(model, other, copy.deepcopy(model.get_parameter(name)))
    model.config.tie_word_embeddings = False


def _have_equal_values(one: Tensor | StoredWeight, other: Tensor | StoredWeight) -> bool:
    return one.shape == other.shape and all(
        torch.equal(
            one[start : start + COMPARED_ROWS].float(), other[start : start + COMPARED_ROWS].float()
        )
        for start in range(0, one.shape[0], COMPARED_ROWS)
    )


def _wrong_model_error(
    model: PreTrainedModel, path: str, missing: list[str], count: int
) -> SettingsError:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    kind = model.config.model_type or "custom module"
    total = format_count(count, "weight")
    problem = f"'{path}' lacks {len(missing)} of {total} of a {kind}, such as '{missing[0]}'"
    if get_checkpoint_conversion_mapping(kind) is not None:
        remedy = f"if they have other names, run: regauge import {path} --to OTHER"
        return SettingsError(problem, remedy)
    return SettingsError(problem, f"name a folder whose {CONFIG} and weights are of one model")


def save_model_folder(
    folder: Path,
    config: PretrainedConfig,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: Path,
) -> None:
    """Write a transformers folder: configuration, weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, weights)
    write_config_and_tokenizer(folder, config, tokenizer)


def write_config_and_tokenizer(folder: Path, config: PretrainedConfig, tokenizer: Path) -> None:
    """Write the configuration, and copy the tokenizer files to a weight folder."""
    config.save_pretrained(folder)
    copy_tokenizer_files(tokenizer, folder)
    for file in sorted([*tokenizer.glob("*.json"), *tokenizer.glob("*.jinja")]):
        if file.name not in (CONFIG, INDEX_FILE, ADAPTER_CONFIG):
            (folder / file.name).write_bytes(file.read_bytes())


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights in order; at most one file of weights is in memory at a time."""
    files = WeightFileWriter(folder)
    for name, value in weights:
        files.add(name, value)
    files.finish()


class WeightFileWriter:
    """Writes weights in order to files with at most MAX_FILE_BYTES."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._names_by_file: list[list[str]] = []
        self._pending_bytes = self._total_bytes = 0

    def add(self, name: str, value: Tensor) -> None:
        """Add a weight; first write the pending ones if the file would become too large."""
        if self._pending and self._pending_bytes + value.nbytes > MAX_FILE_BYTES:
            self._write_file()
        self._pending[name] = value.contiguous()
        self._pending_bytes += value.nbytes
        self._total_bytes += value.nbytes

    def finish(self) -> None:
        """Write the pending weights and name the files; several files get an index."""
        self._write_file()
        count = len(self._names_by_file)
        if count == 1:
            self._temporary_path(1).replace(self._folder / WEIGHTS_FILE)
            return
        table: dict[str, str] = {}
        for number, names in enumerate(self._names_by_file, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._temporary_path(number).replace(self._folder / file)
            table |= dict.fromkeys(names, file)
        document = {"metadata": {"total_size": self._total_bytes}, "weight_map": table}
        (self._folder / INDEX_FILE).write_text(
            json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )

    def _temporary_path(self, number: int) -> Path:
        return self._folder / f".model-{number:05d}.part"

    def _write_file(self) -> None:
        self._names_by_file.append(list(self._pending))
        path = self._temporary_path(len(self._names_by_file))
        safetensors_io.write_tensors(path, self._pending)
        self._pending, self._pending_bytes = {}, 0
