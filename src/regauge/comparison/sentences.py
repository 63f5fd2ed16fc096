"""What a comparison is said to show, in sentences; the first one is the verdict."""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any

from regauge.comparison.cost import Spent, ranked, saving
from regauge.comparison.gaps import at
from regauge.comparison.verdict import Difference, Parity
from regauge.results import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.comparison.compare import Compared
    from regauge.comparison.gaps import Gap, Metric
    from regauge.training.settings import Target

NAMED = 3
"""Differences that a sentence names."""
HASH = 12
"""Characters of a hash that are shown."""
_HASH = re.compile(r"[0-9a-f]{32,}")


def sentences(found: Parity) -> tuple[str, ...]:
    """Return the verdict, and what else the runs show of it."""
    if found.prevented:
        return (_not_comparable(found),)
    if not found.metrics:
        between = f"{found.ours} and {found.theirs} measured nothing at the same step"
        return (f"Not shown: {between}.",)
    told = [_verdict(found), *_coarse(found)]
    if not found.measured:
        told.append("How much the first run differs from itself was not measured.")
    if found.rescheduled is not None:
        told.append(f"Their learning rates differ from step {found.rescheduled} on.")
    if found.parted is not None:
        gap = found.parted.gap
        what = found.parted.name.rpartition("/")[2].replace("_", " ")
        told.append(
            f"Their training parts at step {gap.step}: {what} {gap.ours:.9g} and "
            f"{gap.theirs:.9g}, {percent(gap.share)} apart."
        )
    elif found.losses:
        last = found.losses[-1].step
        told.append(f"Their training does not part up to step {last}.")
    if found.computed:
        told.append(f"They were computed differently in {named(found.computed)}.")
    return tuple(told)


def way_out(found: Parity) -> str:
    """Return what to do about a verdict that is no pass."""
    if found.prevented:
        return "start both from one run file, and change how it computes"
    if not found.metrics:
        return "set evaluation.every_steps alike"
    if found.verdict == "not shown":
        return "hold out more rows, or set comparison.band to what these can show"
    if not found.measured:
        return "add --noise-floor to know its noise"
    return "add --localise to see where they part"


def cost_sentences(found: Compared) -> tuple[str, ...]:
    """Return what the runs cost up to the target, the cheapest, and what is unknown of them."""
    if found.target is None:
        return ("No metric was measured by all of the runs: there is no target to come to.",)
    told = [_cost(one, found.target) for one in found.spent if one.step is not None]
    told += (*unreached(found), *cheapest(found))
    unknown = [one.run for one in found.spent if one.rate is None]
    if unknown:
        ways = "execution.price.instance or .usd_per_hour in its run file, or comparison.prices"
        told.append(f"The dollars of {', '.join(unknown)} are unknown: set {ways}.")
    today = dt.datetime.now(tz=dt.UTC).date()
    old = {one.rate.remark(today) for one in found.spent if one.rate is not None}
    return (*told, *sorted(f"{remark}." for remark in old if remark))


def cheapest(found: Compared) -> tuple[str, ...]:
    """Return which run came to the target for least, where two or more did at known prices."""
    order = ranked(found.spent)
    if found.target is None or len(order) == 1 or not order:
        return ()
    shares = [(one, saving(order[0], one)) for one in order[1:]]
    over = ", ".join(
        f"{formatting.share(share)} over {one.run}" for one, share in shares if share is not None
    )
    return (f"{order[0].run} came to {goal(found.target)} for least and saves {over}.",)


def unreached(found: Compared) -> tuple[str, ...]:
    """Return for each run that never came to the target what came nearest to it."""
    if found.target is None:
        return ()
    return tuple(
        f"{one.run} never came to {goal(found.target)}: {_nearest(one)}."
        for one in found.spent
        if one.step is None
    )


def cost_table(found: Compared) -> list[dict[str, Any]]:
    """Return one row for each run: what it had spent at the target, in figures."""
    return [
        {
            "name": one.run,
            "step": one.step,
            "machine_seconds": one.machine_seconds,
            "device_seconds": one.device_seconds,
            "usd": one.usd,
            "joules_at_most": one.joules,
            "usd_per_hour": None if one.rate is None else one.rate.usd_per_hour,
        }
        for one in found.spent
    ]


def goal(target: Target) -> str:
    """Return a target in words: heldout/loss of at most 2.310."""
    way = "most" if target.at_least is None else "least"
    return f"{target.metric} of at {way} {formatting.number(target.value)}"


def _cost(one: Spent, target: Target) -> str:
    between = "" if one.between is None else ", straight between {} and {}".format(*one.between)
    joules = "" if one.joules is None else f" and at most {formatting.count(one.joules)}J"
    usd = formatting.dollars(one.usd) if one.usd is not None else "unknown dollars"
    price = "" if one.rate is None else f" at {one.rate.told}"
    return (
        f"{one.run} came to {goal(target)} at step {one.step:,.4g}{between}, for "
        f"{formatting.duration(one.machine_seconds)} of machine time, {usd}{price}{joules}."
    )


def _nearest(one: Spent) -> str:
    if one.best is None:
        return "it never measured it"
    return f"its best is {formatting.number(one.best[1])} at step {one.best[0]:,}"


def _verdict(found: Parity) -> str:
    passed = found.verdict == "pass"
    metric = _foremost([each for each in found.metrics if each.fine or not passed])
    gap = metric.worst
    where = f"{metric.name} by {percent(gap.share)} at step {gap.step}"
    apart = f"{found.theirs} differs from {found.ours}"
    if found.verdict == "fail":
        return f"Fail: {apart}, most in {where}, {_measure(found, metric, gap)}."
    if not passed:
        return f"Not shown: {apart} in {where}, {_measure(found, metric, gap)}."
    if gap.share > metric.band:
        return f"Pass, by noise: {apart} in {where}, {_measure(found, metric, gap)}."
    count = len({gap.step for metric in found.metrics for gap in metric.gaps})
    times = "the one evaluation" if count == 1 else f"all {count} evaluations"
    if not gap.share:
        return f"Pass: {found.theirs} measures what {found.ours} does at {times}."
    return (
        f"Pass: {found.theirs} is within {percent(metric.band)} of {found.ours} at {times}, "
        f"at most {where}."
    )


def _coarse(found: Parity) -> list[str]:
    """Return what a pass says nothing of: metrics that count too few items for the band."""
    coarse = [metric for metric in found.metrics if not metric.fine and metric.worst.share]
    if found.verdict != "pass" or not coarse:
        return []
    metric = _foremost(coarse)
    gap = metric.worst
    where = f"{metric.name} differs by {percent(gap.share)} at step {gap.step}"
    few = "too few to show a difference of that size"
    return [f"{where}, {_measure(found, metric, gap)}: {few}."]


def _foremost(metrics: Sequence[Metric]) -> Metric:
    return max(metrics, key=lambda metric: metric.excess(metric.worst))


def _measure(found: Parity, metric: Metric, gap: Gap) -> str:
    """Return what a gap is judged by: the band, the noise, or what its items do by chance."""
    limit = metric.limit(gap)
    if limit == metric.band:
        return f"beyond the band of {percent(metric.band)}"
    if limit == at(metric.noise, gap.step):
        return f"of which {found.ours} differs from itself by {percent(limit)}"
    return f"where one of {metric.items or 0:,.0f} items is {percent(metric.grain(gap))}"


def _not_comparable(found: Parity) -> str:
    return (
        f"Not shown: {found.ours} and {found.theirs} are not comparable, "
        f"they differ in {named(found.prevented)}."
    )


def named(found: Sequence[Difference]) -> str:
    """Return differences in words, and how many are left out."""
    told = [f"{each.key} ({plain(each.ours)}, {plain(each.theirs)})" for each in found[:NAMED]]
    more = len(found) - NAMED
    return ", ".join(told) + (f" and {more} more" if more > 0 else "")


def percent(share: float) -> str:
    """Return a relative difference in percent, with two digits that count."""
    return f"{100 * share:.2g}%"


def plain(value: object) -> str:
    """Return a setting's value in words."""
    if value is None:
        return "unset"
    text = str(value)
    return f"{text[:HASH]}…" if _HASH.fullmatch(text) else text
