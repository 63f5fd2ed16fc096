"""Safetensors files from all processes, through torch's distributed checkpoint (DCP).

DCP would pickle a scalar into a `.safetensors` file. Therefore only tensors are saved here, and
every header is read again before a checkpoint is committed.
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
from torch.distributed.checkpoint import _hf_utils as hf_utils
from torch.distributed.tensor import DTensor
from torch.futures import Future

from regauge.system import safetensors_io
from regauge.system.errors import TransientError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint import SavePlan, SavePlanner

Tensors = dict[str, "Tensor"]


class TensorWriter(dcp.HuggingFaceStorageWriter):
    """Writes the same files as its base class, without its three copies of all tensors."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Write this process's file, if the plan assigns tensors to it."""
        tensors: Tensors = {}
        offsets = {}
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            value = planner.resolve_data(item)
            if data is None or not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} is not a tensor")
            tensors[name] = value
            offsets[name] = {hf_utils.SAVED_OFFSETS_KEY: data.chunk.offsets}
        if tensors:
            index = plan.storage_data["shard_index"]
            file_name = hf_utils._gen_file_name(1, 1, index)  # noqa: SLF001
            metadata = {
                hf_utils.CUSTOM_METADATA_KEY: json.dumps(offsets),
                hf_utils.DCP_VERSION_KEY: str(hf_utils.HF_DCP_VERSION),
                hf_utils.FORMAT_KEY: hf_utils.FORMAT_VALUE,
            }
            safetensors_io.write_tensors(Path(self.path) / file_name, tensors, metadata)
        done: Future[list[Any]] = Future()
        done.set_result([])
        return done


def save_tensors(folder: Path, tensors: Tensors, group: dist.ProcessGroup | None) -> None:
    """Write the tensors of all processes into a folder; replicas are written once.

    Every process in the group calls this. Raises TransientError if the files cannot be written.
    """
    scalars = [name for name, value in tensors.items() if value.ndim == 0]
    if scalars:
        raise TypeError(f"scalars do not belong in a tensor file: {scalars[:3]}")
    writer = TensorWriter(str(folder), save_distributed=True)
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
                "free space on that disk or set another output.folder, then start again",
            ) from error


def load_tensors(folder: Path, tensors: Tensors) -> None:
    """Fill tensors, whole or sharded, from a folder written by a run of any world size.

    A whole tensor on a device is filled by one copy from the host.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    is_alone = not (dist.is_initialized() and dist.get_world_size() > 1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        buffers = {name: _host_buffer(value) for name, value in tensors.items()}
        dcp.load(dict(buffers), storage_reader=reader, no_dist=is_alone)
        for name, value in tensors.items():
            if buffers[name] is not value:
                value.copy_(buffers[name])


def _host_buffer(value: Tensor) -> Tensor:
    """Return the tensor to read into: the tensor itself, or an empty one on the host."""
    if isinstance(value, DTensor) or value.is_cpu:
        return value
    return torch.empty_like(value, device="cpu")


def find_bad_header(folder: Path) -> str | None:
    """Return the tensor file whose header safetensors rejects, or None.

    An accepted header has at most 100 MB, and all offsets inside its file.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            return f"{path} is not a valid safetensors file: {error}"
    return None
