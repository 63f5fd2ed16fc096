"""A program whose weights lie on several cores: linear layers, two by two, without a sum between.

The outputs of the first layers of a group are divided, and so are the inputs of its last one; in
between is attention by heads, or an activation. Everything else is on every core.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from torch import nn

from regauge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Make = Callable[[nn.Linear], nn.Module]
    Found = list[tuple[list[str], str]]

GROUPS = (
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
"""As transformers names them in a layer of BERT and its kin, DistilBERT, and Llama and its kin."""
LAYER = re.compile(r"(?:.*\.)?\d+")


def divide(
    program: nn.Module,
    cores: int,
    *,
    outputs: Make,
    inputs: Make,
    who: str = "cores",
    instead: str = "let the cores share rows",
) -> None:
    """Put divided layers in the place of whole ones; `outputs` and `inputs` make them.

    Raises SettingsError where a program has none of these groups, or a size is no multiple of the
    cores. It calls the cores what `who` says, and tells what to do `instead`.
    """
    found = list(_groups(program))
    if not found:
        problem = f"nothing in {type(program).__name__} can be divided between {who}"
        raise SettingsError(problem, instead)
    _check(program, found, cores, who)
    for first, last in found:
        for name in first:
            _replace(program, name, outputs)
        _replace(program, last, inputs)


def _groups(program: nn.Module) -> Iterator[tuple[list[str], str]]:
    """Yield the names of the layers of every group that a program has as a whole."""
    linear = {name for name, each in program.named_modules() if type(each) is nn.Linear}
    layers = [name for name, _ in program.named_modules() if LAYER.fullmatch(name)]
    for layer in layers:
        for first, last in GROUPS:
            names = [f"{layer}.{each}" for each in first]
            if {*names, f"{layer}.{last}"} <= linear:
                yield names, f"{layer}.{last}"


def _replace(program: nn.Module, name: str, make: Make) -> None:
    layer: Any = program.get_submodule(name)
    program.set_submodule(name, make(layer))


def _check(program: nn.Module, found: Found, cores: int, who: str) -> None:
    """Raise SettingsError where cores would share a head or a feature; name a number that fits."""
    sizes = [*_heads(program), *_features(program, found)]
    for size, what in sizes:
        if size % cores:
            every = math.gcd(*(size for size, _ in sizes))
            fitting = (number for number in range(1, every + 1) if every % number == 0)
            nearest = min(fitting, key=lambda number: abs(number - cores))
            problem = f"{cores} {who} cannot share {size} {what}"
            raise SettingsError(problem, f"the nearest number that can is {nearest}")


def _heads(program: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield how many heads attention has, by the configurations of transformers."""
    every: Any = program.modules()
    for config in [each.config for each in every if hasattr(each, "config")]:
        for name in ("num_attention_heads", "num_key_value_heads"):
            if heads := getattr(config, name, None):
                yield heads, f"heads ({name})"


def _features(program: nn.Module, found: Found) -> Iterator[tuple[int, str]]:
    """Yield the sizes that are divided: outputs of first layers, and inputs of last ones."""
    for first, last in found:
        for name in first:
            layer: Any = program.get_submodule(name)
            yield layer.out_features, f"features of {name}"
        layer = program.get_submodule(last)
        yield layer.in_features, f"features of {last}"
