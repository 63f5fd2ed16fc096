"""Selects the linear layers for 8-bit integer products, by their effect on real inputs.

Features that are large for few texts cost all others their last bits. So each input feature is
divided by a factor, and the weights are multiplied by it (Xiao et al., 2023, "SmoothQuant"). The
strength is chosen for each layer among a few. If the layer before can repeat outputs, the features
that are still the largest are split (`split.py`). A layer with a large error stays unquantized. If
the program's output is too far off, the layers with the largest errors stay unquantized, too.
Scales are constants, so that a text's output does not depend on the other texts in the batch.
"""

from __future__ import annotations

import bisect
import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from regauge.inference.backends._int8.linear import EPSILON, Int8Linear, QuantizationRecipe
from regauge.inference.backends._int8.split import (
    RepeatedOutputLinear,
    count_copies,
    find_producers,
    replace_modules,
    source_features,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regauge.inference.backends import Calibration
    from regauge.inference.backends._int8.linear import FeatureRange
    from regauge.inference.backends._int8.split import Samples

MIGRATION_STRENGTHS = (0.4, 0.55, 0.7, 0.85)
"""SmoothQuant exponents to try for each layer: the share of a feature's size that the weights take
over."""
MAX_LAYER_ERROR = 0.05
"""Maximum median error of a layer's output for a token, relative to the output's norm."""
SAMPLE_LOSS_SHARE = 0.75
"""Share of the allowed quality loss for the samples. The export is validated on other inputs as
well."""
ERROR_SAMPLE_INTERVAL = 2
"""Measure errors on one in this many samples; input ranges need all of them."""
MAX_TOKENS_PER_SAMPLE = 512
"""Maximum tokens per sample when measuring a layer's error."""


class QuantizationPlan(NamedTuple):
    """A program's integer layers, with their recipes."""

    recipes: Mapping[str, QuantizationRecipe]
    """Quantized layer -> recipe."""
    producers: Mapping[str, str]
    """Layer -> layer that produces its input."""


@torch.no_grad()
def quantize_linear_layers(
    program: nn.Module, calibration: Calibration, max_weight: int = 127
) -> nn.Module:
    """Return a copy of an fp32 program with `Int8Linear` in place of suitable linear layers.

    `program` is the calibration program, possibly with lower-precision weights. The mean cosine
    distance of the outputs may grow up to the calibration's limit. Weight names do not change.
    `max_weight` is 63 for processors that add two 8-bit products in 16 bits, which could overflow.
    Raises ValueError without samples, or if no layer is accurate enough.
    """
    if max_weight not in calibration.plans:
        calibration.plans[max_weight] = _build_plan(calibration, max_weight)
    plan: QuantizationPlan = calibration.plans[max_weight]
    if not plan.recipes:
        raise ValueError("no linear layer is accurate enough with 8-bit integers")
    quantized = copy.deepcopy(program).eval()
    replace_modules(quantized, _build_modules(_linear_layers(quantized), plan, max_weight))
    return quantized


def _build_plan(calibration: Calibration, max_weight: int) -> QuantizationPlan:
    """Return the layers to quantize; the plan is empty if no layer is accurate enough."""
    program, samples = copy.deepcopy(calibration.program).eval(), calibration.samples
    all_layers = _linear_layers(program)
    ranges = _measure_input_ranges(program, all_layers, samples)
    layers = {name: all_layers[name] for name in ranges}
    producers = find_producers(program, layers, samples)
    candidates = _build_candidates(layers, ranges, producers)
    samples = samples[::ERROR_SAMPLE_INTERVAL]
    errors = _measure_errors(program, layers, candidates, samples, max_weight)
    groups: list[tuple[float, dict[str, QuantizationRecipe]]] = []
    for names in _group_by_input(ranges):
        worst = [
            max(errors[name][index] for name in names) for index in range(len(MIGRATION_STRENGTHS))
        ]
        best = min(range(len(worst)), key=worst.__getitem__)
        if worst[best] <= MAX_LAYER_ERROR:
            groups.append((worst[best], {name: candidates[name][best] for name in names}))
    groups.sort(key=lambda group: group[0])
    expected = [program(*inputs) for inputs in samples]

    def plan_groups(count: int) -> QuantizationPlan:
        recipes = {name: recipe for _, group in groups[:count] for name, recipe in group.items()}
        return QuantizationPlan(recipes, producers)

    def loss(count: int) -> float:
        modules = _build_modules(layers, plan_groups(count), max_weight)
        replace_modules(program, modules)
        for module in modules.values():
            if isinstance(module, Int8Linear):
                module.freeze()
        return _cosine_loss([program(*inputs) for inputs in samples], expected)

    max_loss, counts = SAMPLE_LOSS_SHARE * calibration.max_quality_loss, range(1, len(groups) + 1)
    if groups and loss(len(groups)) <= max_loss:  # the usual case
        return plan_groups(len(groups))
    return plan_groups(bisect.bisect_right(counts, max_loss, hi=max(0, len(groups) - 1), key=loss))


def _linear_layers(program: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in program.named_modules() if type(module) is nn.Linear}


def _build_modules(
    layers: Mapping[str, nn.Linear], plan: QuantizationPlan, max_weight: int
) -> dict[str, nn.Module]:
    """Return each layer's replacement; a layer outside the plan stays itself."""
    recipes, producers = plan
    output_rows = {
        producers[name]: source_features(recipe.num_copies)
        for name, recipe in recipes.items()
        if recipe.has_copies
    }
    modules: dict[str, nn.Module] = dict(layers)
    for name, rows in output_rows.items():
        modules[name] = RepeatedOutputLinear(layers[name], rows)
    modules |= {
        name: Int8Linear(layers[name], recipe, max_weight, output_rows.get(name))
        for name, recipe in recipes.items()
    }
    return modules


def _build_candidates(
    layers: Mapping[str, nn.Linear],
    ranges: Mapping[str, FeatureRange],
    producers: Mapping[str, str],
) -> dict[str, list[QuantizationRecipe]]:
    """Return for each layer a recipe per migration strength."""
    candidates: dict[str, list[QuantizationRecipe]] = {name: [] for name in ranges}
    for names in _group_by_input(ranges):
        peaks = torch.maximum(*(edge.abs() for edge in ranges[names[0]])).clamp(min=EPSILON)
        for strength in MIGRATION_STRENGTHS:
            smoothing = _smoothing_factors([layers[name] for name in names], peaks, strength)
            num_copies = torch.ones(len(peaks), dtype=torch.int64)
            if names[0] in producers:
                num_copies = count_copies(peaks / smoothing)
            for name in names:
                candidates[name].append(QuantizationRecipe(smoothing, num_copies, ranges[name]))
    return candidates


def _measure_input_ranges(
    program: nn.Module, layers: Mapping[str, nn.Linear], samples: Samples
) -> dict[str, FeatureRange]:
    """Return each layer's input range over all samples, in the order of computation."""
    if not samples:
        raise ValueError("calibration needs real inputs, and there is no sample")
    ranges: dict[str, FeatureRange] = {}

    def observe(name: str, value: Tensor, output: Tensor) -> None:
        del output
        tokens = value.reshape(-1, value.shape[-1])
        lowest, highest = tokens.amin(0), tokens.amax(0)
        if name in ranges:
            lowest = torch.minimum(lowest, ranges[name][0])
            highest = torch.maximum(highest, ranges[name][1])
        ranges[name] = lowest, highest

    _observe_layers(program, layers, samples, observe)
    return ranges


def _measure_errors(
    program: nn.Module,
    layers: Mapping[str, nn.Linear],
    candidates: Mapping[str, Sequence[QuantizationRecipe]],
    samples: Samples,
    max_weight: int,
) -> dict[str, list[float]]:
    """Return a layer output's median relative error, for each candidate.

    The median is robust against padding and against a few tokens with huge values.
    """
    quantized = {
        name: [Int8Linear(layers[name], recipe, max_weight).freeze() for recipe in recipes]
        for name, recipes in candidates.items()
    }
    errors: dict[str, list[list[Tensor]]] = {
        name: [[] for _ in modules] for name, modules in quantized.items()
    }

    def observe(name: str, value: Tensor, output: Tensor) -> None:
        tokens, exact = value.reshape(-1, value.shape[-1]), output.reshape(-1, output.shape[-1])
        step = -(-len(tokens) // MAX_TOKENS_PER_SAMPLE)
        tokens, exact = tokens[::step], exact[::step]
        bias = layers[name].bias
        norms = (exact if bias is None else exact - bias).norm(dim=1).clamp(min=EPSILON)
        for module_errors, module in zip(errors[name], quantized[name], strict=True):
            difference = module(tokens[:, module.feature_of_copy]) - exact
            module_errors.append(difference.norm(dim=1) / norms)

    _observe_layers(program, layers, samples, observe)
    return {
        name: [float(torch.cat(module_errors).median()) for module_errors in layer_errors]
        for name, layer_errors in errors.items()
    }


def _cosine_loss(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return half the mean squared relative error of the outputs.

    Both arguments have a tensor [rows, width] for each sample. For vectors of equal norm this is
    the mean cosine distance.
    """
    actual, exact = (
        torch.cat([tensor.flatten(1) for tensor in tensors]) for tensors in (outputs, expected)
    )
    squares = (actual - exact).square().sum(1) / exact.square().sum(1).clamp(min=EPSILON)
    return float(squares.mean()) / 2


def _observe_layers(
    program: nn.Module,
    layers: Mapping[str, nn.Linear],
    samples: Samples,
    observe: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Run the program on the samples; call `observe` with each layer's name, input and output."""

    def build_hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda _, inputs, output: observe(name, inputs[0], output)

    hooks = [layer.register_forward_hook(build_hook(name)) for name, layer in layers.items()]
    try:
        for inputs in samples:
            program(*inputs)
    finally:
        for hook in hooks:
            hook.remove()


def _group_by_input(ranges: Mapping[str, FeatureRange]) -> list[list[str]]:
    """Group the layers with the same input, known by equal ranges.

    They share a scale, so that the input is quantized once.
    """
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, edges in ranges.items():
        groups.setdefault(tuple(torch.cat(edges).tolist()), []).append(name)
    return list(groups.values())


def _smoothing_factors(layers: Sequence[nn.Linear], peaks: Tensor, strength: float) -> Tensor:
    """Return each feature's divisor, [features], for the features' largest values."""
    weights = torch.stack([layer.weight.abs().amax(0) for layer in layers]).amax(0)
    divisors = peaks**strength / weights.clamp(min=EPSILON) ** (1 - strength)
    return divisors.clamp(min=EPSILON)
