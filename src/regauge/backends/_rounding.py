"""Linear layers that multiply 8-bit integers, where real inputs show that this changes little.

Numbers of a feature that are large in few texts cost all others their last bits. So each feature of
a layer's input is divided by a number, and the weights of it multiplied (Xiao et al., 2023,
"SmoothQuant"); by which, is chosen of a few for each layer. Features that are still the largest
stand in several copies where the layer before can make them. A layer whose products would be too
far off stays as it is, and so do the worst while the program's answers are. Scales are constants,
so that no answer depends on the texts beside it.
"""

from __future__ import annotations

import bisect
import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from regauge.backends._copies import Repeated, fed, places, put, shared
from regauge.backends._integers import TINY, Recipe, Rounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regauge.backends import Calibration
    from regauge.backends._copies import Samples
    from regauge.backends._integers import Range

SHARES = (0.4, 0.55, 0.7, 0.85)
"""Which part of a feature's size its weights take over: tried for each layer."""
WORST = 0.05
"""Of the length of a layer's output for a token: how far off the median token may be."""
BUDGET = 0.8
"""Of what answers may lose: how much those to samples may. The proof is by others, too."""
ROWS = 512
"""Tokens of each sample, at most, that a layer is judged by."""


class Choice(NamedTuple):
    """Which layers of a program multiply integers, and how."""

    recipes: Mapping[str, Recipe]
    """By the names of the layers."""
    before: Mapping[str, str]
    """Which layer makes what another reads, where one does."""


@torch.no_grad()
def rounded(program: nn.Module, calibration: Calibration, most: int = 127) -> nn.Module:
    """Return a copy of an fp32 program whose linear layers are `Rounded` where that is near enough.

    It is the program of the calibration, be it with weights of fewer bits; the cosine of its
    answers to those may be as far from 1 as the bound is. Names of weights stay. `most` is 63 for a
    processor whose sums of two products of 8 bits can be too large for it. Raises ValueError where
    there is no sample, or no layer is near enough.
    """
    if most not in calibration.chosen:
        calibration.chosen[most] = _chosen(calibration, most)
    choice: Choice = calibration.chosen[most]
    if not choice.recipes:
        raise ValueError("no linear layer is near enough to itself in integers of 8 bits")
    made = copy.deepcopy(program).eval()
    put(made, _modules(_linear(made), choice, most))
    return made


def _chosen(calibration: Calibration, most: int) -> Choice:
    """Return what of a program can be integers; nothing of it where no layer is near enough."""
    made, samples = copy.deepcopy(calibration.program).eval(), calibration.samples
    every = _linear(made)
    seen = _seen(made, every, samples)
    layers = {name: every[name] for name in seen}
    before = fed(made, layers, samples)
    tried = _tried(layers, seen, before)
    errors = _errors(made, layers, tried, samples, most)
    chosen: list[tuple[float, dict[str, Recipe]]] = []
    for names in _alike(seen):
        worst = [max(errors[name][at] for name in names) for at in range(len(SHARES))]
        at = min(range(len(SHARES)), key=worst.__getitem__)
        if worst[at] <= WORST:
            chosen.append((worst[at], {name: tried[name][at] for name in names}))
    chosen.sort(key=lambda each: each[0])
    expected = [made(*inputs) for inputs in samples]

    def best(count: int) -> Choice:
        recipes = {name: found for _, own in chosen[:count] for name, found in own.items()}
        return Choice(recipes, before)

    def lost(count: int) -> float:
        put(made, _modules(layers, best(count), most))
        return _lost([made(*inputs) for inputs in samples], expected)

    allowed = BUDGET * calibration.bound
    return best(bisect.bisect_right(range(1, len(chosen) + 1), allowed, key=lost))


def _linear(program: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a program by their names."""
    return {name: each for name, each in program.named_modules() if type(each) is nn.Linear}


def _modules(layers: Mapping[str, nn.Linear], choice: Choice, most: int) -> dict[str, nn.Module]:
    """Return what stands in the place of each layer: itself where there is no recipe for it."""
    recipes, before = choice
    rows = {
        before[name]: places(recipe.counts) for name, recipe in recipes.items() if recipe.copied
    }
    made: dict[str, nn.Module] = dict(layers)
    made |= {name: Repeated(layers[name], own) for name, own in rows.items()}
    made |= {
        name: Rounded(layers[name], recipe, most, rows.get(name))
        for name, recipe in recipes.items()
    }
    return made


def _tried(
    layers: Mapping[str, nn.Linear], seen: Mapping[str, Range], before: Mapping[str, str]
) -> dict[str, list[Recipe]]:
    """Return a recipe of each layer for each of the shares."""
    tried: dict[str, list[Recipe]] = {name: [] for name in seen}
    for names in _alike(seen):
        peaks = torch.maximum(*(edge.abs() for edge in seen[names[0]])).clamp(min=TINY)
        for share in SHARES:
            smooth = _smooth([layers[name] for name in names], peaks, share)
            counts = torch.ones(len(peaks), dtype=torch.int64)
            if names[0] in before:
                counts = shared(peaks / smooth)
            for name in names:
                tried[name].append(Recipe(smooth, counts, seen[name]))
    return tried


def _seen(
    program: nn.Module, layers: Mapping[str, nn.Linear], samples: Samples
) -> dict[str, Range]:
    """Return the range of each layer's input over all samples, in the order of computation."""
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
    tried: Mapping[str, Sequence[Recipe]],
    samples: Samples,
    most: int,
) -> dict[str, list[float]]:
    """Return how far off the median token of a layer is, for each of what is tried in its place.

    It is the median that padding does not move, and that a few tokens of enormous size do not hide.
    """
    made = {
        name: [Rounded(layers[name], each, most) for each in recipes]
        for name, recipes in tried.items()
    }
    found: dict[str, list[list[Tensor]]] = {name: [[] for _ in each] for name, each in made.items()}

    def judge(name: str, given: Tensor, output: Tensor) -> None:
        flat, exact = given.reshape(-1, given.shape[-1]), output.reshape(-1, output.shape[-1])
        step = -(-len(flat) // ROWS)
        flat, exact = flat[::step], exact[::step]
        bias = layers[name].bias
        lengths = (exact if bias is None else exact - bias).norm(dim=1).clamp(min=TINY)
        for errors, other in zip(found[name], made[name], strict=True):
            errors.append((other(flat[:, other.columns]) - exact).norm(dim=1) / lengths)

    _watched(program, layers, samples, judge)
    return {
        name: [float(torch.cat(errors).median()) for errors in every]
        for name, every in found.items()
    }


def _lost(answers: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return half the mean square of how far answers are off, of their length.

    Both are [rows, width] for each sample. Of vectors that are as long as what is expected it is
    how far their cosine is from 1.
    """
    ours, theirs = (torch.cat([each.flatten(1) for each in found]) for found in (answers, expected))
    squares = (ours - theirs).square().sum(1) / theirs.square().sum(1).clamp(min=TINY)
    return float(squares.mean()) / 2


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


def _smooth(layers: Sequence[nn.Linear], peaks: Tensor, share: float) -> Tensor:
    """Return what each feature is divided by, [features], of how large each gets."""
    weights = torch.stack([layer.weight.abs().amax(0) for layer in layers]).amax(0)
    return (peaks**share / weights.clamp(min=TINY) ** (1 - share)).clamp(min=TINY)
