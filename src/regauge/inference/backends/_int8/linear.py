"""A linear layer with 8-bit integer products."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regauge.inference.backends._int8.split import source_features

FeatureRange = tuple[Tensor, Tensor]
"""Each feature's minimum and maximum, both [features]."""
EPSILON = 1e-6
"""Lower bound for scales and divisors."""


class QuantizationRecipe(NamedTuple):
    """How to quantize a layer's input."""

    smoothing: Tensor
    """Each feature's divisor, which multiplies the weights, [features]."""
    num_copies: Tensor
    """How many copies each feature has, which share it equally, [features] int64."""
    input_range: FeatureRange
    """Input range before smoothing and splitting."""

    @property
    def has_copies(self) -> bool:
        """Whether any feature has more than one copy."""
        return int(self.num_copies.max()) > 1


class Int8Linear(nn.Module):
    """A linear layer with 8-bit input and weights, and with exact sums.

    It computes with the quantize and dequantize operations that compilers recognize as an integer
    layer. The weights stay floating-point parameters and are quantized in the forward pass.
    """

    input_factors: Tensor
    """Each input feature's factor, [copies]."""
    weight_factors: Tensor
    """Factor for each feature's weights, [copies, 1]."""
    weight_scales: Tensor
    """Each output's quantization scale, [outputs]."""
    weight_zeros: Tensor
    """Each output's zero point, [outputs] int64."""
    feature_of_copy: Tensor
    """For each copy, the layer's input feature, [copies]."""
    output_rows: Tensor | None
    """The layer's output that each output repeats, [outputs]; None if no output is repeated."""

    def __init__(
        self,
        layer: nn.Linear,
        recipe: QuantizationRecipe,
        max_weight: int,
        output_rows: Tensor | None = None,
    ) -> None:
        """Quantize weights to integers from -`max_weight` to `max_weight`."""
        super().__init__()
        importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers the operations
        self.weight, self.bias = layer.weight, layer.bias
        smoothing, num_copies, input_range = recipe
        divisors = smoothing * num_copies
        lowest, highest = (float(edge) for edge in _overall_range(input_range, divisors))
        self.input_scale = max((highest - lowest) / 255, EPSILON)
        self.input_zero = round(-lowest / self.input_scale)
        feature_of_copy = source_features(num_copies)
        peaks = (layer.weight.detach() * smoothing).abs().amax(1)
        scales = peaks.clamp(min=EPSILON) / max_weight
        scales = scales if output_rows is None else scales[output_rows]
        self.has_copies = recipe.has_copies
        self.register_buffer("feature_of_copy", feature_of_copy)
        self.register_buffer("output_rows", output_rows)
        self.register_buffer("input_factors", (1 / divisors)[feature_of_copy])
        self.register_buffer("weight_factors", smoothing[feature_of_copy, None])
        self.register_buffer("weight_scales", scales)
        self.register_buffer("weight_zeros", torch.full_like(scales, 128, dtype=torch.int64))
        self._frozen_weight: Tensor | None = None

    def freeze(self) -> Int8Linear:
        """Quantize the weights once for all later calls, and return the layer."""
        self._frozen_weight = self._round_weight()
        return self

    def forward(self, value: Tensor) -> Tensor:
        """Return [..., outputs] for [..., copies]."""
        operations: Any = torch.ops.quantized_decomposed
        per_tensor = (self.input_scale, self.input_zero, 0, 255, torch.uint8)
        integers = operations.quantize_per_tensor(value * self.input_factors, *per_tensor)
        bias: Tensor | None = self.bias
        if self.output_rows is not None:
            bias = None if bias is None else bias[self.output_rows]
        weight = self._round_weight() if self._frozen_weight is None else self._frozen_weight
        return nn.functional.linear(
            operations.dequantize_per_tensor(integers, *per_tensor), weight, bias
        )

    def _round_weight(self) -> Tensor:
        """Return the weight after quantization and dequantization, [outputs, copies]."""
        operations: Any = torch.ops.quantized_decomposed
        per_output = (self.weight_scales, self.weight_zeros, 1, 0, 255, torch.uint8)
        weight: Tensor = self.weight.t()
        if self.has_copies:
            weight = weight[self.feature_of_copy]
        if self.output_rows is not None:
            weight = weight[:, self.output_rows]
        weight = operations.quantize_per_channel(weight * self.weight_factors, *per_output)
        rounded: Tensor = operations.dequantize_per_channel(weight, *per_output).t()
        return rounded


def _overall_range(input_range: FeatureRange, divisors: Tensor) -> FeatureRange:
    """Return a divided input's minimum and maximum; the range always contains 0."""
    lowest, highest = input_range
    return (lowest / divisors).amin().clamp(max=0), (highest / divisors).amax().clamp(min=0)
