"""What a comparison is said to show, in sentences; the first one is the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.reporting import words
from regauge.reporting.parity import Difference, Metric, Parity

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMED = 3
"""Differences that a sentence names."""


def sentences(found: Parity) -> tuple[str, ...]:
    """Return the verdict, and what else the runs show of it."""
    if found.prevented:
        return (_not_comparable(found),)
    if not found.metrics:
        between = f"{found.ours} and {found.theirs} measured nothing at the same step"
        return (f"Not shown: {between}; set evaluation.every_steps alike.",)
    told = [_verdict(found)]
    if not found.measured:
        told.append("How much the first run differs from itself was not measured.")
    if found.rescheduled is not None:
        told.append(f"Their learning rates differ from step {found.rescheduled} on.")
    if found.parted is not None:
        gap = next(gap for gap in found.losses if gap.step == found.parted)
        told.append(
            f"Their training losses part at step {gap.step}: {words.number(gap.ours)} and "
            f"{words.number(gap.theirs)}, {percent(gap.share)} apart."
        )
    elif found.losses:
        told.append(f"Their training losses do not part in {len(found.losses)} steps.")
    if found.computed:
        told.append(f"They were computed differently in {named(found.computed)}.")
    return tuple(told)


def _verdict(found: Parity) -> str:
    worst = max(found.metrics, key=_excess)
    gap = worst.worst
    where = f"{worst.name} by {percent(gap.share)} at step {gap.step}"
    count = len({gap.step for metric in found.metrics for gap in metric.gaps})
    times = "the one evaluation" if count == 1 else f"all {count} evaluations"
    limit = worst.limit(gap.step)
    noise = f"of which {found.ours} differs from itself by {percent(limit)}"
    if found.verdict == "fail":
        beyond = noise if limit > worst.band else f"beyond the band of {percent(worst.band)}"
        return f"Fail: {found.theirs} differs from {found.ours}, most in {where}, {beyond}."
    if gap.share > worst.band:
        return f"Pass, by noise: {found.theirs} differs from {found.ours} in {where}, {noise}."
    return (
        f"Pass: {found.theirs} is within {percent(worst.band)} of {found.ours} at {times}, "
        f"at most {where}."
    )


def _excess(metric: Metric) -> float:
    return metric.worst.share / metric.limit(metric.worst.step)


def _not_comparable(found: Parity) -> str:
    return (
        f"Not shown: {found.ours} and {found.theirs} are not comparable, "
        f"they differ in {named(found.prevented)}."
    )


def named(found: Sequence[Difference]) -> str:
    """Return differences in words, and how many are left out."""
    told = [f"{each.key} ({_value(each.ours)}, {_value(each.theirs)})" for each in found[:NAMED]]
    more = len(found) - NAMED
    return ", ".join(told) + (f" and {more} more" if more > 0 else "")


def percent(share: float) -> str:
    """Return a relative difference in percent, with two digits that count."""
    return f"{100 * share:.2g} %"


def _value(value: object) -> str:
    return "unset" if value is None else str(value)
