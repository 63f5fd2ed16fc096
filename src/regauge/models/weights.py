"""Weights in folders: which weight of a model each is, reading them by rows, writing them.

Only safetensors are read; a process that keeps a part of a weight reads that part alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from regauge import safetensors_io
from regauge.data.tokenizer import files as tokenizer_files
from regauge.errors import SettingsError
from regauge.models.hub import CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_FILE = 5_000_000_000
"""Bytes of weights in one file; a folder with more has several and an index, as transformers'."""
_LEGACY = ((".gamma", ".weight"), (".beta", ".bias"))
"""How the first BERTs name the two parts of a layer norm, and how they are named today."""


@dataclass(frozen=True)
class Stored:
    """One weight in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows of the weight."""
        with torch.device("cpu"), safe_open(self.file, framework="pt") as opened:
            found: Tensor = opened.get_slice(self.name)[rows]
        return found


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights: safetensors, or pickles where there are none.

    Raises SettingsError where an index names a file that is not there.
    """
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        table = json.loads((folder / INDEX).read_text())["weight_map"]
        files = [folder / name for name in sorted(set(table.values()))]
        for file in files:
            if not file.is_file():
                raise SettingsError(f"{file} is missing", "copy the whole folder again")
        return files
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def pickled(folder: Path) -> bool:
    """Return whether a folder has its weights in pickles alone."""
    return any(file.suffix == ".bin" for file in weight_files(folder))


def refuse_pickles(folder: Path) -> None:
    """Raise SettingsError for a folder whose weights are pickles."""
    if pickled(folder):
        raise SettingsError(
            f"the weights in '{folder}' are a pickle",
            f"run: regauge import {folder} --to OTHER, and name that folder",
        )


def stored(folder: Path) -> dict[str, Stored]:
    """Return every weight of a folder by its name there; only headers are read."""
    refuse_pickles(folder)
    return {name: place for file in weight_files(folder) for name, place in listed(file).items()}


def listed(file: Path) -> dict[str, Stored]:
    """Return every weight of a file by its name there; only the header is read."""
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise SettingsError(f"{file} cannot be read: {error}", "copy it again") from None
    return {name: Stored(file, name, shape) for name, shape in shapes.items()}


def whole_file(file: Path) -> dict[str, Tensor]:
    """Return every weight of a file, in memory."""
    return {name: place[:] for name, place in listed(file).items()}


def whole(folder: Path) -> dict[str, Tensor]:
    """Return every weight of a folder, in memory."""
    return {name: place[:] for name, place in stored(folder).items()}


class Matched(NamedTuple):
    """Which weights of a model a folder has."""

    places: dict[str, Stored]
    """By the model's names."""
    absent: list[str]
    """The model's others: parts of a head."""
    strange: list[str]
    """What the folder has beside them."""


def matched(model: PreTrainedModel, found: Mapping[str, Stored], where: str) -> Matched:
    """Return where each weight of a model lies in a folder.

    Names may differ by what precedes the body's, and as the first BERTs' did. Raises SettingsError
    where a part of the body is absent, or has another shape: the folder is of another model.
    """
    first: dict[int, str] = {}
    own: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        plain = first.setdefault(id(value), plain_name(name))
        own[plain_name(name)] = plain
        shapes[plain] = tuple(value.shape)
    places: dict[str, Stored] = {}
    strange = []
    for name, place in found.items():
        known = next(
            (own[each] for each in _names(name, model.base_model_prefix) if each in own), ""
        )
        if not known:
            strange.append(name)
        elif name == known or known not in places:
            places[known] = place
    for name, place in places.items():
        if place.shape != shapes[name]:
            raise SettingsError(
                f"'{where}': '{name}' is {place.shape} there, {shapes[name]} by its {CONFIG}",
                f"name a folder whose {CONFIG} and weights are of one model",
            )
    absent = [name for name in shapes if name not in places and not adapting(name)]
    body = {first[id(value)] for value in model.base_model.parameters()}
    if lost := [name for name in absent if name in body]:
        raise _of_another_model(model, where, lost, len(body))
    return Matched(places, absent, strange)


def plain_name(name: str) -> str:
    """Return a weight's name without what an adapter beside it adds."""
    return name.replace(".base_layer.", ".")


def adapting(name: str) -> bool:
    """Return whether a weight is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def _names(name: str, prefix: str) -> Iterator[str]:
    """Yield what a stored weight may be called in a model whose body is behind a prefix."""
    for old, new in (("", ""), *_LEGACY):
        if name.endswith(old):
            today = name.removesuffix(old) + new
            yield from (today, f"{prefix}.{today}", today.removeprefix(f"{prefix}."))


def _of_another_model(
    model: PreTrainedModel, where: str, lost: list[str], count: int
) -> SettingsError:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    kind = model.config.model_type
    problem = f"'{where}' lacks {len(lost)} of {count} weights of a {kind}, such as '{lost[0]}'"
    if get_checkpoint_conversion_mapping(kind) is not None:
        remedy = f"where they have other names there, run: regauge import {where} --to OTHER"
        return SettingsError(problem, remedy)
    return SettingsError(problem, f"name a folder whose {CONFIG} and weights are of one model")


def save(
    folder: Path,
    config: PretrainedConfig,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: Path,
) -> None:
    """Write a folder that transformers loads: configuration, weights, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, weights)
    describe(folder, config, tokenizer)


def describe(folder: Path, config: PretrainedConfig, tokenizer: Path) -> None:
    """Write what a folder of weights has beside them: configuration and tokenizer."""
    config.save_pretrained(folder)
    described = (*tokenizer.glob("*.json"), *tokenizer.glob("*.jinja"))
    for file in sorted({*described, *tokenizer_files(tokenizer)}):
        if file.name not in (CONFIG, INDEX):
            (folder / file.name).write_bytes(file.read_bytes())


def write(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights as they come; at most one file's are in memory at a time."""
    files = Files(folder)
    for name, value in weights:
        files.add(name, value)
    files.finish()


class Files:
    """Weights that are written as they come, some to each file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._held = self._bytes = 0

    def add(self, name: str, value: Tensor) -> None:
        """Take a weight, and write those before it where both would be too much for a file."""
        if self._open and self._held + value.nbytes > LARGEST_FILE:
            self._write()
        self._open[name] = value.contiguous()
        self._held += value.nbytes
        self._bytes += value.nbytes

    def finish(self) -> None:
        """Write the rest; give the files their names, and an index where there are several."""
        self._write()
        count = len(self._written)
        if count == 1:
            self._part(1).replace(self._folder / WHOLE)
            return
        table: dict[str, str] = {}
        for number, names in enumerate(self._written, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._part(number).replace(self._folder / file)
            table |= dict.fromkeys(names, file)
        document = {"metadata": {"total_size": self._bytes}, "weight_map": table}
        (self._folder / INDEX).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")

    def _part(self, number: int) -> Path:
        return self._folder / f".model-{number:05d}.part"

    def _write(self) -> None:
        self._written.append(list(self._open))
        safetensors_io.write(self._part(len(self._written)), self._open)
        self._open, self._held = {}, 0
