"""What a report says of runs beside the first of them. No markup, no charts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.comparison import sentences
from regauge.comparison.cost import ranked
from regauge.results import formatting

if TYPE_CHECKING:
    from regauge.comparison.compare import Compared, Place
    from regauge.comparison.cost import Spent
    from regauge.comparison.gaps import Gap, Metric
    from regauge.comparison.verdict import Parity

SHOWN = 12
"""Evaluations in a table, at most: of more, those whose difference is largest."""


@dataclass(frozen=True)
class Row:
    """One evaluation of both runs, in words."""

    metric: str
    step: str
    ours: str
    theirs: str
    share: str
    limit: str
    within: bool


@dataclass(frozen=True)
class Beside:
    """One run beside the first, in words."""

    ours: str
    theirs: str
    verdict: str
    sentences: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: int
    """Evaluations that are not in the rows: they differ by less."""
    differences: tuple[tuple[str, str, str], ...]
    """Key, here and there, of everything that was computed differently or prevents comparing."""
    place: Place | None
    """Where it parts from the first, where that was computed again."""


@dataclass(frozen=True)
class Account:
    """What a run had spent when it came to the target, in words."""

    run: str
    step: str
    machine: str
    device: str
    usd: str
    energy: str
    price: str
    cheapest: bool


def told(found: Compared) -> tuple[Beside, ...]:
    """Return each run beside the first."""
    places = {place.run: place for place in found.places}
    return tuple(_beside(parity, places.get(parity.theirs)) for parity in found.parities)


def accounts(found: Compared) -> tuple[Account, ...]:
    """Return what each run had spent at the target; nothing without a target."""
    order = ranked(found.spent)
    cheapest = order[0].run if len(order) > 1 else None
    return tuple(_account(one, cheapest) for one in found.spent)


def _beside(parity: Parity, place: Place | None) -> Beside:
    rows = [(metric, gap) for metric in parity.metrics for gap in metric.gaps]
    rows.sort(key=lambda row: -row[1].share)
    shown = sorted(rows[:SHOWN], key=lambda row: (row[0].name, row[1].step))
    differing = (*parity.prevented, *parity.computed)
    return Beside(
        ours=parity.ours,
        theirs=parity.theirs,
        verdict=parity.verdict,
        sentences=sentences.sentences(parity),
        rows=tuple(_row(*row) for row in shown),
        left_out=len(rows) - len(shown),
        differences=tuple(
            (each.key, sentences.plain(each.ours), sentences.plain(each.theirs))
            for each in differing
        ),
        place=place,
    )


def _row(metric: Metric, gap: Gap) -> Row:
    limit = metric.limit(gap)
    return Row(
        metric=metric.name,
        step=f"{gap.step:,}",
        ours=f"{gap.ours:.5g}",
        theirs=f"{gap.theirs:.5g}",
        share=sentences.percent(gap.share),
        limit=sentences.percent(limit),
        within=gap.share <= limit,
    )


def _account(one: Spent, cheapest: str | None) -> Account:
    energy = (
        formatting.UNKNOWN if one.joules is None else f"at most {formatting.count(one.joules)}J"
    )
    return Account(
        run=one.run,
        step="never" if one.step is None else f"{one.step:,.4g}",
        machine=formatting.duration(one.machine_seconds),
        device=formatting.duration(one.device_seconds),
        usd=formatting.dollars(one.usd),
        energy=energy,
        price=formatting.UNKNOWN if one.rate is None else one.rate.told,
        cheapest=one.run == cheapest,
    )
