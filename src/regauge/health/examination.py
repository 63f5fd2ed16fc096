"""The processes of an examination, started, watched, and killed at their limit; no torch here."""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import processes
from regauge.config import dump
from regauge.health.findings import PAIRS, Bandwidth, Finding
from regauge.worker import WorkerLimits, run_worker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.accelerators import Accelerator
    from regauge.worker import Line

PROBE = "regauge.health.probe"
START_SECONDS, CHECK_SECONDS, COMPILE_SECONDS = 60.0, 10.0, 120.0
"""Longest that processes may take to start, and for one check: more where it is compiled first."""
LATE_SECONDS = 5.0
"""How long the others may go on once one of them has left with an error."""
SLOWEST_SHARE = 0.3
"""Of the others' median: a device below it is slow. What else a machine does may halve a speed."""


@dataclass
class Examination:
    """What was found."""

    findings: list[Finding] = field(default_factory=list)
    bandwidths: list[Bandwidth] = field(default_factory=list)

    @property
    def culprits(self) -> set[int]:
        """The processes whose devices are bad; empty where that cannot be told of all of them."""
        bad = [finding for finding in self.findings if not finding.ok]
        named = [finding for finding in bad if finding.check == PAIRS] or bad
        ranks = {finding.rank for finding in named}
        return set() if None in ranks else {rank for rank in ranks if rank is not None}


@dataclass
class ProbeReport:
    """What one process has written before it came to its end, or did not."""

    rank: int
    findings: list[Finding] = field(default_factory=list)
    bandwidths: list[Bandwidth] = field(default_factory=list)
    doing: str = "start"
    """The check that it began last."""
    together: bool = False
    """Whether it had come to what processes do together."""
    done: bool = False

    @classmethod
    def read(cls, rank: int, lines: Iterable[Line]) -> ProbeReport:
        """Read the lines of a process; that it came to no end is a finding."""
        report = cls(rank)
        for line in lines:
            if line["rank"] != rank:
                continue
            if "begins" in line:
                report.doing, report.together = line["begins"], line["together"]
            elif "finding" in line:
                report.findings.append(replace(Finding(**line["finding"]), rank=rank))
            elif "bandwidth" in line:
                report.bandwidths.append(Bandwidth(**line["bandwidth"]))
            report.done = report.done or "done" in line
        if report.ok and not report.done:
            problem = "it did not come to its end"
            report.findings.append(Finding.bad(report.doing, f"process {rank}", problem, rank=rank))
        return report

    @property
    def ok(self) -> bool:
        """Whether it has found nothing bad."""
        return all(finding.ok for finding in self.findings)


def examine(
    accelerator: Accelerator,
    size: int,
    *,
    quick: bool = True,
    fault_plan: str | None = None,
    record: Path | None = None,
    devices: tuple[int, ...] = (),
) -> Examination:
    """Check the first `size` devices, or those given, and what their processes tell each other.

    Where they do not understand each other, every two of them are tried alone, and who is in all
    pairs that fail is named.
    """
    request = {
        "accelerator": dump(accelerator),
        "quick": quick,
        "fault_plan": fault_plan,
        "record": str(record) if record else None,
    }
    with tempfile.TemporaryDirectory(prefix="regauge-doctor-") as folder:
        run = partial(_run, Path(folder), request, size, devices)
        limit = COMPILE_SECONDS if accelerator.lazy else CHECK_SECONDS
        lines = run("everything", limit=limit)
        reports = [ProbeReport.read(rank, lines) for rank in range(size)]
        alone = [one for one in reports if not one.ok and not one.together]
        if not alone and any(not one.ok for one in reports) and size > 1:
            reports[0].findings.append(blamed(*_pairs(run("pairs", limit=limit), size)))
    if alone:  # the others only waited for these
        reports = [one if one in alone else _without_problems(one) for one in reports]
    examination = Examination(
        [finding for one in reports for finding in one.findings],
        [row for one in reports for row in one.bandwidths],
    )
    _compare_speeds(examination.findings)
    return examination


def _run(
    scratch: Path,
    request: dict[str, Any],
    size: int,
    devices: tuple[int, ...],
    what: str,
    *,
    limit: float,
) -> list[Line]:
    """Run the processes, kill those that come to no end, and return what they have written.

    A check may last for `limit` seconds in which no process writes anything.
    """
    lines: list[Line] = []
    run_worker(
        PROBE,
        {**request, "what": what},
        scratch,
        WorkerLimits(silence=limit, start=START_SECONDS, after_failure=LATE_SECONDS),
        seats=processes.Seats(size, processes.free_port(), devices=devices),
        on_line=lines.append,
    )
    return lines


def _without_problems(report: ProbeReport) -> ProbeReport:
    return replace(report, findings=[finding for finding in report.findings if finding.ok])


def _compare_speeds(findings: list[Finding]) -> None:
    """Mark devices that are much slower than the others."""
    for name in {finding.check for finding in findings if finding.speed is not None}:
        places = [number for number, found in enumerate(findings) if found.check == name]
        speeds = {number: findings[number].speed or 0.0 for number in places}
        for number, speed in speeds.items():
            others = [value for other, value in speeds.items() if other != number]
            if others and speed < SLOWEST_SHARE * (usual := statistics.median(others)):
                problem = f"slow: the others have {usual / 1e9:,.0f} GFLOP/s"
                findings[number] = replace(findings[number], problem=problem, ok=False)


Pairs = dict[tuple[int, int], str]
"""What is wrong with two processes; empty where nothing is."""


def _pairs(lines: list[Line], size: int) -> tuple[Pairs, list[int]]:
    """Return what is wrong with each pair that was tried, and who came to no end of one."""
    pairs: Pairs = {}
    silent = []
    for rank in range(size):
        meetings = [line for line in lines if line["rank"] == rank and "partner" in line]
        for line in meetings:
            one, other = sorted((rank, line["partner"]))
            pairs[one, other] = pairs.get((one, other)) or line.get("problem", "")
        if meetings and "problem" not in meetings[-1]:
            silent.append(rank)
    return pairs, silent


def blamed(found: Pairs, silent: list[int]) -> Finding:
    """Return who hangs, or who is in all pairs that fail and in none that does not."""
    bad = {pair: problem for pair, problem in found.items() if problem}
    tried = f"{len(found)} pairs tried, {len(bad)} bad"
    if len(silent) == 1:
        return Finding.bad(PAIRS, f"process {silent[0]}", "it hangs", tried, rank=silent[0])
    if not bad:
        return Finding.bad(PAIRS, "all processes", "every two of them are well alone", tried)
    counts = Counter(rank for pair in bad for rank in pair)
    well = {rank for pair in found.keys() - bad.keys() for rank in pair}
    named = [rank for rank, count in counts.items() if count == len(bad) and rank not in well]
    if len(named) != 1:
        named = [rank for rank in named if all(f"process {rank} " in text for text in bad.values())]
    problem = next(iter(bad.values()))
    if len(named) == 1:
        where, problem = f"process {named[0]}", f"fails with every other one: {problem}"
        return Finding.bad(PAIRS, where, problem, tried, rank=named[0])
    those = ", ".join(str(rank) for rank in sorted(counts))
    return Finding.bad(PAIRS, f"processes {those}", f"{problem}; which cannot be told", tried)
