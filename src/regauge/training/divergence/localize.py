"""Compares two computations of one step: which value is the first that rounding does not explain.

Both computations are compared with a reference, and the bound of each value is measured. For that
the reference is computed again with noise, which changes the output of every leaf module and its
gradient at random. The size of the noise is one rounding to the coarser dtype of the two. The
distance from the noisy reference to the reference shows how rounding errors grow up to each value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from regauge.system.json_files import DocumentShape, read_json
from regauge.training.divergence.capture import CapturedValue, Stage

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

NOISE_MARGIN = 8.0
"""Bound of a difference as a multiple of the measured noise.

The noise is a single draw, and weights and their gradients are rounded as well.
"""
UNIT_ROUNDOFF = {"bf16": 2.0**-9, "fp16": 2.0**-12, "tf32": 2.0**-12, "fp32": 2.0**-24}
"""Largest relative change by rounding to a dtype: half of its machine epsilon."""
MIN_NORM = 1e-12
"""Smallest norm by which differences are divided."""
SHIFTS = range(-2, 3)
"""Shifts of the row order that are recognized."""
STAGES: tuple[Stage, ...] = ("input", "forward", "backward", "gradient", "update")


class CaptureShape(DocumentShape):
    """The captured values of one process in one step."""

    execution: dict[str, Any]
    values: list[dict[str, Any]]


@dataclass(frozen=True)
class CapturedStep:
    """One captured step of one computation, merged from the files of all processes."""

    execution: dict[str, Any]
    """Settings and versions that determine which kernels run."""
    values: dict[tuple[Stage, str], CapturedValue]
    samples: dict[tuple[Stage, str], Tensor]


@dataclass(frozen=True)
class StepVariants:
    """One step that was computed in four variants."""

    baseline: CapturedStep
    candidate: CapturedStep
    reference: CapturedStep
    rounded: CapturedStep
    """The reference with noise that simulates rounding."""

    @property
    def all(self) -> tuple[CapturedStep, ...]:
        """The four variants."""
        return self.baseline, self.candidate, self.reference, self.rounded


@dataclass(frozen=True)
class ValueDifference:
    """The difference of one value between two computations of a step."""

    step: int
    """Number of steps before this one."""
    stage: Stage
    name: str
    module_class: str
    """Class of the module."""
    dtypes: tuple[str, str]
    difference: float
    """L2 distance of the two values, relative to the norm of the reference.

    For inputs it is the fraction of elements that differ.
    """
    bound: float
    """Largest difference that rounding explains."""
    reference_distances: tuple[float, float]
    """Relative distance of each value from the reference."""
    remark: str = ""
    """A pattern in the difference, such as a factor or a shift."""

    @property
    def exceeds_bound(self) -> bool:
        """Whether the difference is larger than rounding explains."""
        return self.difference > self.bound


@dataclass(frozen=True)
class Divergence:
    """The step in which two runs diverge, and its first unexplained difference."""

    step: int
    """Number of steps before the one in which the runs diverge."""
    differences: tuple[ValueDifference, ...] = ()
    """All values of that step, in the order of the computation."""
    first: ValueDifference | None = None
    """The first difference that rounding does not explain; None if there is none."""
    execution_differences: tuple[tuple[str, str, str], ...] = ()
    """Execution settings that differ: name, value in the baseline, value in the candidate."""
    is_reproduced: bool = True
    """Whether the runs also diverge when they are replayed with the current code."""


def read_capture(folder: Path, step: int) -> CapturedStep:
    """Read the captured values of a step from the files of all processes."""
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
    """Return the differences of all values that every variant has, in the order of the computation.

    With the same execution settings the bound is 0: rounding explains no difference.
    """
    keys = [
        key
        for key in variants.baseline.values
        if all(key in variant.values for variant in variants.all)
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
    """Return the first difference that rounding does not explain, or None."""
    return next((value for value in differences if value.exceeds_bound), None)


def compare_execution(variants: StepVariants) -> tuple[tuple[str, str, str], ...]:
    """Return the execution settings that differ: name, value in each of the two computations."""
    baseline, candidate = variants.baseline.execution, variants.candidate.execution
    return tuple(
        (name, str(baseline[name]), str(candidate.get(name)))
        for name in baseline
        if baseline[name] != candidate.get(name)
    )


def _compare_value(step: int, key: tuple[Stage, str], variants: StepVariants) -> ValueDifference:
    baseline, candidate, reference, rounded = (variant.samples[key] for variant in variants.all)
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
    """Widen the bound of an update, because rounding can flip the sign of small gradients.

    Elements of Adam's first updates have equal magnitude and the sign of the gradient. If the
    relative error of the gradient is d, about a fraction d of its elements is smaller than the
    error and may flip. A flipped element differs by twice its magnitude: together 2 sqrt(d) of the
    norm. The bound includes one flip of the largest element, because elements flip as a whole.
    """
    norm = float(reference_update.double().norm())
    largest = float(reference_update.double().abs().max())
    flip_bound = 2 * math.sqrt(gradient_bound + (largest / max(norm, MIN_NORM)) ** 2)
    return replace(update, bound=max(update.bound, flip_bound))


def _distance(first: Tensor, second: Tensor) -> float:
    """Return the L2 distance of two tensors; infinite for unequal shapes or non-finite values."""
    if first.shape != second.shape:
        return math.inf
    distance = float((first.double() - second.double()).norm())
    return distance if math.isfinite(distance) else math.inf


def _describe_ratio(baseline: Tensor, candidate: Tensor) -> str:
    """Return the ratio of two tensors as text if it is constant to three digits, else ""."""
    first, second = baseline.double(), candidate.double()
    factor = float(first @ second / max(float(first @ first), MIN_NORM))
    is_multiple = float((second - factor * first).norm()) <= 1e-3 * float(second.norm())
    return f"{factor:.4g} times as large" if is_multiple else ""


def _describe_shift(baseline: Tensor, candidate: Tensor) -> str:
    """Return the shift between two tensors [rows, …] as text if all other rows agree, else ""."""
    for shift in SHIFTS:
        if not shift or abs(shift) >= len(baseline):
            continue
        rows = baseline[max(0, shift) : len(baseline) + min(0, shift)]
        shifted_rows = candidate[max(0, -shift) : len(candidate) - max(0, shift)]
        if torch.equal(rows, shifted_rows):
            return f"shifted by {shift}"
    return ""
