"""Whether one run came to what another did: held-out metrics side by side, and where they part.

Everything is read from what the runs wrote. Two runs are comparable where they saw the same rows
in the same order, from the same weights and with the same schedule; how they were computed is what
is compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from regauge import choices
from regauge.comparison.gaps import Gap, Metric, aligned, at
from regauge.config import flat
from regauge.results.evaluation_table import table
from regauge.tasks import ITEMS
from regauge.trackers import of_training

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regauge.results.run_folder import Run
    from regauge.results.series import Series

Verdict = Literal["pass", "fail", "not shown"]
BAND = 0.001
"""Largest relative difference of a held-out metric that counts as none."""
EXACT = 1e-5
"""Equal programs agree to it for tens of steps; then their rounding has grown."""
NOISE = 4.0
"""A step has parted where the loss differs by so many times what a run differs from itself."""
LOSS, NORM, RATE = "train/loss", "train/gradient_norm", "train/learning_rate"
SAME = (
    "seed",
    "task",
    "model",
    "optimizer",
    "batch.rows",
    "stop.steps",
    "stop.epochs",
    "evaluation.rows",
)
"""Settings, and tables of them, that comparable runs share."""
COMPUTED = ("model.attention", "model.path", "model.weights")
"""Below those tables, what only says how it is computed."""
FACTS = {"data_identity": "the prepared data", "weights": "the weights of step 0"}
"""What a run writes of itself, in words."""
ASIDE = (
    "output",
    "stop",
    "execution.price",
    "evaluation.every_steps",
    "execution.supervision",
    "subjects",
    "data.path",
)
"""Settings whose difference says nothing."""
_OF_A_TASK = re.compile(r"task\.([^.]+)\.(data\.path|batch\.microbatch_rows)")
"""Of one of several tasks, what is judged as it is of a run: `data.path.words`."""
PLACE = ("platform", "host", "packages")
"""What makes two environments one: equal programs give equal bits there."""


@dataclass(frozen=True)
class Difference:
    """A setting, or a fact, in which two runs differ."""

    key: str
    ours: Any
    theirs: Any


@dataclass(frozen=True)
class Parting:
    """The first value of training that differs by more than noise."""

    name: str
    """Of its series: the loss, or the norm of the gradients."""
    gap: Gap


@dataclass(frozen=True)
class Parity:
    """What a comparison of a run with the first one found."""

    ours: str
    theirs: str
    prevented: tuple[Difference, ...]
    """Why they are not comparable; empty where they are."""
    computed: tuple[Difference, ...]
    """How their computations differ."""
    metrics: tuple[Metric, ...]
    losses: tuple[Gap, ...]
    """Of the training loss, at every step that both logged."""
    floor: Series
    """Largest difference of the first run's training loss from its repetitions, up to each step."""
    parted: Parting | None
    """Where their training differs first; None where it does not."""
    alike: bool
    """Whether they were computed alike, on one machine, by kernels that repeat to the last bit."""
    rescheduled: int | None
    """First step whose learning rate differs; None where none does."""
    measured: bool
    """Whether the noise was measured."""

    @property
    def verdict(self) -> Verdict:
        """Whether the second run is as good as the first, as far as these runs show it."""
        if self.prevented or not self.metrics:
            return "not shown"
        if not all(metric.within for metric in self.metrics):
            return "fail"
        return "pass" if any(metric.fine for metric in self.metrics) else "not shown"


def compare(
    ours: Run,
    theirs: Run,
    noise: Sequence[Run] = (),
    band: float = BAND,
    judging: Sequence[str] = (),
) -> Parity:
    """Compare a run with the first one; `noise` are repetitions of the first one.

    `judging` names the metrics that the verdict is about: all that both measured by default.
    """
    differing = differences(ours, theirs)
    prevented = [found for found in differing if prevents(found.key)]
    other = measured(theirs)
    names = [name for name in measured(ours) if name in other]
    computed = tuple(found for found in differing if not prevents(found.key))
    losses = aligned(ours.series.get(LOSS, ()), theirs.series.get(LOSS, ()))
    rates = aligned(ours.series.get(RATE, ()), theirs.series.get(RATE, ()))
    alike = not computed and _repeats(ours, theirs)
    return Parity(
        ours=ours.name,
        theirs=theirs.name,
        prevented=tuple(prevented),
        computed=computed,
        metrics=tuple(
            metric
            for name in judging or names
            if name in names and (metric := _metric(name, ours, theirs, noise, band)).gaps
        ),
        losses=losses,
        floor=_floor(LOSS, ours, noise),
        parted=_parting(ours, theirs, noise, alike=alike),
        alike=alike,
        rescheduled=next((gap.step for gap in rates if gap.share > EXACT), None),
        measured=bool(noise),
    )


def _metric(name: str, ours: Run, theirs: Run, noise: Sequence[Run], band: float) -> Metric:
    gaps = aligned(measured(ours)[name], measured(theirs)[name])
    return Metric(name, gaps, _floor(name, ours, noise), band, _items(ours, name))


def measured(run: Run) -> dict[str, Series]:
    """Return the metrics of held-out rows: along a run, or of saved models at once."""
    found = _heldout(run).items()
    return {name: series for name, series in found if _last(name) != ITEMS}


def _items(run: Run, name: str) -> float | None:
    """Return how many items a metric is a mean over, where the run tells."""
    series = _heldout(run).get(name.removesuffix(_last(name)) + ITEMS)
    return series[-1][1] if series else None


def _last(name: str) -> str:
    """Return the metric's own name: `loss` of `heldout/loss`, and of `trained: loss`."""
    return re.split(r"/|: ", name)[-1]


def _heldout(run: Run) -> dict[str, Series]:
    found = {name: points for name, points in run.series.items() if not of_training(name)}
    if run.evaluation:
        rows = table(run.evaluation)
        for name, values in zip(rows.names, rows.values, strict=True):
            for metric, value in zip(rows.metrics, values, strict=True):
                if value is not None:
                    found[f"{name}: {metric}"] = ((0, value),)
    return found


def differences(ours: Run, theirs: Run) -> list[Difference]:
    """Return every setting and fact in which two runs differ, but those that say nothing."""
    first, second = _told(ours), _told(theirs)
    keys = [*first, *(key for key in second if key not in first)]
    return [
        Difference(key, first.get(key), second.get(key))
        for key in keys
        if first.get(key) != second.get(key) and not _under(key, ASIDE, but=SAME)
    ]


def prevents(key: str) -> bool:
    """Return whether runs that differ in this are not comparable."""
    return key in FACTS.values() or (_under(key, SAME) and not _under(key, COMPUTED))


def _parting(ours: Run, theirs: Run, noise: Sequence[Run], *, alike: bool) -> Parting | None:
    """Return the first value that differs by more than noise: of equal programs, at all."""
    found = []
    for name in (LOSS, NORM):
        floor = _floor(name, ours, noise)
        for gap in aligned(ours.series.get(name, ()), theirs.series.get(name, ())):
            if gap.share > (0.0 if alike else max(EXACT, NOISE * at(floor, gap.step))):
                found.append(Parting(name, gap))
                break
    return min(found, key=lambda parting: parting.gap.step, default=None)


def _repeats(ours: Run, theirs: Run) -> bool:
    """Return whether two runs had one machine, one software, and kernels that repeat."""
    kinds = [run.settings.get("accelerator", {}).get("kind") for run in (ours, theirs)]
    if kinds[0] != kinds[1] or kinds[0] not in choices.names("accelerators"):
        return False
    places = [[run.environment.get(name) for name in PLACE] for run in (ours, theirs)]
    kernels: Any = choices.load("accelerators", kinds[0])
    return places[0] == places[1] and all(places[0]) and bool(kernels.repeatable)


def _floor(name: str, ours: Run, noise: Sequence[Run]) -> Series:
    """Return by step the largest difference so far of a run from its repetitions."""
    shares: dict[int, float] = {}
    for run in noise:
        for gap in aligned(_series(ours, name), _series(run, name)):
            shares[gap.step] = max(shares.get(gap.step, 0.0), gap.share)
    largest, found = 0.0, []
    for step in sorted(shares):
        largest = max(largest, shares[step])
        found.append((step, largest))
    return tuple(found)


def _series(run: Run, name: str) -> Series:
    return run.series.get(name) or measured(run).get(name, ())


def _told(run: Run) -> Mapping[str, Any]:
    facts = {words: run.facts.get(name) for name, words in FACTS.items()}
    packages = {f"package {name}": found for name, found in _packages(run).items()}
    settings = {_OF_A_TASK.sub(r"\2.\1", key): value for key, value in flat(run.settings)}
    return {**facts, **settings, **packages}


def _packages(run: Run) -> dict[str, str]:
    return dict(run.environment.get("packages") or {})


def _under(key: str, tables: tuple[str, ...], but: tuple[str, ...] = ()) -> bool:
    inside = any(key == table or key.startswith(f"{table}.") for table in tables)
    return inside and not any(key == table for table in but)
