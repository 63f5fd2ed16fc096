"""The precision in which a module computes: its dtype, and linear layers that compute in fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regauge.errors import SettingsError, first_line
from regauge.models.tensors import precision_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FP8_MULTIPLE = 16
"""The sizes of a layer must be multiples of it; the products of the hardware require that."""


def apply_precision(
    module: Any,
    blocks: Iterable[nn.Module],
    precision: str,
    dtype: torch.dtype | None = None,
    *,
    emulates_fp8: bool = False,
) -> str | None:
    """Set the dtype in which a module computes; `dtype` replaces that of the precision.

    With fp8, the linear layers of the blocks are replaced by layers with the same weights and
    names. Returns a line about these layers, or None. Raises SettingsError if there are none.
    """
    module.compute_dtype = dtype or precision_dtype(precision)
    if precision != "fp8" or dtype is not None:
        return None
    return convert_to_fp8(tuple(blocks), is_emulated=emulates_fp8)


def convert_to_fp8(blocks: tuple[nn.Module, ...], *, is_emulated: bool) -> str:
    """Let the linear layers of the blocks compute in fp8, through torchao; return their number.

    Layers whose sizes are not multiples of 16 stay in bf16. Embeddings and heads do too, because
    they are outside of the blocks. A factor has one scale, from its largest value in this product.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        problem = f"torchao cannot be imported: {first_line(error)}"
        raise SettingsError(problem, "install a version that supports this torch") from None
    layers = [layer for block in blocks for layer in _linear_layers(block)]
    others = {name: layer for name, layer in layers if not _is_convertible(layer)}
    num_converted = sum(_is_convertible(layer) for _, layer in layers)
    if not num_converted:
        sizes = {f"{layer.in_features} x {layer.out_features}" for layer in others.values()}
        problem = "no linear layer of the blocks can compute in fp8"
        remedy = f'use sizes that are multiples of {FP8_MULTIPLE}, or execution.precision = "bf16"'
        raise SettingsError(f"{problem}: {', '.join(sorted(sizes)) or 'there is none'}", remedy)
    config = Float8LinearConfig(emulate=is_emulated, pad_inner_dim=True)
    for block in blocks:
        convert_to_float8_training(
            block, module_filter_fn=lambda layer, _: _is_convertible(layer), config=config
        )
    return f"{num_converted} linear layers in fp8; in bf16: {', '.join(sorted(others)) or 'none'}"


def _linear_layers(block: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, layer in block.named_modules():
        if isinstance(layer, nn.Linear):
            yield name, layer


def _is_convertible(layer: nn.Module) -> bool:
    """Return whether a layer is a linear layer whose sizes the hardware can multiply in fp8."""
    if type(layer) is not nn.Linear:
        return False
    return layer.in_features % FP8_MULTIPLE == 0 and layer.out_features % FP8_MULTIPLE == 0
