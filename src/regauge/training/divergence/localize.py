"""Compares two computations of one step: which value is the first that rounding does not explain.

Both are compared with a reference, and the bound for each value is measured: the reference is
computed again with noise, a random change to each leaf module's output and its gradient. The noise
size is one rounding to the coarser dtype of the two. The distance between the noisy and the exact
reference shows how rounding errors grow up to each value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file

from regauge.system.json_files import DocumentShape, read_json
from regauge.training.divergence.capture import CapturedValue, Stage

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

NOISE_MARGIN = 8.0
"""Bound on differences, as a multiple of the measured noise.

The noise is a single draw, and weights and their gradients are rounded as well.
"""
UNIT_ROUNDOFF = {"bf16": 2.0**-9, "fp16": 2.0**-12, "tf32": 2.0**-12, "fp32": 2.0**-24}
"""dtype -> largest relative rounding error, half the machine epsilon."""
MIN_NORM = 1e-12
"""Differences are divided by at least this norm."""
SHIFTS = range(-2, 3)
STAGES: tuple[Stage, ...] = ("input", "forward", "backward", "gradient", "update")


class CaptureShape(DocumentShape):
    """Schema for one process and one step."""

    execution: dict[str, Any]
    values: list[dict[str, Any]]


@dataclass(frozen=True)
class CapturedStep:
    """One captured step, merged from the files of all processes."""

    execution: dict[str, Any]
    """Settings and versions that determine which kernels run."""
    values: dict[tuple[Stage, str], CapturedValue]
    samples: dict[tuple[Stage, str], Tensor]


class StepVariants(NamedTuple):
    """One step, computed in four variants."""

    baseline: CapturedStep
    candidate: CapturedStep
    reference: CapturedStep
    rounded: CapturedStep
    """The reference with noise that simulates rounding."""


@dataclass(frozen=True)
class ValueDifference:
    """How one value differs between two computations of a step."""

    step: int
    """Steps before this one."""
    stage: Stage
    name: str
    module_class: str
    dtypes: tuple[str, str]
    difference: float
    """L2 distance between the two values, relative to the reference norm.

    For inputs, the fraction of elements that differ.
    """
    bound: float
    """Largest difference explained by rounding."""
    reference_distances: tuple[float, float]
    """Relative distances from the reference."""
    remark: str = ""
    """A pattern in the difference, such as a factor or a shift."""

    @property
    def exceeds_bound(self) -> bool:
        return self.difference > self.bound


@dataclass(frozen=True)
class Divergence:
    """The step in which two runs diverge, and its first unexplained difference."""

    step: int
    """Steps before the one in which the runs diverge."""
    differences: tuple[ValueDifference, ...] = ()
    """All values of that step, in computation order."""
    first: ValueDifference | None = None
    """First difference not explained by rounding, if any."""
    execution_differences: tuple[tuple[str, str, str], ...] = ()
    """Execution settings that differ: name, baseline value, candidate value."""
    is_reproduced: bool = True
    """Whether the runs also diverge when replayed with the current code."""


def read_capture(folder: Path, step: int) -> CapturedStep:
    execution: dict[str, Any] = {}
    values: dict[tuple[Stage, str], CapturedValue] = {}
    samples: dict[tuple[Stage, str], Tensor] = {}
    for path in sorted(folder.glob(f"capture-{step:08d}.*.json")):
        document = read_json(path, f"remove {folder}, and run the command again", CaptureShape)
        tensors = load_file(path.with_suffix(".safetensors"))
        execution = execution or document["execution"]
        for fields in document["values"]:
            value = CapturedValue(**{**fields, "shape": tuple(fields["shape"])})
            if values.setdefault((value.stage, value.name), value) is value:
                samples[value.stage, value.name] = tensors[value.key]
    return CapturedStep(execution, values, samples)


def compare_step(
    step: int, variants: StepVariants, *, is_same_execution: bool
) -> list[ValueDifference]:
    """Compare every value present in all variants, in computation order.

    With the same execution settings the bound is 0: rounding explains no difference.
    """
    keys = [
        key
        for key in variants.baseline.values
        if all(key in variant.values for variant in variants)
    ]
    differences = [
        _compare_value(step, key, variants) for stage in STAGES for key in keys if key[0] == stage
    ]
    if is_same_execution:
        return [replace(value, bound=0.0) for value in differences]
    gradient_bounds = {
        value.name: value.bound for value in differences if value.stage == "gradient"
    }
    updates = variants.reference.samples
    return [
        _widen_update_bound(
            value, gradient_bounds.get(value.name, 0.0), updates["update", value.name]
        )
        if value.stage == "update"
        else value
        for value in differences
    ]


def find_first(differences: list[ValueDifference]) -> ValueDifference | None:
    return next((value for value in differences if value.exceeds_bound), None)


def compare_execution(variants: StepVariants) -> tuple[tuple[str, str, str], ...]:
    baseline, candidate = variants.baseline.execution, variants.candidate.execution
    return tuple(
        (name, str(baseline[name]), str(candidate.get(name)))
        for name in baseline
        if baseline[name] != candidate.get(name)
    )


def _compare_value(step: int, key: tuple[Stage, str], variants: StepVariants) -> ValueDifference:
    baseline, candidate, reference, rounded = (variant.samples[key] for variant in variants)
    value, other = variants.baseline.values[key], variants.candidate.values[key]
    difference, bound, distances = math.inf, 0.0, (0.0, 0.0)
    remark = f"{value.shape} and {other.shape}"
    has_same_shape = value.shape == other.shape
    if has_same_shape and value.stage == "input":
        difference = float((baseline != candidate).double().mean())
        remark = ""
        if difference and baseline.numel() == math.prod(value.shape):
            remark = _describe_shift(baseline.view(value.shape), candidate.view(value.shape))
    elif has_same_shape:
        norm = max(float(reference.double().norm()), MIN_NORM)
        difference = _distance(baseline, candidate) / norm
        bound = NOISE_MARGIN * _distance(rounded, reference) / norm
        distances = (
            _distance(baseline, reference) / norm,
            _distance(candidate, reference) / norm,
        )
        remark = _describe_ratio(baseline, candidate) if value.stage == "update" else ""
    return ValueDifference(
        step=step,
        stage=value.stage,
        name=value.name,
        module_class=value.module_class,
        dtypes=(value.dtype, other.dtype),
        difference=difference,
        bound=bound,
        reference_distances=distances,
        remark=remark,
    )


def _widen_update_bound(
    update: ValueDifference, gradient_bound: float, reference_update: Tensor
) -> ValueDifference:
    """Widen an update's bound, because rounding can flip the sign of small gradients.

    In Adam's first updates, all elements have equal magnitude and the gradient's sign. If the
    gradient's relative error is d, about a fraction d of its elements is smaller than the error and
    may flip. A flipped element differs by twice its magnitude: together 2 sqrt(d) of the norm. The
    bound includes one flip of the largest element, because elements flip as a whole.
    """
    norm = float(reference_update.double().norm())
    largest = float(reference_update.double().abs().max())
    flip_bound = 2 * math.sqrt(gradient_bound + (largest / max(norm, MIN_NORM)) ** 2)
    return replace(update, bound=max(update.bound, flip_bound))


def _distance(first: Tensor, second: Tensor) -> float:
    """Return the L2 distance; infinite for unequal shapes or non-finite values."""
    if first.shape != second.shape:
        return math.inf
    distance = float((first.double() - second.double()).norm())
    return distance if math.isfinite(distance) else math.inf


def _describe_ratio(baseline: Tensor, candidate: Tensor) -> str:
    """Format the ratio of two tensors if it is constant to three digits, else ""."""
    first, second = baseline.double(), candidate.double()
    factor = float(first @ second / max(float(first @ first), MIN_NORM))
    is_multiple = float((second - factor * first).norm()) <= 1e-3 * float(second.norm())
    return f"{factor:.4g} times as large" if is_multiple else ""


def _describe_shift(baseline: Tensor, candidate: Tensor) -> str:
    """Format the shift between two tensors [rows, …] if all other rows agree, else ""."""
    for shift in SHIFTS:
        if not shift or abs(shift) >= len(baseline):
            continue
        rows = baseline[max(0, shift) : len(baseline) + min(0, shift)]
        shifted_rows = candidate[max(0, -shift) : len(candidate) - max(0, shift)]
        if torch.equal(rows, shifted_rows):
            return f"shifted by {shift}"
    return ""
