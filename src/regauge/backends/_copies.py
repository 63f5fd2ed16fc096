"""Features of a layer that stand in it several times, each time with a part of their size.

One number of a thousand that is ten times as large as all others costs these their last bits where
one scale is for all. As ten copies, of which each is a tenth, it leaves them as they are (Zhao et
al., 2019, "Improving Neural Network Quantization without Retraining using Outlier Channel
Splitting"). The layer before makes the copies, by rows of its weights, so that none costs a pass.
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

COPIES = 16
"""They come by as many, which a processor multiplies at once."""
WIDTH = 768
"""For as many features there are so many copies: 2 % more products."""
PROBED = 4
"""One of as many features has a copy where it is found out whether there may be copies."""
SAME = 1e-4
"""Of the largest answer: how far others may be from it by rounding alone."""


class Repeated(nn.Module):
    """A linear layer some of whose outputs stand several times."""

    rows: Tensor

    def __init__(self, layer: nn.Linear, rows: Tensor) -> None:
        """`rows` are the places of its outputs among the layer's, [outputs]."""
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("rows", rows)

    def forward(self, given: Tensor) -> Tensor:
        """Return [..., outputs] of [..., features]."""
        bias = None if self.bias is None else self.bias[self.rows]
        return nn.functional.linear(given, self.weight[self.rows], bias)


class _Halved(Repeated):
    """A linear layer that reads some of its features several times, each time a part."""

    def __init__(self, layer: nn.Linear, counts: Tensor) -> None:
        super().__init__(layer, places(counts))
        self.shares = counts[self.rows]

    def forward(self, given: Tensor) -> Tensor:
        """Return [..., outputs] of [..., copies]."""
        return nn.functional.linear(given, self.weight[:, self.rows] / self.shares, self.bias)


def places(counts: Tensor) -> Tensor:
    """Return the feature of each copy, [copies], of how many each has, [features]."""
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def shared(peaks: Tensor) -> Tensor:
    """Return how often each feature should stand, so that the largest part is as small as can be.

    `peaks` are how large each of them gets, [features] above 0. Of a narrow layer all stand once.
    """
    most: list[float] = peaks.tolist()
    counts = [1] * len(most)
    heap = [(-peak, place) for place, peak in enumerate(most)]
    heapq.heapify(heap)
    for _ in range(len(most) // WIDTH * COPIES):
        place = heap[0][1]
        counts[place] += 1
        heapq.heapreplace(heap, (-most[place] / counts[place], place))
    return torch.tensor(counts)


@torch.no_grad()
def fed(program: nn.Module, layers: Mapping[str, nn.Linear], samples: Samples) -> dict[str, str]:
    """Return which layer reads what one other makes, feature by feature, and nothing else does.

    `layers` come in the order in which they are computed. Two are tried together where as many
    outputs as features follow on each other: with some of these twice the program has to answer
    what it answers without.
    """
    given = min(samples, key=lambda each: each[0].numel())
    expected: Tensor = program(*given)
    found = {}
    for first, second in pairwise(layers):
        features = layers[second].in_features
        if layers[first].out_features != features:
            continue
        counts = torch.ones(features, dtype=torch.int64)
        counts[::PROBED] = 2
        tried = {
            first: Repeated(layers[first], places(counts)),
            second: _Halved(layers[second], counts),
        }
        if _same(program, layers, tried, given, expected):
            found[second] = first
    return found


def _same(
    program: nn.Module,
    layers: Mapping[str, nn.Linear],
    tried: Mapping[str, nn.Module],
    given: tuple[Tensor, ...],
    expected: Tensor,
) -> bool:
    """Return whether a program answers the same with other modules in the place of its layers."""
    put(program, tried)
    try:
        answers: Tensor = program(*given)
    except (RuntimeError, ValueError, IndexError, TypeError):  # of a shape that is another one
        return False
    finally:
        put(program, {name: layers[name] for name in tried})
    if answers.shape != expected.shape:
        return False
    return float((answers - expected).abs().max()) <= SAME * float(expected.abs().max())


def put(program: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Let modules stand in a program under their names."""
    for name, module in modules.items():
        program.set_submodule(name, module)
