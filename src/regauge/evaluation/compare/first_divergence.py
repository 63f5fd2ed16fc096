"""First value at which two recomputed runs differ, as a sentence and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.training.divergence.localize import Divergence, ValueDifference

CONTEXT_VALUES = 3
"""Values shown before and after the first different one."""
STAGE_NAMES = {
    "input": "the input rows",
    "forward": "the output of a module",
    "backward": "the gradient of a module's output",
    "gradient": "the gradient of a weight, summed over the global batch",
    "update": "the update of a weight",
}
"""Training step stage -> words."""
HINTS = {
    "input": "Check the order, the masks and the seeds",
    "forward": "Check the kernel of this module",
    "backward": "Check the backward pass of this module and of the modules after it",
    "gradient": "The output gradients agree; check how weight gradients are summed, in which type",
    "update": "The gradients agree; check the optimizer and its learning rate",
}
"""Stage -> advice."""


def describe_divergence(divergence: Divergence) -> str:
    """Return which value differs first, or that rounding explains all differences."""
    step, first = divergence.step, divergence.first
    if not divergence.is_reproduced:
        return (
            f"Recomputed from one state, the runs agree up to step {step + 1}. The cause of the "
            "difference is not in their run files: it is the code or the machine. Run the command "
            "on that machine, with copies of the runs."
        )
    choices = _describe_choices(divergence)
    if first is None:
        worst = max(divergence.differences, key=_bound_ratio)
        return (
            f"Recomputed step {step} from one state: rounding explains every difference. The "
            f"largest relative to its bound is {_describe_value(worst)}, "
            f"{_describe_difference(worst)}.{choices}"
        )
    remark = f", {first.remark}" if first.remark else ""
    if first.stage == "input":
        value = f"{first.name} differs in {100 * first.difference:.3g}% of its elements{remark}."
    else:
        baseline, candidate = first.reference_distances
        value = (
            f"{_describe_value(first)}, {_describe_difference(first)}{remark}. The difference from "
            f"the reference is {baseline:.2g} for the first run and {candidate:.2g} for the other."
        )
    stage = STAGE_NAMES[first.stage]
    return (
        f"At step {step} the runs first differ in {stage}: {value} {HINTS[first.stage]}.{choices}"
    )


def build_value_table(divergence: Divergence) -> tuple[dict[str, str], ...]:
    """Return rows for the values around the first one, or for those closest to their bounds."""
    shown: Sequence[ValueDifference]
    if divergence.first is not None:
        index = divergence.differences.index(divergence.first)
        shown = divergence.differences[max(0, index - CONTEXT_VALUES) : index + CONTEXT_VALUES + 1]
    else:
        closest = sorted(divergence.differences, key=_bound_ratio, reverse=True)
        shown = closest[: 2 * CONTEXT_VALUES]
    return tuple(
        {
            "value": value.name,
            "stage": value.stage,
            "module_class": value.module_class,
            "dtypes": " ".join(dict.fromkeys(value.dtypes)),
            "difference": f"{value.difference:.2g}",
            "rounding_bound": f"{value.bound:.2g}",
            "baseline_error": f"{value.reference_distances[0]:.2g}",
            "candidate_error": f"{value.reference_distances[1]:.2g}",
            "exceeds_bound": "yes" if value.exceeds_bound else "",
        }
        for value in shown
    )


def _bound_ratio(value: ValueDifference) -> float:
    return value.difference / value.bound if value.bound else 0.0


def _describe_choices(divergence: Divergence) -> str:
    """Return a sentence on differing execution settings, with a leading space."""
    choices = ", ".join(
        f"{name} ({baseline}, {candidate})"
        for name, baseline, candidate in divergence.execution_differences
    )
    return f" Different execution settings: {choices}." if choices else ""


def _describe_value(value: ValueDifference) -> str:
    dtypes = " and ".join(dict.fromkeys(value.dtypes))
    return f"{value.name} ({', '.join(filter(None, (value.module_class, dtypes)))})"


def _describe_difference(value: ValueDifference) -> str:
    if value.bound:
        return f"difference {value.difference:.2g}, of which rounding explains {value.bound:.2g}"
    return f"difference {value.difference:.2g}, expected 0 for equal programs"
