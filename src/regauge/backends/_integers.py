"""A linear layer that multiplies integers of 8 bits."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regauge.backends._copies import places

Range = tuple[Tensor, Tensor]
"""The least and the most of each feature, [features]."""
TINY = 1e-6


class Recipe(NamedTuple):
    """How a layer's input becomes integers."""

    smooth: Tensor
    """What each feature is divided by, and the weights of it multiplied by, [features]."""
    counts: Tensor
    """How often each stands, each time with a part of its size, [features] int64."""
    seen: Range
    """Before all that."""

    @property
    def copied(self) -> bool:
        """Whether any feature stands more than once."""
        return int(self.counts.max()) > 1


class Rounded(nn.Module):
    """A linear layer whose input and weights are integers of 8 bits, and whose sums are exact.

    Its operations are those by which compilers know such a layer. Weights are made integers of
    whatever they are when it is computed.
    """

    inverse: Tensor
    smooth: Tensor
    scales: Tensor
    zeros: Tensor
    columns: Tensor
    """The feature of each number that it is given, [copies]."""
    rows: Tensor | None
    """The layer's output of each of its own, [outputs], where some stand several times."""

    def __init__(
        self, layer: nn.Linear, recipe: Recipe, most: int, rows: Tensor | None = None
    ) -> None:
        """Weights become at most `most`, or as far below zero."""
        super().__init__()
        importlib.import_module("torch.ao.quantization.fx._decomposed")  # which adds operations
        self.weight, self.bias = layer.weight, layer.bias
        smooth, counts, seen = recipe
        divided = smooth * counts
        least, largest = (float(edge) for edge in _edges(seen, divided))
        self.scale = max((largest - least) / 255, TINY)
        self.zero = round(-least / self.scale)
        columns = places(counts)
        peaks = (layer.weight.detach() * smooth).abs().amax(1)
        scales = peaks.clamp(min=TINY) / most
        scales = scales if rows is None else scales[rows]
        self.copied = recipe.copied
        self.register_buffer("columns", columns)
        self.register_buffer("rows", rows)
        self.register_buffer("inverse", (1 / divided)[columns])
        self.register_buffer("smooth", smooth[columns, None])
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.full_like(scales, 128, dtype=torch.int64))

    def forward(self, given: Tensor) -> Tensor:
        """Return [..., outputs] of [..., copies]."""
        made: Any = torch.ops.quantized_decomposed
        how = (self.scale, self.zero, 0, 255, torch.uint8)
        value = made.quantize_per_tensor(given * self.inverse, *how)
        by_output = (self.scales, self.zeros, 1, 0, 255, torch.uint8)
        weight: Tensor = self.weight.t()
        bias: Tensor | None = self.bias
        if self.copied:
            weight = weight[self.columns]
        if self.rows is not None:
            weight = weight[:, self.rows]
            bias = None if bias is None else bias[self.rows]
        weight = made.quantize_per_channel(weight * self.smooth, *by_output)
        return nn.functional.linear(
            made.dequantize_per_tensor(value, *how),
            made.dequantize_per_channel(weight, *by_output).t(),
            bias,
        )


def _edges(seen: Range, divided: Tensor) -> Range:
    """Return the least and the most of a whole input that is divided; 0 lies between them."""
    least, most = seen
    return (least / divided).amin().clamp(max=0), (most / divided).amax().clamp(min=0)
