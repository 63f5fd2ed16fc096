"""Outlier channel splitting: splits a linear layer's input features into several equal parts.

One feature in a thousand may be ten times as large as the others. A scale for all of them then
costs the others their last bits. Ten copies, each a tenth of the value, avoid this (Zhao et al.,
2019, "Improving Neural Network Quantization without Retraining using Outlier Channel Splitting").
The layer before repeats weight rows to produce the copies, so they cost no extra pass.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Samples = Sequence[tuple[Tensor, ...]]

COPIES_PER_GROUP = 16
"""Group size for adding copies, because a processor multiplies that many at once."""
FEATURES_PER_GROUP = 768
"""One group of copies per this many features, which adds 2 % to the products."""
PROBE_STRIDE = 4
"""While probing, duplicate 1/N of the features."""
MAX_PROBE_DIFFERENCE = 1e-4
"""Largest difference by rounding alone, as a share of the largest output."""


class RepeatedOutputLinear(nn.Module):
    rows: Tensor

    def __init__(self, layer: nn.Linear, rows: Tensor) -> None:
        """`rows` are the layer's outputs in the order of the new ones, [outputs] int64."""
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("rows", rows)

    def forward(self, value: Tensor) -> Tensor:
        """Return [..., outputs] for [..., features]."""
        bias = None if self.bias is None else self.bias[self.rows]
        return nn.functional.linear(value, self.weight[self.rows], bias)


class _SplitInputLinear(RepeatedOutputLinear):
    """A linear layer for copies of features, each with a part of the value."""

    def __init__(self, layer: nn.Linear, num_copies: Tensor) -> None:
        super().__init__(layer, source_features(num_copies))
        self.divisors = num_copies[self.rows]

    def forward(self, value: Tensor) -> Tensor:
        """Return [..., outputs] for [..., copies]."""
        return nn.functional.linear(value, self.weight[:, self.rows] / self.divisors, self.bias)


def source_features(num_copies: Tensor) -> Tensor:
    """Return each copy's feature, [copies], given the copies per feature, [features]."""
    return torch.repeat_interleave(torch.arange(len(num_copies)), num_copies)


def count_copies(peaks: Tensor) -> Tensor:
    """Return the number of copies per feature that minimizes the largest part, [features].

    `peaks` are the features' largest values, [features], all positive. A layer with fewer than
    `FEATURES_PER_GROUP` features gets no copies.
    """
    limits: list[float] = peaks.tolist()
    counts = [1] * len(limits)
    heap = [(-peak, feature) for feature, peak in enumerate(limits)]
    heapq.heapify(heap)
    for _ in range(len(limits) // FEATURES_PER_GROUP * COPIES_PER_GROUP):
        feature = heap[0][1]
        counts[feature] += 1
        heapq.heapreplace(heap, (-limits[feature] / counts[feature], feature))
    return torch.tensor(counts)


@torch.no_grad()
def find_producers(
    program: nn.Module, layers: Mapping[str, nn.Linear], samples: Samples
) -> dict[str, str]:
    """Return layer name -> name of the layer that produces its input.

    Only that one layer reads a producer's outputs, feature by feature. `layers` are in the order of
    computation. Two consecutive layers are probed if the first has as many outputs as the second
    has features: some outputs are repeated and split, and the program's output must stay equal.
    """
    inputs = min(samples, key=lambda sample: sample[0].numel())
    expected: Tensor = program(*inputs)
    producers = {}
    for first, second in pairwise(layers):
        features = layers[second].in_features
        if layers[first].out_features != features:
            continue
        num_copies = torch.ones(features, dtype=torch.int64)
        num_copies[::PROBE_STRIDE] = 2
        probes = {
            first: RepeatedOutputLinear(layers[first], source_features(num_copies)),
            second: _SplitInputLinear(layers[second], num_copies),
        }
        if _has_equal_output(program, layers, probes, inputs, expected):
            producers[second] = first
    return producers


def _has_equal_output(
    program: nn.Module,
    layers: Mapping[str, nn.Linear],
    probes: Mapping[str, nn.Module],
    inputs: tuple[Tensor, ...],
    expected: Tensor,
) -> bool:
    replace_modules(program, probes)
    try:
        output: Tensor = program(*inputs)
    except (RuntimeError, ValueError, IndexError, TypeError):  # the shape of the features differs
        return False
    finally:
        replace_modules(program, {name: layers[name] for name in probes})
    if output.shape != expected.shape:
        return False
    difference = float((output - expected).abs().max())
    return difference <= MAX_PROBE_DIFFERENCE * float(expected.abs().max())


def replace_modules(program: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        program.set_submodule(name, module)
