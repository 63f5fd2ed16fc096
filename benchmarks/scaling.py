"""How training scales: processes of this machine, and hosts between which the network is slow.

Here: one process, two that know nothing of each other, and two that train together, each on a core
of its own; what two strangers reach is all that two can. Then 2, 4 and 8 hosts in network
namespaces, with links as they come and shaped (`hosts.py`), for several strategies. All share this
machine's cores, so a step's compute is slower than on hosts of their own: what a step takes longer
with slow links than with the same hosts' free ones is what the network costs, and only that is
compared, with what the formulas of `predicted` say of it.

    python benchmarks/scaling.py [--text FILE] [--hosts 2 4 8] [--megabits 1000 100] [--steps N]
                                 [--turns N] [--cases ddp …] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hosts import address, hosts, inside, obstacle
from language import made_of
from peers import arguments
from recording import keep
from text import prepared, source
from train_mlm import model

from regauge.accelerators.cpu import Cpu
from regauge.benchmarking.settings import BENCHMARK
from regauge.config import merge

WIDTH, LAYERS, VOCABULARY, LENGTH, ROWS, MICROBATCHES = 256, 4, 4096, 128, 16, 2
"""A model whose gradients take a second on 100 Mb/s."""
PORT = 29400
WARM_STEPS = 2
BYTES = {
    "ddp": 4 + 4,
    "zero1": 4 + 2,
    "fsdp": 4 + MICROBATCHES * (2 + 2),
    "hsdp": 4 + 4,
}
"""That a weight sends over a host's link in a step: its gradient is reduced in fp32, and then
gathered so, or the weight in bf16, by fsdp before both passes of each microbatch."""
OVERLAP = 0.9
"""Share of a step's compute that communication can hide behind."""
MEASURED = "median seconds of a step over turns"
FORMULAS = {
    "exposed": "seconds of a step with shaped links - with free ones, of the same hosts",
    "efficiency": "seconds of one host's step / (the same + exposed)",
    "communication": "t = bytes a weight x weights x (n-1) / (n x bytes/s of a link), n in a ring",
    "predicted": f"max(0, t - {OVERLAP} x seconds with free links) + t / layers",
}


class Case(NamedTuple):
    """A way to lie on hosts."""

    strategy: dict[str, Any]
    processes: int = 1
    """Of each host."""


CASES = {
    "ddp": Case({"kind": "ddp"}),
    "ddp, buckets of 1 MiB": Case({"kind": "ddp", "bucket_mib": 1}),
    "zero1": Case({"kind": "zero1"}),
    "fsdp": Case({"kind": "fsdp"}, 2),
    "hsdp": Case({"kind": "hsdp", "shards": 2}, 2),
}


def main() -> None:
    """Measure, and write what was found."""
    parser = arguments(__doc__, "scaling", turns=1, steps=10)
    parser.set_defaults(width=WIDTH, layers=LAYERS)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--megabits", type=float, nargs="+", default=[1000.0, 100.0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    own = parser.parse_args()
    precision = Cpu().precisions()[0]
    chip = Cpu().chip_peak(precision)
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        prepared(data, source(own.text), VOCABULARY, layout="packed", length=LENGTH)
        bench = Bench(Path(scratch), run(data, own), own)
        figures = {
            "precision": precision,
            "parameters": bench.parameters,
            "formulas": FORMULAS,
            "here": here(bench),
            "hosts": elsewhere(bench),
        }
    keep(own.json, "scaling over processes and hosts", chip, figures, "transformers")


def run(data: Path, own: argparse.Namespace) -> dict[str, Any]:
    """Return the tables of a run on one process."""
    return {
        "data": {"path": str(data)},
        "task": {"kind": "mlm"},
        "model": model(own.width, own.layers, LENGTH),
        "accelerator": "cpu",
        "batch": {"rows": ROWS, "microbatch_rows": ROWS // MICROBATCHES},
        "execution": {"compile": "off", "threads": 1},
        "optimizer": {"learning_rate": 1e-4},
        "evaluation": {"rows": ROWS},
        "stop": {"steps": own.steps},
        "benchmark": {"repeats": 1, "steps": own.steps, "warmup_steps": WARM_STEPS},
    }


class Bench:
    """Runs of one kind, each a command with a folder of its own."""

    def __init__(self, scratch: Path, tables: dict[str, Any], own: argparse.Namespace) -> None:
        self.own = own
        self._scratch = scratch
        self._tables = tables
        self._count = 0
        module = made_of(tables)
        self.parameters = sum(value.numel() for value in module.parameters())

    def command(self, processes: int, **tables: Any) -> tuple[list[str], Path]:
        """Return a command that measures a run, and where it will write what it found."""
        self._count += 1
        folder = self._scratch / f"run-{self._count}"
        own = {"output": {"folder": str(folder)}, "benchmark": {"processes": [processes]}}
        file = folder.with_suffix(".json")
        file.write_text(json.dumps(merge(self._tables, merge(tables, own))))
        command = [sys.executable, "-m", "regauge", "benchmark", str(file), "--training"]
        return command, folder / BENCHMARK

    def log(self) -> Path:
        """Return where the latest command says what it does."""
        return self._scratch / f"run-{self._count}.log"


def here(bench: Bench) -> dict[str, Any]:
    """Return sequences/s of one process, of two strangers together, and of two that are one run."""
    found: dict[str, list[float]] = {"alone": [], "strangers": [], "together": []}
    longer = {"benchmark": {"steps": 4 * bench.own.steps, "warmup_steps": bench.own.steps}}
    for _ in range(bench.own.turns):
        one, other, third = (bench.command(1, **longer) for _ in range(3))
        pair = bench.command(2, strategy={"kind": "ddp"}, **longer)
        found["alone"].append(_at_once(bench, one))
        found["strangers"].append(_at_once(bench, other, third))
        found["together"].append(_at_once(bench, pair))
    alone, strangers, both = (statistics.median(found[name]) for name in found)
    return {
        "sequences_per_second": found,
        "efficiency": round(both / (2 * alone), 3),
        "of_what_two_strangers_reach": round(both / strangers, 3),
    }


def elsewhere(bench: Bench) -> dict[str, Any]:
    """Return what slow links cost by case, number of hosts and rate."""
    if why := obstacle():
        return {"not_measured": why}
    rates = [None, *bench.own.megabits]
    taken: dict[tuple[str, int, float | None], list[float]] = {}
    for _ in range(bench.own.turns):
        for name, count, rate in product(bench.own.cases, (1, *bench.own.hosts), rates):
            if count > 1 or rate is None:
                key = name, count, rate
                taken.setdefault(key, []).append(_step_seconds(bench, *key))
                sys.stderr.write(f"{key}: {taken[key][-1]:.3f} s a step\n")
    rows = []
    for name, count, rate in product(bench.own.cases, bench.own.hosts, bench.own.megabits):
        alone, free, slow = (
            statistics.median(taken[name, number, links])
            for number, links in ((1, None), (count, None), (count, rate))
        )
        rows.append(
            {
                "case": name,
                "hosts": count,
                "megabits": rate,
                "seconds": {"one host": alone, "free links": free, "these links": slow},
                **compared(alone, slow - free, predicted(bench, CASES[name], (count, rate, free))),
            }
        )
    return {"measured": MEASURED, "rows": rows}


def predicted(bench: Bench, case: Case, links: tuple[int, float, float]) -> float:
    """Return the seconds that the network should cost a step, by the formulas of the planner."""
    count, megabits, compute = links
    ring = count * case.processes if case.strategy["kind"] == "fsdp" else count
    share = (ring - 1) / ring
    seconds = bench.parameters * BYTES[case.strategy["kind"]] * share / (megabits * 1e6 / 8)
    return max(0.0, seconds - OVERLAP * compute) + seconds / bench.own.layers


def compared(alone: float, exposed: float, expected: float) -> dict[str, Any]:
    """Return what the network cost beside what it should."""
    return {
        "exposed": round(exposed, 4),
        "predicted": round(expected, 4),
        "efficiency": round(alone / (alone + max(0.0, exposed)), 3),
        "predicted_efficiency": round(alone / (alone + expected), 3),
    }


def _step_seconds(bench: Bench, name: str, count: int, megabits: float | None) -> float:
    """Return the seconds of a step of a run on some hosts."""
    case = CASES[name]
    alone = {"kind": "fsdp" if case.processes > 1 else "single"}
    strategy = case.strategy if count > 1 else alone
    nodes = {"count": str(count), "rendezvous": "c10d", "endpoint": f"{address(0)}:{PORT}"}
    meeting = {"execution": {"nodes": nodes}} if count > 1 else {}
    command, answer = bench.command(case.processes, strategy=strategy, **meeting)
    with hosts(count, megabits) as names:
        _ran([inside(name, command) for name in names], bench.log())
    (row,) = json.loads(answer.read_text())["rows"]
    return float(row["seconds_per_step"])


def _at_once(bench: Bench, *wanted: tuple[list[str], Path]) -> float:
    """Run commands at the same time, and return the sequences/s of all together."""
    _ran([command for command, _ in wanted], bench.log())
    answers = [json.loads(answer.read_text()) for _, answer in wanted]
    return sum(float(row["sequences_per_second"]) for answer in answers for row in answer["rows"])


def _ran(commands: list[list[str]], log: Path) -> None:
    """Run commands at once; raises SystemExit where one fails, with what they said."""
    with log.open("w") as said:
        running = [
            subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) for command in commands
        ]
        codes = [each.wait() for each in running]
    if any(codes):
        raise SystemExit(f"{commands[0]} ended with {codes}:\n{log.read_text()}")


if __name__ == "__main__":
    main()
