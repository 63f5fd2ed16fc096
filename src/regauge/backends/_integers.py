"""Linear layers that multiply 8-bit integers, where real inputs show that this changes little.

Numbers of a feature that are large in few texts cost all others their last bits. So each feature of
a layer's input is divided by a number, and the weights of it multiplied (Xiao et al., 2023,
"SmoothQuant"); by which, is chosen of a few for each layer. A layer whose products would still be
too far off stays as it is. Scales are constants, so that no answer depends on the texts beside it.
"""

from __future__ import annotations

import copy
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Samples = Sequence[tuple[Tensor, ...]]
    Range = tuple[Tensor, Tensor]
    """The least and the most of each feature, [features]."""

SHARES = (0.5, 0.7, 0.8, 0.9)
"""Which part of a feature's size its weights take over: tried for each layer."""
WORST = 0.03
"""Of the length of a layer's output for a token: how far off the median token may be."""
ROWS = 512
"""Tokens of each sample, at most, that a layer is judged by."""
TINY = 1e-6


class Rounded(nn.Module):
    """A linear layer whose input and weights are integers of 8 bits, and whose sums are exact.

    Its operations are those by which compilers know such a layer. Weights are made integers of
    whatever they are when it is computed.
    """

    inverse: Tensor
    smooth: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, layer: nn.Linear, smooth: Tensor, seen: Range, most: int) -> None:
        """`smooth` is [features]; weights become at most `most`, or as far below zero."""
        super().__init__()
        importlib.import_module("torch.ao.quantization.fx._decomposed")  # which adds operations
        self.weight, self.bias = layer.weight, layer.bias
        least, largest = (float(edge) for edge in _edges(seen, smooth))
        self.scale = max((largest - least) / 255, TINY)
        self.zero = round(-least / self.scale)
        peaks = (layer.weight.detach() * smooth).abs().amax(1)
        self.register_buffer("inverse", 1 / smooth)
        self.register_buffer("smooth", smooth[:, None].clone())
        self.register_buffer("scales", peaks.clamp(min=TINY) / most)
        self.register_buffer("zeros", torch.full_like(peaks, 128, dtype=torch.int64))

    def forward(self, given: Tensor) -> Tensor:
        """Return [..., outputs] of [..., features]."""
        made: Any = torch.ops.quantized_decomposed
        how = (self.scale, self.zero, 0, 255, torch.uint8)
        value = made.quantize_per_tensor(given * self.inverse, *how)
        by_output = (self.scales, self.zeros, 1, 0, 255, torch.uint8)
        weight = made.quantize_per_channel(self.weight.t() * self.smooth, *by_output)
        return nn.functional.linear(
            made.dequantize_per_tensor(value, *how),
            made.dequantize_per_channel(weight, *by_output).t(),
            self.bias,
        )


@torch.no_grad()
def rounded(program: nn.Module, samples: Samples, most: int = 127) -> nn.Module:
    """Return a copy of an fp32 program whose linear layers are `Rounded` where that is near enough.

    Names of weights stay. `most` is 63 for a processor whose sums of two products of 8 bits can be
    too large for it. Raises ValueError where there is no sample, or no layer is near enough.
    """
    made = copy.deepcopy(program)
    layers = {name: each for name, each in made.named_modules() if type(each) is nn.Linear}
    seen = _seen(made, layers, samples)
    tried: dict[str, list[Rounded]] = {name: [] for name in seen}
    for names in _alike(seen):
        for share in SHARES:
            smooth = _smooth([layers[name] for name in names], seen[names[0]], share)
            for name in names:
                tried[name].append(Rounded(layers[name], smooth, seen[name], most))
    errors = _errors(made, layers, tried, samples)
    count = 0
    for names in _alike(seen):
        worst = [max(errors[name][at] for name in names) for at in range(len(SHARES))]
        at = min(range(len(SHARES)), key=worst.__getitem__)
        for name in names if worst[at] <= WORST else ():
            made.set_submodule(name, tried[name][at])
            count += 1
    if not count:
        raise ValueError("no linear layer is near enough to itself in integers of 8 bits")
    return made.eval()


def _seen(
    program: nn.Module, layers: Mapping[str, nn.Linear], samples: Samples
) -> dict[str, Range]:
    """Return the range of each layer's input over all samples."""
    if not samples:
        raise ValueError("scales of integers are chosen by real inputs, and there is none")
    seen: dict[str, Range] = {}

    def look(name: str, given: Tensor, output: Tensor) -> None:
        del output
        flat = given.reshape(-1, given.shape[-1])
        least, most = flat.amin(0), flat.amax(0)
        if name in seen:
            least = torch.minimum(least, seen[name][0])
            most = torch.maximum(most, seen[name][1])
        seen[name] = least, most

    _watched(program, layers, samples, look)
    return seen


def _errors(
    program: nn.Module,
    layers: Mapping[str, nn.Linear],
    tried: Mapping[str, Sequence[Rounded]],
    samples: Samples,
) -> dict[str, list[float]]:
    """Return how far off the median token of a layer is, for each of what is tried in its place.

    It is the median that padding does not move, and that a few tokens of enormous size do not hide.
    """
    found: dict[str, list[list[Tensor]]] = {
        name: [[] for _ in each] for name, each in tried.items()
    }

    def judge(name: str, given: Tensor, output: Tensor) -> None:
        flat, exact = given.reshape(-1, given.shape[-1]), output.reshape(-1, output.shape[-1])
        step = -(-len(flat) // ROWS)
        flat, exact = flat[::step], exact[::step]
        bias = layers[name].bias
        lengths = (exact if bias is None else exact - bias).norm(dim=1).clamp(min=TINY)
        for errors, other in zip(found[name], tried[name], strict=True):
            errors.append((other(flat) - exact).norm(dim=1) / lengths)

    _watched(program, layers, samples, judge)
    return {
        name: [float(torch.cat(errors).median()) for errors in every]
        for name, every in found.items()
    }


def _watched(
    program: nn.Module,
    layers: Mapping[str, nn.Linear],
    samples: Samples,
    watch: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Compute samples, and show each layer's name, input and output."""

    def shown(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda _, given, output: watch(name, given[0], output)

    hooks = [layer.register_forward_hook(shown(name)) for name, layer in layers.items()]
    try:
        for inputs in samples:
            program(*inputs)
    finally:
        for hook in hooks:
            hook.remove()


def _alike(seen: Mapping[str, Range]) -> list[list[str]]:
    """Return the names of layers by what they read: equal ranges are of one input.

    They share its scales, so that it is made integers once.
    """
    found: dict[tuple[float, ...], list[str]] = {}
    for name, edges in seen.items():
        found.setdefault(tuple(torch.cat(edges).tolist()), []).append(name)
    return list(found.values())


def _smooth(layers: Sequence[nn.Linear], seen: Range, share: float) -> Tensor:
    """Return what each feature is divided by, [features]."""
    peaks = torch.maximum(seen[0].abs(), seen[1].abs()).clamp(min=TINY)
    weights = torch.stack([layer.weight.abs().amax(0) for layer in layers]).amax(0)
    return (peaks**share / weights.clamp(min=TINY) ** (1 - share)).clamp(min=TINY)


def _edges(seen: Range, smooth: Tensor) -> Range:
    """Return the least and the most of a whole input when it is smoothed; 0 lies between them."""
    least, most = seen
    return (least / smooth).amin().clamp(max=0), (most / smooth).amax().clamp(min=0)
