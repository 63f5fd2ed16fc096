"""Tensor-parallel plan: pairs of linear layers with no communication in between.

In each layer group, the first layers are column-parallel: each device computes a part of the
outputs. The last layer is row-parallel: each device reads a part of the inputs. In between are the
attention heads or an activation. All other layers are replicated (Shoeybi et al., 2019,
"Megatron-LM").
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from torch import nn

from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    BuildLayer = Callable[[nn.Linear], nn.Module]
    LayerGroup = tuple[list[str], str]

LAYER_GROUPS = (
    (
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention.output.dense",
    ),
    (("intermediate.dense",), "output.dense"),
    (("attention.q_lin", "attention.k_lin", "attention.v_lin"), "attention.out_lin"),
    (("ffn.lin1",), "ffn.lin2"),
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"),
    (("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
)
"""Each group's column-parallel and row-parallel layers in a transformers block, from BERT-like
models, DistilBERT and Llama-like models."""
BLOCK_NAME = re.compile(r"(?:.*\.)?\d+")


def apply_tensor_parallelism(
    program: nn.Module,
    num_devices: int,
    *,
    column_parallel: BuildLayer,
    row_parallel: BuildLayer,
    setting: str,
    remedy: str,
) -> None:
    """Replace each group's linear layers by column-parallel and row-parallel layers.

    `setting` names the setting for the number of devices. Raises SettingsError if the program has
    none of the groups, with `remedy`, or if a size is not divisible by the number of devices.
    """
    groups = list(_find_groups(program))
    if not groups:
        problem = f"{type(program).__name__} has no layers that tensor parallelism can split"
        raise SettingsError(problem, remedy)
    _check_divisible(program, groups, num_devices, setting)
    for column_names, row_name in groups:
        for name in column_names:
            _replace_layer(program, name, column_parallel)
        _replace_layer(program, row_name, row_parallel)


def _find_groups(program: nn.Module) -> Iterator[LayerGroup]:
    """Yield the layer names of every complete group in a program."""
    linear = {name for name, module in program.named_modules() if type(module) is nn.Linear}
    blocks = [name for name, _ in program.named_modules() if BLOCK_NAME.fullmatch(name)]
    for block in blocks:
        for column_suffixes, row_suffix in LAYER_GROUPS:
            column_names = [f"{block}.{suffix}" for suffix in column_suffixes]
            row_name = f"{block}.{row_suffix}"
            if {*column_names, row_name} <= linear:
                yield column_names, row_name


def _replace_layer(program: nn.Module, name: str, build: BuildLayer) -> None:
    layer: Any = program.get_submodule(name)
    program.set_submodule(name, build(layer))


def _check_divisible(
    program: nn.Module, groups: list[LayerGroup], num_devices: int, setting: str
) -> None:
    """Raise SettingsError if a head or a feature would be split; name the nearest valid number."""
    sizes = [*_head_counts(program), *_feature_counts(program, groups)]
    for size, name in sizes:
        if size % num_devices:
            divisor = math.gcd(*(size for size, _ in sizes))
            valid = (number for number in range(1, divisor + 1) if divisor % number == 0)
            nearest = min(valid, key=lambda number: abs(number - num_devices))
            problem = f"{setting} = {num_devices} does not divide {size} {name}"
            raise SettingsError(problem, f"set {setting} = {nearest}, the nearest valid number")


def _head_counts(program: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield how many attention heads a program's transformers configurations have."""
    modules: Any = program.modules()
    for config in [module.config for module in modules if hasattr(module, "config")]:
        for name in ("num_attention_heads", "num_key_value_heads"):
            if heads := getattr(config, name, None):
                yield heads, f"heads ({name})"


def _feature_counts(program: nn.Module, groups: list[LayerGroup]) -> Iterator[tuple[int, str]]:
    """Yield the outputs of column-parallel layers and the inputs of row-parallel layers."""
    for column_names, row_name in groups:
        for name in column_names:
            layer: Any = program.get_submodule(name)
            yield layer.out_features, f"features of {name}"
        layer = program.get_submodule(row_name)
        yield layer.in_features, f"features of {row_name}"
