"""A program whose weights lie on several cores: linear layers, two by two, without a sum between.

The outputs of the first layers of a group are divided, and so are the inputs of its last one; in
between is attention by heads, or an activation. Everything else is on every core.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from regauge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Make = Callable[[nn.Linear], nn.Module]

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


def divide(program: nn.Module, cores: int, *, outputs: Make, inputs: Make) -> None:
    """Put divided layers in the place of whole ones; `outputs` and `inputs` make them.

    Raises SettingsError where a program has none of these groups, or a size is no multiple of the
    cores.
    """
    _check_heads(program, cores)
    found = list(_groups(program))
    if not found:
        problem = f"nothing in {type(program).__name__} can be divided between cores"
        raise SettingsError(problem, "let the cores share rows")
    for first, last in found:
        for name in first:
            _replace(program, name, cores, outputs)
        _replace(program, last, cores, inputs)


def _groups(program: nn.Module) -> Iterator[tuple[list[str], str]]:
    """Yield the names of the layers of every group that a program has as a whole."""
    linear = {name for name, each in program.named_modules() if type(each) is nn.Linear}
    layers = [name for name, _ in program.named_modules() if LAYER.fullmatch(name)]
    for layer in layers:
        for first, last in GROUPS:
            names = [f"{layer}.{each}" for each in first]
            if {*names, f"{layer}.{last}"} <= linear:
                yield names, f"{layer}.{last}"


def _replace(program: nn.Module, name: str, cores: int, make: Make) -> None:
    layer: Any = program.get_submodule(name)
    for size in (layer.in_features, layer.out_features):
        if size % cores:
            _refuse(f"{size} features of {name}", cores)
    program.set_submodule(name, make(layer))


def _check_heads(program: nn.Module, cores: int) -> None:
    """Raise SettingsError where cores would share a head."""
    every: Any = program.modules()
    configs = [each.config for each in every if hasattr(each, "config")]
    for config in configs:
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None) or cores
            if heads % cores:
                _refuse(f"{heads} heads ({name})", cores)


def _refuse(what: str, cores: int) -> None:
    raise SettingsError(f"{cores} cores cannot share {what}", "choose a number that divides it")
