"""One rank's part of a program: a slice of each layer, or some layers.

Shards are built from a program on the meta device, so that no rank holds more memory than its
shard.
"""

from __future__ import annotations

import copy
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from regauge.inference.backends._model_parallel.plan import apply_tensor_parallelism
from regauge.models.init_weights import META
from regauge.models.tensors import set_tensor
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.inference.backends._model_parallel.group import RankGroup

Parallelism = Literal["tensor", "pipeline"]


class RowParallelLinear(nn.Linear):
    """A linear layer with inputs split over the ranks; every rank has the whole output."""

    group: RankGroup

    def forward(self, value: Tensor) -> Tensor:
        """Add up all ranks' outputs, then add the bias once."""
        output = nn.functional.linear(value, self.weight)
        self.group.all_reduce_sum(output)
        return output if self.bias is None else output + self.bias


class RemoteStage(nn.Module):
    """Placeholder for a layer on another rank."""

    def __init__(self, group: RankGroup, owner: int, *, is_last: bool) -> None:
        """`is_last` is whether the layer is the last one in the pipeline stage."""
        super().__init__()
        self._group = group
        self._owner = owner
        self._is_last = is_last

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """Return the owner's output after the last layer in its stage, otherwise the input.

        Raises SettingsError if the layers keep keys and values. A model asks the first layer's
        cache for the number of earlier tokens, and that layer may be on another rank.
        """
        if any(hasattr(value, "get_seq_length") for value in (*arguments, *keywords.values())):
            raise SettingsError(
                "pipeline parallelism does not support text generation",
                'set parallelism = "tensor"',
            )
        if self._is_last:
            hidden_states = torch.empty_like(hidden_states).contiguous()
            self._group.broadcast(hidden_states, self._owner)
        return hidden_states


def copy_to_meta(program: nn.Module) -> nn.Module:
    """Copy a program to the meta device, with the same tied weights."""
    copies: dict[int, Any] = {}
    for value in all_named_tensors(program).values():
        empty = torch.empty_like(value, device=META)
        is_weight = isinstance(value, nn.Parameter)
        copies[id(value)] = nn.Parameter(empty, requires_grad=False) if is_weight else empty
    return copy.deepcopy(program, copies)


def all_named_tensors(program: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers under all of their names."""
    weights = program.named_parameters(remove_duplicate=False)
    return dict(chain(weights, program.named_buffers(remove_duplicate=False)))


def build_shard(program: nn.Module, group: RankGroup, parallelism: Parallelism) -> nn.Module:
    """Convert a program on the meta device to the shard for the group's rank, and return it.

    Raises SettingsError if the program cannot be split over that many ranks.
    """
    if parallelism == "tensor":
        _apply_tensor_parallelism(program, group)
    else:
        _apply_pipeline_parallelism(program, group)
    return program.eval()


def group_tied_names(program: nn.Module) -> dict[str, list[str]]:
    """Return first name -> all names of each weight and buffer."""
    names: dict[int, list[str]] = {}
    for name, value in all_named_tensors(program).items():
        names.setdefault(id(value), []).append(name)
    return {tied[0]: tied for tied in names.values()}


def tensor_shapes(program: nn.Module) -> dict[str, torch.Size]:
    """Return first name -> shape of each weight and buffer."""
    tensors = all_named_tensors(program)
    return {name: tensors[name].shape for name in group_tied_names(program)}


def num_bytes(program: nn.Module) -> int:
    """Return the bytes in weights and buffers."""
    tensors = all_named_tensors(program)
    return sum(tensors[name].nbytes for name in group_tied_names(program))


def slice_for_rank(tensor: Tensor, shape: torch.Size, rank: int) -> Tensor:
    """Return a rank's slice of a tensor, along the one axis on which `shape` is smaller."""
    for axis, (size, shard_size) in enumerate(zip(tensor.shape, shape, strict=True)):
        if size != shard_size:
            return tensor.narrow(axis, rank * shard_size, shard_size)
    return tensor


def set_tied_tensor(program: nn.Module, names: list[str], value: Tensor) -> None:
    """Set a weight or a buffer under all of its names."""
    parent, _, last = names[0].rpartition(".")
    is_weight = last in dict(program.get_submodule(parent).named_parameters(recurse=False))
    tensor = nn.Parameter(value, requires_grad=False) if is_weight else value
    for name in names:
        set_tensor(program, name, tensor)


def _apply_tensor_parallelism(program: nn.Module, group: RankGroup) -> None:
    def build_column_parallel(layer: nn.Linear) -> nn.Module:
        num_outputs = layer.out_features // group.world_size
        return nn.Linear(layer.in_features, num_outputs, **_layer_options(layer))

    def build_row_parallel(layer: nn.Linear) -> nn.Module:
        num_inputs = layer.in_features // group.world_size
        shard = RowParallelLinear(num_inputs, layer.out_features, **_layer_options(layer))
        shard.group = group
        return shard

    apply_tensor_parallelism(
        program,
        group.world_size,
        column_parallel=build_column_parallel,
        row_parallel=build_row_parallel,
        setting="devices",
        remedy='set parallelism = "pipeline"',
    )


def _layer_options(layer: nn.Linear) -> dict[str, Any]:
    return {"bias": layer.bias is not None, "device": META, "dtype": layer.weight.dtype}


def _apply_pipeline_parallelism(program: nn.Module, group: RankGroup) -> None:
    """Replace other ranks' layers; the last layer in each stage broadcasts the output."""
    for name, owner, is_last in _assign_layers(program, group.world_size):
        if owner != group.rank:
            program.set_submodule(name, RemoteStage(group, owner, is_last=is_last))
        elif is_last:
            program.get_submodule(name).register_forward_hook(_build_broadcast_hook(group))


def _assign_layers(program: nn.Module, world_size: int) -> Iterator[tuple[str, int, bool]]:
    """Yield each layer's name, rank, and whether it is the last one in a stage."""
    from regauge.models.architectures import find_blocks

    layers = {id(block) for block in find_blocks(program)}
    names = [name for name, module in program.named_modules() if id(module) in layers]
    if len(names) < world_size:
        problem = f"{type(program).__name__} has {len(names)} layers for {world_size} devices"
        remedy = f"set devices = {max(1, len(names))}, the nearest valid number"
        raise SettingsError(problem, remedy)
    owners = [index * world_size // len(names) for index in range(len(names))]
    parents = [name.rpartition(".")[0] for name in names]
    stages = list(zip(owners, parents, strict=True))
    is_last = [*(stage != following for stage, following in pairwise(stages)), True]
    yield from zip(names, owners, is_last, strict=True)


def _build_broadcast_hook(group: RankGroup) -> Any:
    def broadcast_output(layer: nn.Module, inputs: Any, output: Any) -> Tensor:
        del inputs
        if not isinstance(output, Tensor):
            problem = f"{type(layer).__name__} returns more than hidden states"
            raise SettingsError(problem, 'set parallelism = "tensor"')
        value = output.contiguous()
        group.broadcast(value, group.rank)
        return value

    return broadcast_output
