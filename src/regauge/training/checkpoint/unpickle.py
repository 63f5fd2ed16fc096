"""A worker process that opens third-party pickles and writes their tensors as safetensors.

`worker.run_worker` starts it, so a hostile pickle cannot harm another process. The request:

    origin    a tensor file, or a folder of them, such as torch.distributed.checkpoint writes
    target    the safetensors file to write
    names     a model's weight names; null takes all tensors
    prefix    the prefix before these names in the origin; null to find it
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import Counter
from enum import Enum, EnumMeta
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from regauge.models.weight_files import WRAPPERS, find_weight_files
from regauge.system import safetensors_io
from regauge.system.worker import receive_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    LazyTensors = tuple[list[str], Callable[[list[str]], dict[str, Tensor]]]
    """Names of tensors, and a function that reads some of them."""

METADATA_FILE = ".metadata"
"""File in which torch.distributed.checkpoint pickles tensor metadata."""
ALLOWED_NAMES = {
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
"""Module -> names allowed in the metadata; all of them only hold values."""


_REFUSED_NAME = re.compile(r"GLOBAL (\S+) was not an allowed global")
"""The part of torch's message with the refused class or function."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads tensor metadata; raises UnpicklingError for other names before they are called."""

    def find_class(self, module: str, name: str) -> Any:
        if isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if name == "PosixPath" and module.partition(".")[0] == "pathlib":
            return PurePosixPath
        if name in ALLOWED_NAMES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _get_member
        raise pickle.UnpicklingError(f"it would call {module}.{name}")


def _get_member(enumeration: object, name: str) -> Enum:
    """Return an enumeration member, which Python 3.11.0 to 3.11.3 pickle as a `getattr`."""
    if not isinstance(enumeration, EnumMeta):
        raise pickle.UnpicklingError(f"it would read the attribute '{name}'")
    return enumeration[name]


class _SafeReader(dcp.FileSystemReader):
    """Reads a torch.distributed.checkpoint folder; the base class would call any name in it."""

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        return read_metadata((Path(self.path) / METADATA_FILE).read_bytes())


def read_metadata(content: bytes) -> Metadata:
    """Read a `.metadata` file; raises UnpicklingError if it has other names."""
    metadata = _MetadataUnpickler(BytesIO(content)).load()
    if not isinstance(metadata, Metadata):
        raise TypeError(f"its {METADATA_FILE} holds a {type(metadata).__name__}")
    return metadata


def main(origin: Path, target: Path, names: list[str] | None, prefix: str | None) -> None:
    """Write tensors under a model's weight names; raises if the origin has none of them."""
    if (origin / METADATA_FILE).is_file():
        stored, read = _open_distributed(origin)
    else:
        stored, read = _open_files(origin)
    if not stored:
        raise ValueError("it holds no tensors")
    model_prefix = ""
    if names is not None:
        model_prefix = find_prefix(stored, names) if prefix is None else prefix
        stored = [name for name in stored if name.startswith(model_prefix)]
    tensors = {
        WRAPPERS.sub("", name.removeprefix(model_prefix)): value.clone(
            memory_format=torch.contiguous_format
        )
        for name, value in read(stored).items()
    }
    safetensors_io.write_tensors(target, tensors)


def find_prefix(stored: Iterable[str], names: Iterable[str]) -> str:
    """Return the prefix before most of a model's weight names, ignoring wrappers.

    Raises ValueError if no name is stored, or if two prefixes are equally frequent.
    """
    model_names, stored = set(names), list(stored)
    counts: Counter[str] = Counter()
    for name in stored:
        parts = name.split(".")
        for index, part in enumerate(parts):
            suffix = ".".join(parts[index:])
            if not WRAPPERS.fullmatch(f"{part}.") and WRAPPERS.sub("", suffix) in model_names:
                counts["".join(f"{part}." for part in parts[:index])] += 1
    if not counts:
        raise ValueError(
            f"none of its {len(stored)} tensors is this model's; the first is '{stored[0]}'"
        )
    max_count = max(counts.values())
    first, *others = sorted(prefix for prefix, count in counts.items() if count == max_count)
    if others:
        raise ValueError(f"it has weights of this model behind '{first}' and '{others[0]}'")
    return first


def _open_files(origin: Path) -> LazyTensors:
    """Open the tensors in a file, or in a folder's files, at any nesting depth."""
    values: dict[str, Tensor] = {}
    for file in find_weight_files(origin) if origin.is_dir() else [origin]:
        values |= _flatten(_load_file(file))
    return list(values), lambda names: {name: values[name] for name in names}


def _load_file(file: Path) -> Any:
    if file.suffix == ".safetensors":
        return load_file(file)
    is_mappable = zipfile.is_zipfile(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mappable)
    except pickle.UnpicklingError as error:
        refused = _REFUSED_NAME.search(str(error))
        if refused is None:
            raise
        raise pickle.UnpicklingError(
            f"{file.name} contains {refused[1]}, which is code, next to its tensors"
        ) from None


def _flatten(document: Any) -> dict[str, Tensor]:
    """Dotted name -> tensor in nested dictionaries."""

    def walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, f"{name}.{key}" if name else str(key))

    return dict(walk(document, ""))


def _open_distributed(origin: Path) -> LazyTensors:
    reader = _SafeReader(origin)
    metadata = {
        name: entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }

    def read(names: list[str]) -> dict[str, Tensor]:
        tensors = {
            name: torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
            for name in names
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    return list(metadata), read


if __name__ == "__main__":
    request = receive_job().request
    main(Path(request["origin"]), Path(request["target"]), request["names"], request["prefix"])
