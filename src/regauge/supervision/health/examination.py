"""Checks all devices in worker processes, which are killed if they hang; no torch here."""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import dump
from regauge.supervision.health.findings import PAIRS, Bandwidth, Finding
from regauge.system import processes
from regauge.system.worker import WorkerLimits, run_worker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.accelerators import Accelerator
    from regauge.system.worker import Line

PROBE = "regauge.supervision.health.probe"
START_SECONDS, CHECK_SECONDS, COMPILE_SECONDS = 60.0, 10.0, 120.0
"""Time limits for the start, for one check, and for one check on a lazy device, which compiles
it."""
LATE_SECONDS = 5.0
"""Time left for the other processes after one exited with an error."""
MIN_SPEED_SHARE = 0.3
"""Share of the others' median speed below which a device is slow; other work may halve a speed."""


@dataclass
class Examination:
    """Findings and bandwidths for all devices."""

    findings: list[Finding] = field(default_factory=list)
    bandwidths: list[Bandwidth] = field(default_factory=list)

    @property
    def bad_ranks(self) -> set[int]:
        """Processes with bad devices; empty if any bad finding does not name a process."""
        bad = [finding for finding in self.findings if not finding.ok]
        decisive = [finding for finding in bad if finding.check == PAIRS] or bad
        ranks = {finding.rank for finding in decisive}
        return set() if None in ranks else {rank for rank in ranks if rank is not None}


@dataclass
class ProbeReport:
    """The lines from one worker process, finished or not."""

    rank: int
    findings: list[Finding] = field(default_factory=list)
    bandwidths: list[Bandwidth] = field(default_factory=list)
    last_check: str = "start"
    """Last check begun."""
    is_collective: bool = False
    """Whether the last check needs the other processes."""
    is_done: bool = False

    @classmethod
    def read(cls, rank: int, lines: Iterable[Line]) -> ProbeReport:
        """Parse the lines of a process; an unfinished process gets a bad finding."""
        report = cls(rank)
        for line in lines:
            if line["rank"] != rank:
                continue
            if "started_check" in line:
                report.last_check, report.is_collective = (
                    line["started_check"],
                    line["is_collective"],
                )
            elif "finding" in line:
                report.findings.append(replace(Finding(**line["finding"]), rank=rank))
            elif "bandwidth" in line:
                report.bandwidths.append(Bandwidth(**line["bandwidth"]))
            report.is_done = report.is_done or "is_done" in line
        if report.is_good and not report.is_done:
            location = f"process {rank}"
            finding = Finding.bad(report.last_check, location, "it did not finish", rank=rank)
            report.findings.append(finding)
        return report

    @property
    def is_good(self) -> bool:
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
    """Check the first `size` devices, or the given ones, and their collectives.

    If a collective fails, each pair of processes is checked separately. The process found in all
    failing pairs is blamed.
    """
    request = {
        "accelerator": dump(accelerator),
        "quick": quick,
        "fault_plan": fault_plan,
        "record": str(record) if record else None,
    }
    with tempfile.TemporaryDirectory(prefix="regauge-doctor-") as folder:
        run = partial(_run_probes, Path(folder), request, size, devices)
        limit = COMPILE_SECONDS if accelerator.is_lazy else CHECK_SECONDS
        lines = run("everything", limit=limit)
        reports = [ProbeReport.read(rank, lines) for rank in range(size)]
        bad = [report for report in reports if not report.is_good]
        bad_devices = [report for report in bad if not report.is_collective]
        if bad and not bad_devices and size > 1:
            pairs = _read_pairs(run("pairs", limit=limit), size)
            reports[0].findings.append(blame_from_pairs(*pairs))
    if bad_devices:  # the other processes only waited for these
        reports = [
            report
            if report in bad_devices
            else replace(report, findings=[finding for finding in report.findings if finding.ok])
            for report in reports
        ]
    examination = Examination(
        [finding for report in reports for finding in report.findings],
        [row for report in reports for row in report.bandwidths],
    )
    _compare_speeds(examination.findings)
    return examination


def _run_probes(
    scratch: Path,
    request: dict[str, Any],
    size: int,
    devices: tuple[int, ...],
    scope: str,
    *,
    limit: float,
) -> list[Line]:
    """Run the worker processes and return their lines; hanging processes are killed.

    `scope` is `everything`, or `pairs` for only the collectives of each pair of processes. During
    a check, all processes together may be silent for `limit` seconds.
    """
    lines: list[Line] = []
    run_worker(
        PROBE,
        {**request, "scope": scope},  # read by `probe`
        scratch,
        WorkerLimits(silence=limit, start=START_SECONDS, after_failure=LATE_SECONDS),
        layout=processes.RankLayout(size, processes.find_free_port(), devices=devices),
        on_line=lines.append,
    )
    return lines


def _compare_speeds(findings: list[Finding]) -> None:
    """Mark devices much slower than the others."""
    for name in {finding.check for finding in findings if finding.flops_per_second is not None}:
        speeds = {
            index: finding.flops_per_second or 0.0
            for index, finding in enumerate(findings)
            if finding.check == name
        }
        for index, speed in speeds.items():
            others = [value for other, value in speeds.items() if other != index]
            if others and speed < MIN_SPEED_SHARE * (median := statistics.median(others)):
                problem = f"slow: the others have {median / 1e9:,.0f} GFLOP/s"
                findings[index] = replace(findings[index], problem=problem, ok=False)


PairProblems = dict[tuple[int, int], str]
"""Pair of processes -> problem, or ""."""


def _read_pairs(lines: list[Line], size: int) -> tuple[PairProblems, list[int]]:
    """Return the problem of each checked pair, and the unfinished processes."""
    pairs: PairProblems = {}
    unfinished = []
    for rank in range(size):
        meetings = [line for line in lines if line["rank"] == rank and "partner" in line]
        for line in meetings:
            low, high = sorted((rank, line["partner"]))
            pairs[low, high] = pairs.get((low, high)) or line.get("problem", "")
        if meetings and "problem" not in meetings[-1]:
            unfinished.append(rank)
    return pairs, unfinished


def blame_from_pairs(pairs: PairProblems, unfinished: list[int]) -> Finding:
    """Return a finding for the unfinished process, or the only one in all failing pairs."""
    bad = {pair: problem for pair, problem in pairs.items() if problem}
    value = f"{len(pairs)} pairs checked, {len(bad)} bad"
    if len(unfinished) == 1:
        rank = unfinished[0]
        return Finding.bad(PAIRS, f"process {rank}", "it hangs or crashed", value, rank=rank)
    if not bad:
        return Finding.bad(PAIRS, "all processes", "each pair is good separately", value)
    counts = Counter(rank for pair in bad for rank in pair)
    good_ranks = {rank for pair in pairs.keys() - bad.keys() for rank in pair}
    suspects = [
        rank for rank, count in counts.items() if count == len(bad) and rank not in good_ranks
    ]
    if len(suspects) != 1:
        suspects = [
            rank for rank in suspects if all(f"process {rank} " in text for text in bad.values())
        ]
    problem = next(iter(bad.values()))
    if len(suspects) == 1:
        rank, problem = suspects[0], f"fails with every other process: {problem}"
        return Finding.bad(PAIRS, f"process {rank}", problem, value, rank=rank)
    ranks = ", ".join(str(rank) for rank in sorted(counts))
    problem = f"{problem}; the bad process is unknown"
    return Finding.bad(PAIRS, f"processes {ranks}", problem, value)
