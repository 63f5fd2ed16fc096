"""The processes of an examination, started, watched, and killed at their limit; no torch here."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import jsonl, processes
from regauge.config import dump
from regauge.health.findings import PAIRS, Bandwidth, Finding

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator

PROBE = "regauge.health.probe"
REQUEST = "request.json"
START_SECONDS, CHECK_SECONDS, COMPILE_SECONDS = 60.0, 10.0, 120.0
"""Longest that processes may take to start, and for one check: more where it is compiled first."""
LATE_SECONDS = 5.0
"""How long the others may go on once one of them has left with an error."""
LOOK_SECONDS = 0.05
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
class Told:
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
    def read(cls, scratch: Path, rank: int) -> Told:
        """Read what a process has written; where it came to no end, that is a finding."""
        told = cls(rank)
        for line in jsonl.whole(found_by(scratch, rank)):
            if "begins" in line:
                told.doing, told.together = line["begins"], line["together"]
            elif "finding" in line:
                told.findings.append(replace(Finding(**line["finding"]), rank=rank))
            elif "bandwidth" in line:
                told.bandwidths.append(Bandwidth(**line["bandwidth"]))
            told.done = told.done or "done" in line
        if told.ok and not told.done:
            problem = "it did not come to its end"
            told.findings.append(Finding.bad(told.doing, f"process {rank}", problem, rank=rank))
        return told

    @property
    def ok(self) -> bool:
        """Whether it has found nothing bad."""
        return all(finding.ok for finding in self.findings)


def found_by(scratch: Path, rank: int) -> Path:
    """Return the file of what a process has found."""
    return scratch / f"found-{rank}.jsonl"


def pairs_of(scratch: Path, rank: int) -> Path:
    """Return the file of the pairs that a process was in."""
    return scratch / f"pairs-{rank}.jsonl"


def examine(
    accelerator: Accelerator,
    size: int,
    *,
    quick: bool = True,
    chaos: str | None = None,
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
        "chaos": chaos,
        "record": str(record) if record else None,
    }
    with tempfile.TemporaryDirectory(prefix="regauge-doctor-") as folder:
        scratch = Path(folder)
        limit = COMPILE_SECONDS if accelerator.lazy else CHECK_SECONDS
        _run(scratch, {**request, "what": "everything"}, size, devices, limit=limit)
        told = [Told.read(scratch, rank) for rank in range(size)]
        alone = [one for one in told if not one.ok and not one.together]
        if not alone and any(not one.ok for one in told) and size > 1:
            second = scratch / "pairs"
            second.mkdir()
            _run(second, {**request, "what": "pairs"}, size, devices, limit=limit)
            told[0].findings.append(blamed(*_pairs(second, size)))
    if alone:  # the others only waited for these
        told = [one if one in alone else _sound(one) for one in told]
    found = Examination(
        [finding for one in told for finding in one.findings],
        [row for one in told for row in one.bandwidths],
    )
    _compare_speeds(found.findings)
    return found


def _run(
    scratch: Path, request: dict[str, Any], size: int, devices: tuple[int, ...], *, limit: float
) -> None:
    """Start the processes, wait for their end, and kill those that do not come to it.

    A check may last for `limit` seconds in which no process writes anything.
    """
    (scratch / REQUEST).write_text(json.dumps(request))
    command = [sys.executable, "-m", PROBE, str(scratch)]
    until, written, over = time.monotonic() + START_SECONDS, 0, False
    seats = processes.Seats(size, processes.free_port(), devices=devices)
    with processes.started(command, size, scratch, quiet=True, seats=seats) as children:
        while time.monotonic() < until and any(child.poll() is None for child in children):
            files = [*scratch.glob("found-*"), *scratch.glob("pairs-*")]
            size_now = sum(file.stat().st_size for file in files)
            if size_now > written and len(files) == size and not over:
                until, written = time.monotonic() + limit, size_now
            if not over and any(child.poll() for child in children):
                over, until = True, min(until, time.monotonic() + LATE_SECONDS)
            time.sleep(LOOK_SECONDS)


def _sound(told: Told) -> Told:
    return replace(told, findings=[finding for finding in told.findings if finding.ok])


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


def _pairs(scratch: Path, size: int) -> tuple[Pairs, list[int]]:
    """Return what is wrong with each pair that was tried, and who came to no end of one."""
    found: Pairs = {}
    silent = []
    for rank in range(size):
        told = [line for line in jsonl.whole(pairs_of(scratch, rank)) if "partner" in line]
        for line in told:
            one, other = sorted((rank, line["partner"]))
            found[one, other] = found.get((one, other)) or line.get("problem", "")
        if told and "problem" not in told[-1]:
            silent.append(rank)
    return found, silent


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
