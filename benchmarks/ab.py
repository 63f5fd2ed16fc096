"""Compares the speed of two commits by their defaults, on this machine.

Both sides alternate, and the order changes in each round. The base is checked out into a temporary
worktree. A workload that looks slower is measured again before its verdict.

    python benchmarks/ab.py BASE [--new COMMIT] [--only NAME ...] [--json FILE]

Exit codes: 0 if nothing is slower; 1 if a workload is more than 1.15 times as slow, and the range
of its rounds excludes equal times; 2 if a workload could not be measured; 3 if the base cannot run
at all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from ab_sides import CannotMeasureError, Side, open_side, run_git
from ab_verdicts import (
    BROKEN_BASE,
    LIMIT,
    UNKNOWN,
    Comparison,
    find_exit_code,
    format_table,
)
from ab_workloads import WORKLOADS, Inputs, Workload, write_inputs

MAX_DOUBT = 1.5
"""Largest number of rounds, as a multiple of those that prove a workload slower."""


def main() -> int:
    """Measure, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("base", help="commit to compare with")
    parser.add_argument("--new", metavar="COMMIT", help="default: the files as they are")
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="regauge-ab-") as scratch, ExitStack() as stack:
        sides = []
        for name, commit in (("base", options.base), ("new", options.new)):
            try:
                sides.append(stack.enter_context(open_side(name, commit, Path(scratch))))
            except CannotMeasureError as error:
                _log(f"the {name} side cannot run: {error}")
                return BROKEN_BASE if name == "base" else UNKNOWN
        inputs = write_inputs(Path(scratch))
        comparisons = [
            compare(workload, sides, inputs)
            for workload in WORKLOADS
            if workload.name in options.only
        ]
    seconds = time.monotonic() - began
    _log(f"load average {load:.1f} at the start, {os.getloadavg()[0]:.1f} now; {seconds:.0f} s")
    sys.stdout.write(format_table(comparisons) + "\n")
    code = find_exit_code(comparisons)
    if options.json:
        document = {
            "base": run_git("rev-parse", options.base),
            "new": run_git("rev-parse", options.new) if options.new else "files",
            "limit": LIMIT,
            "exit_code": code,
            "load_average": [load, os.getloadavg()[0]],
            "seconds": seconds,
            "workloads": [comparison.summarize() for comparison in comparisons],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return code


def compare(workload: Workload, sides: list[Side], inputs: Inputs) -> Comparison:
    """Measure a workload; start it again for more rounds while it looks slower.

    Each start chooses graphs and backends again, so a wrong choice of a busy machine is noticed.
    """
    began = time.monotonic()
    comparison = Comparison(workload.name, workload.unit, workload.min_rounds)
    is_doubtful = True
    try:
        while is_doubtful and len(comparison.rounds) < MAX_DOUBT * workload.min_rounds:
            for base, new in measure_rounds(workload, sides, inputs):
                comparison.rounds.append((base, new))
                _log(f"{workload.name}: base {base:.4g} s, new {new:.4g} s, {new / base:.2f}")
            is_doubtful = comparison.is_doubtful
    except CannotMeasureError as error:
        comparison.problem = str(error)
    _log(f"{workload.name}: {comparison.verdict} after {time.monotonic() - began:.0f} s")
    return comparison


def measure_rounds(
    workload: Workload, sides: list[Side], inputs: Inputs
) -> Iterator[tuple[float, float]]:
    """Start both sides, and yield the seconds of base and new for each round."""
    with ExitStack() as stack:
        programs = [stack.enter_context(closing(workload.start(side, inputs))) for side in sides]
        for program in programs:
            program.warm_up()
        for program in programs:
            program.pause()
        for index in range(workload.rounds):
            seconds = [0.0, 0.0]
            for position in (0, 1) if index % 2 == 0 else (1, 0):
                seconds[position] = programs[position].measure()
            yield seconds[0], seconds[1]


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
