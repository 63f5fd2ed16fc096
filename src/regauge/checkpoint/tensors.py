"""Tensors of all processes in safetensors files, through torch's distributed checkpoint.

Only tensors pass here: given a scalar, that writer would pickle it under a name that ends in
`.safetensors`, so every header is read again before a checkpoint counts.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import _hf_utils as names
from torch.distributed.tensor import DTensor
from torch.futures import Future

from regauge import safetensors_io
from regauge.errors import TransientError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint import SavePlan, SavePlanner

Tensors = dict[str, "Tensor"]


class Writer(dcp.HuggingFaceStorageWriter):
    """Writes what torch's own does, which makes three copies of all tensors first."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Write the one file of this process, if any of the tensors are its own."""
        tensors: Tensors = {}
        places = {}
        for item in plan.items:
            name, part = item.index.fqn, item.tensor_data
            value = planner.resolve_data(item)
            if part is None or not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} is no tensor")
            tensors[name] = value
            places[name] = {names.SAVED_OFFSETS_KEY: part.chunk.offsets}
        if tensors:
            own = names._gen_file_name(1, 1, plan.storage_data["shard_index"])  # noqa: SLF001
            facts = {
                names.CUSTOM_METADATA_KEY: json.dumps(places),
                names.DCP_VERSION_KEY: str(names.HF_DCP_VERSION),
                names.FORMAT_KEY: names.FORMAT_VALUE,
            }
            safetensors_io.write(Path(self.path) / own, tensors, facts)
        done: Future[list[Any]] = Future()
        done.set_result([])
        return done


def write(folder: Path, tensors: Tensors, group: dist.ProcessGroup | None) -> None:
    """Write the tensors of all processes into a folder; replicas are written once."""
    scalars = [name for name, value in tensors.items() if value.ndim == 0]
    if scalars:
        raise TypeError(f"scalars do not belong in a tensor file: {scalars[:3]}")
    writer = Writer(str(folder), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save(
                dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None
            )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
            raise TransientError(
                f"a checkpoint could not be written to {folder}: {reason}",
                "make room on that disk, or point output.folder elsewhere, and start again",
            ) from error


def read_into(folder: Path, tensors: Tensors) -> None:
    """Fill tensors, whole or sharded, from a folder that any world wrote.

    A whole tensor of a device is filled by one copy from the host.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    alone = not (dist.is_initialized() and dist.get_world_size() > 1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        staged = {name: _staged(value) for name, value in tensors.items()}
        dcp.load(dict(staged), storage_reader=reader, no_dist=alone)
        for name, value in tensors.items():
            if staged[name] is not value:
                value.copy_(staged[name])


def _staged(value: Tensor) -> Tensor:
    """Return where a tensor is read to: itself, or its likeness on the host."""
    if isinstance(value, DTensor) or value.is_cpu:
        return value
    return torch.empty_like(value, device="cpu")


def damage(folder: Path) -> str | None:
    """Return which tensor file has no header that safetensors accepts, or None.

    What it accepts is no larger than 100 MB, and points nowhere outside of its file.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            return f"{path} holds no tensors: {error}"
    return None
