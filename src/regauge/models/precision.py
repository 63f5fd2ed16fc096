"""A module's compute precision: its dtype, fp32 gradient sums, and fp8 layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from regauge.models.tensors import precision_dtype
from regauge.system.errors import SettingsError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_SUMMED_ROWS = 1024
"""Largest embedding whose gradients are summed in fp32: positions and token types, not words."""
FP8_MULTIPLE = 16
"""Layer sizes must be multiples of it; the hardware's products require that."""


class _Normalize(torch.autograd.Function):
    """Layer normalization with `Fp32SumNorm`'s weight gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        shape = list(weight.shape)
        given = weight.float(), None if bias is None else bias.float()
        output, mean, deviation = torch.native_layer_norm(hidden, shape, *given, eps)
        ctx.save_for_backward(hidden, mean, deviation, weight)
        ctx.has_bias = bias is not None
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (gradient,), (hidden, mean, deviation, weight) = gradients, ctx.saved_tensors
        gradient, shape = gradient.contiguous(), list(weight.shape)
        statistics = shape, mean, deviation, weight.float(), None
        given = gradient, hidden, *statistics, [True, False, False]
        inner, _, _ = torch.ops.aten.native_layer_norm_backward(*given)
        axes = tuple(range(hidden.ndim - weight.ndim))
        scaled = ((hidden - mean) * deviation * gradient).sum(axes)
        total = gradient.sum(axes, dtype=torch.float32).to(weight.dtype) if ctx.has_bias else None
        return inner, scaled.to(weight.dtype), total, None


class Fp32SumNorm(nn.LayerNorm):
    """Layer normalization that sums weight gradients in fp32.

    On a CPU, torch sums them over all tokens in the input dtype. In bf16, a bias gradient over a
    thousand tokens is then wrong by half. Compiled graphs sum in fp32 anyway.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        if torch.compiler.is_compiling() or self.weight is None:
            return super().forward(input)
        apply: Callable[..., Tensor] = _Normalize.apply
        return apply(input, self.weight, self.bias, self.eps)


class Fp32SumEmbedding(nn.Embedding):
    """An embedding with few rows, whose gradients are summed in fp32."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        weight = self.weight
        return embedding(input, weight.float(), self.padding_idx).to(weight.dtype)


def sum_gradients_in_fp32(module: Any) -> None:
    """Let CPU layers whose gradients are sums over all tokens compute these in fp32.

    Leaves a module that computes in fp32 or fp64 unchanged.
    """
    if module.compute_dtype.itemsize >= torch.float32.itemsize:
        return
    for layer in module.modules():
        if type(layer) is nn.LayerNorm:
            layer.__class__ = Fp32SumNorm
        elif type(layer) is nn.Embedding and layer.num_embeddings <= MAX_SUMMED_ROWS:
            layer.__class__ = Fp32SumEmbedding


def apply_precision(
    module: Any,
    blocks: Iterable[nn.Module],
    precision: str,
    dtype: torch.dtype | None = None,
    *,
    emulates_fp8: bool = False,
) -> str | None:
    """Set a module's compute dtype; `dtype` replaces the precision's own.

    With fp8, the blocks' linear layers are replaced by layers with the same weights and names.
    Returns a line about these layers, or None. Raises SettingsError if there are none.
    """
    module.compute_dtype = dtype or precision_dtype(precision)
    if precision != "fp8" or dtype is not None:
        return None
    return convert_to_fp8(tuple(blocks), is_emulated=emulates_fp8)


def convert_to_fp8(blocks: tuple[nn.Module, ...], *, is_emulated: bool) -> str:
    """Let the blocks' linear layers compute in fp8, through torchao; return their number.

    Layers whose sizes are not multiples of 16 stay in bf16. Embeddings and heads do too, because
    they are outside the blocks. A factor has one scale, from its largest value in this product.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        problem = f"torchao cannot be imported: {first_line(error)}"
        raise SettingsError(problem, "install a version that supports this torch") from None
    layers = [
        (name, layer)
        for block in blocks
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear)
    ]
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


def _is_convertible(layer: nn.Module) -> bool:
    """Return whether a layer is a linear layer whose sizes the hardware can multiply in fp8."""
    if type(layer) is not nn.Linear:
        return False
    return layer.in_features % FP8_MULTIPLE == 0 and layer.out_features % FP8_MULTIPLE == 0
