"""What a report says about runs: results first, then what they cost. No markup, no charts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from regauge.comparison import sentences
from regauge.comparison.compare import Compared
from regauge.comparison.verdict import measured
from regauge.config import flat
from regauge.reporting import inference_section, scaling_section
from regauge.reporting.comparison_section import Account, Beside, accounts, told
from regauge.reporting.failures_section import Ending, endings
from regauge.reporting.figures import Figure, reliability, throughput
from regauge.reporting.inference_section import Inferences
from regauge.reporting.profile_section import Closer, closer
from regauge.reporting.scaling_section import Scaling
from regauge.results import formatting
from regauge.results.evaluation_table import Table, table
from regauge.results.run_folder import Run

PARTS = {
    "init": "starting processes, reading the model and the data",
    "compile": "building graphs",
    "data_wait": "the device waited for rows",
    "step": "forward, backward, optimizer",
    "evaluate": "measuring on held-out rows",
    "checkpoint": "training stood still for a save",
    "lost": "work of ended attempts that was done again",
    "idle": "between attempts, or cut off before it was written down",
}
"""Where time goes, in the ledger's words."""


@dataclass(frozen=True)
class Part:
    """A part of a run's time."""

    name: str
    meaning: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Chapter:
    """One run, as it is told."""

    run: Run
    what: str
    state: str
    figures: tuple[Figure, ...]
    """Real tokens, speed, padding, MFU and dollars, each with its formula or source."""
    parts: tuple[Part, ...]
    closer: Closer | None
    """Where a step goes, where the run was profiled."""
    settings: tuple[str, ...]
    """One `key.path=value` each, as the command line takes them."""
    environment: tuple[tuple[str, str], ...]
    endings: tuple[Ending, ...]
    """How attempts failed, oldest first."""

    @property
    def seconds(self) -> float | None:
        """Wall-clock of the run over all attempts."""
        return sum(part.seconds for part in self.parts) if self.parts else self.run.seconds


@dataclass(frozen=True)
class Story:
    """Everything a report says."""

    title: str
    verdict: tuple[str, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]
    chapters: tuple[Chapter, ...]
    scalings: tuple[Scaling, ...] = ()
    """Benchmarks of training."""
    inferences: tuple[Inferences, ...] = ()
    """Benchmarks of artifacts."""
    compared: Compared | None = None
    """Runs that are told beside the first of them."""

    @property
    def beside(self) -> tuple[Beside, ...]:
        """Each of them in words."""
        return told(self.compared) if self.compared else ()

    @property
    def accounts(self) -> tuple[Account, ...]:
        """What each of them had spent when it came to the target."""
        return accounts(self.compared) if self.compared else ()

    @property
    def cost(self) -> tuple[str, ...]:
        """What their costs say."""
        return sentences.cost_sentences(self.compared) if self.compared else ()

    @property
    def trained(self) -> tuple[Chapter, ...]:
        """The chapters with a ledger or metrics."""
        return tuple(
            chapter for chapter in self.chapters if chapter.run.ledger or chapter.run.series
        )

    @property
    def environments(self) -> list[tuple[tuple[tuple[str, str], ...], str]]:
        """Each environment once, with the names of the runs that it was the environment of."""
        names: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for chapter in self.chapters:
            if chapter.environment:
                names.setdefault(chapter.environment, []).append(chapter.run.name)
        return [(environment, ", ".join(runs)) for environment, runs in names.items()]


def tell(
    runs: tuple[Run, ...], title: str | None = None, compared: Compared | None = None
) -> Story:
    """Return the story of runs in their order, and of those that are compared with the first."""
    tables = tuple(table(run.evaluation) for run in runs if run.evaluation)
    chapters = tuple(_chapter(run) for run in runs)
    answered = tuple(
        filter(None, (inference_section.told(run.benchmark, run.name) for run in runs))
    )
    faster = tuple(sentence for found in answered for sentence in found.verdict)
    return Story(
        title=title or _title(runs),
        verdict=(*_compared(compared), *_verdict(tables, chapters), *faster),
        figures=_headline(tables, chapters),
        tables=tables,
        chapters=chapters,
        scalings=tuple(
            filter(None, (scaling_section.told(run.benchmark, run.name) for run in runs))
        ),
        inferences=answered,
        compared=compared,
    )


def _compared(found: Compared | None) -> tuple[str, ...]:
    """Return the verdict on each run that is compared, and which one is the cheapest."""
    if found is None:
        return ()
    told = [sentences.sentences(parity)[0] for parity in found.parities]
    return (*told, *sentences.cheapest(found))


def _title(runs: tuple[Run, ...]) -> str:
    if len(runs) == 1:
        return runs[0].name
    parents = {run.folder.resolve().parent.name for run in runs}
    return parents.pop() if len(parents) == 1 else ", ".join(run.name for run in runs)


def _verdict(tables: tuple[Table, ...], chapters: tuple[Chapter, ...]) -> tuple[str, ...]:
    """Return what came out, one sentence each; a run without a result says how far it is."""
    lines = [sentence for found in tables for sentence in found.sentences()]
    going_on = [found for found in chapters if found.run.step is not None and not found.run.end]
    if not lines:
        lines = [line for chapter in chapters for line in _heldout(chapter.run)]
    lines += [f"{chapter.run.name}: {chapter.state}." for chapter in going_on]
    for found in going_on:
        lines += [f"{found.run.name}: {last.sentence}" for last in found.endings[-1:]]
    return tuple(lines)


def _heldout(run: Run) -> list[str]:
    return [
        f"{run.name}: {name} went {formatting.change(series[0][1], series[-1][1])} "
        f"between steps {series[0][0]} and {series[-1][0]}."
        for name, series in measured(run).items()
        if len(series) > 1
    ]


def _headline(tables: tuple[Table, ...], chapters: tuple[Chapter, ...]) -> tuple[Figure, ...]:
    """Return the figures at the top: the best of each metric, then time, tokens and dollars."""
    best = [
        Figure(f"best {metric}", formatting.number(value), name)
        for found in tables[-1:]
        for metric, name, value in found.bests()[:2]
    ]
    seconds = [chapter.seconds for chapter in chapters if chapter.seconds is not None]
    ledgers = [chapter.run.ledger for chapter in chapters if chapter.run.ledger]
    totals = [Figure("wall-clock", formatting.duration(sum(seconds)))] if seconds else []
    if ledgers:
        tokens = sum(ledger.get("tokens") or 0 for ledger in ledgers)
        totals.append(
            Figure("real tokens trained on", formatting.count(tokens), "padding not counted")
        )
        totals.append(_spent(chapters))
    return (*best, *totals)


def _spent(chapters: tuple[Chapter, ...]) -> Figure:
    priced: list[tuple[str, float | None]] = [
        (found.run.name, found.run.ledger.get("usd")) for found in chapters if found.run.ledger
    ]
    unpriced = [name for name, usd in priced if usd is None]
    if unpriced:
        return Figure(
            "dollars", formatting.UNKNOWN, f"no price was given for {', '.join(unpriced)}"
        )
    total = sum(usd for _, usd in priced if usd is not None)
    return Figure("dollars", formatting.dollars(total), "over all attempts")


def _chapter(run: Run) -> Chapter:
    return Chapter(
        run=run,
        what=_what(run),
        state=_state(run),
        figures=(*reliability(run), *(throughput(run.ledger) if run.ledger else ())),
        parts=_parts(run.goodput.seconds if run.goodput else run.ledger.get("seconds") or {}),
        closer=closer(run.profile),
        settings=tuple(f"{key}={json.dumps(value)}" for key, value in flat(run.settings)),
        environment=tuple((key, _plain(value)) for key, value in flat(run.environment)),
        endings=endings(run),
    )


def _what(run: Run) -> str:
    """Return the verb with what it worked on, as far as the folder tells."""
    kind = {
        "evaluation": run.evaluation,
        "benchmark": run.benchmark,
        "prepare": run.dataset,
        "train": run.series or run.ledger,
    }
    verb = run.verb or next((name for name, found in kind.items() if found), "run")
    task = run.settings.get("task")
    tables = [task, *task.values()] if isinstance(task, dict) else []
    kinds = [each.get("kind") for each in tables if isinstance(each, dict)]
    named = " and ".join(kind for kind in kinds if isinstance(kind, str))
    rows = {name: split.get("rows", 0) for name, split in run.dataset.get("splits", {}).items()}
    told = ", ".join(f"{count:,} {name}" for name, count in rows.items())
    return " ".join(filter(None, [verb, named, f"({told} rows)" if told else ""]))


def _state(run: Run) -> str:
    if run.step is None:
        made = run.end or run.evaluation or run.benchmark or run.dataset
        return "finished" if made else "not finished: no step yet"
    length = run.settings.get("stop", {}).get("steps")
    of = f" of {length:,}" if isinstance(length, int) and not run.end else ""
    return f"{run.end or 'not finished: last seen'} at step {run.step:,}{of}"


def _parts(seconds: Mapping[str, float]) -> tuple[Part, ...]:
    total = sum(seconds.values())
    names = [*(name for name in PARTS if name in seconds), *(n for n in seconds if n not in PARTS)]
    return tuple(
        Part(
            name.replace("_", " "),
            PARTS.get(name, ""),
            seconds[name],
            seconds[name] / total if total else 0.0,
        )
        for name in names
    )


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
