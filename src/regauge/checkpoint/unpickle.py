"""A process that opens what others pickled, and writes its tensors as safetensors.

`worker.run_worker` starts it; it has nothing else to lose. The request:

    origin    a file of tensors, or a folder of them, such as torch.distributed.checkpoint writes
    target    the file of safetensors
    names     a model's names; null takes all tensors
    prefix    what precedes these names in the origin; null if it is to be found out
"""

from __future__ import annotations

import pickle
import zipfile
from collections import Counter
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import metadata as facts

from regauge import safetensors_io
from regauge.models.weights import weight_files
from regauge.worker import receive_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    Stored = tuple[list[str], Callable[[list[str]], dict[str, Tensor]]]

FACTS = ".metadata"
"""What torch.distributed.checkpoint pickles about its tensors."""
CALLABLE = {
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""All that these facts may name, by module; none of it does more than hold values."""


class _Facts(pickle.Unpickler):
    """Reads facts about tensors; raises UnpicklingError for anything else, before it is called."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names."""
        if isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        if name == "PosixPath" and module.partition(".")[0] == "pathlib":
            return PurePosixPath
        if name in CALLABLE.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would call {module}.{name}")


class _Reader(dcp.FileSystemReader):
    """Reads a folder of torch.distributed.checkpoint, whose own reader would call what it names."""

    def read_metadata(self, *_arguments: Any, **_options: Any) -> facts.Metadata:
        """Return the facts of all tensors."""
        return facts_in((Path(self.path) / FACTS).read_bytes())


def facts_in(text: bytes) -> facts.Metadata:
    """Return what a `.metadata` says; raises UnpicklingError where it would call anything else."""
    found = _Facts(BytesIO(text)).load()
    if not isinstance(found, facts.Metadata):
        raise TypeError(f"its {FACTS} holds a {type(found).__name__}")
    return found


def main(origin: Path, target: Path, names: list[str] | None, prefix: str | None) -> None:
    """Write a model's tensors by its own names; raises for anything else in the origin."""
    if (origin / FACTS).is_file():
        there, read = _distributed(origin)
    else:
        there, read = _plain(origin)
    if not there:
        raise ValueError("it holds no tensors")
    before = ""
    if names is not None:
        before = prefix_of(there, names) if prefix is None else prefix
        there = [name for name in there if name.startswith(before)]
    tensors = {
        name.removeprefix(before): value.clone(memory_format=torch.contiguous_format)
        for name, value in read(there).items()
    }
    safetensors_io.write(target, tensors)


def prefix_of(there: Iterable[str], names: Iterable[str]) -> str:
    """Return what precedes a model's names among those of a file: most of them are found behind it.

    Raises ValueError where none is found, or as many behind another one.
    """
    wanted, there = set(names), list(there)
    found: Counter[str] = Counter()
    for name in there:
        parts = name.split(".")
        for number in range(len(parts)):
            if ".".join(parts[number:]) in wanted:
                found["".join(f"{part}." for part in parts[:number])] += 1
    if not found:
        raise ValueError(
            f"none of its {len(there)} tensors is this model's; the first is '{there[0]}'"
        )
    most = max(found.values())
    first, *others = sorted(prefix for prefix, count in found.items() if count == most)
    if others:
        raise ValueError(f"it has such weights behind '{first}' and '{others[0]}'")
    return first


def _plain(origin: Path) -> Stored:
    """Return the tensors of a file, or of the files of a folder, however they are nested."""
    values: dict[str, Tensor] = {}
    for file in weight_files(origin) if origin.is_dir() else [origin]:
        values |= _flat(_opened(file))
    return list(values), lambda names: {name: values[name] for name in names}


def _opened(file: Path) -> Any:
    if file.suffix == ".safetensors":
        return load_file(file)
    mapped = zipfile.is_zipfile(file)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _flat(document: Any) -> dict[str, Tensor]:
    def walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            for key, part in value.items():
                yield from walk(part, f"{name}.{key}" if name else str(key))

    return dict(walk(document, ""))


def _distributed(origin: Path) -> Stored:
    reader = _Reader(origin)
    sizes = {
        name: found
        for name, found in reader.read_metadata().state_dict_metadata.items()
        if isinstance(found, facts.TensorStorageMetadata)
    }

    def read(names: list[str]) -> dict[str, Tensor]:
        tensors = {
            name: torch.empty(sizes[name].size, dtype=sizes[name].properties.dtype)
            for name in names
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    return list(sizes), read


if __name__ == "__main__":
    request = receive_job().request
    main(Path(request["origin"]), Path(request["target"]), request["names"], request["prefix"])
