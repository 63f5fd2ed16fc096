"""Scaling efficiency over processes of this machine, and over emulated hosts with slow links.

Processes: one process, two independent processes, and two that train together, one core each. The
throughput of the independent processes is the upper bound for two.

Hosts: 2, 4 and 8 hosts in network namespaces (`hosts.py`), with and without a rate limit of their
links, for several strategies. All hosts share the cores of this machine, so their compute is slower
than on separate machines. Only the additional seconds with limited links are compared with the
formulas (`predict_exposed_seconds`).

    python benchmarks/scaling.py [--text FILE] [--hosts 2 4 8] [--megabits 1000 100] [--steps N]
                                 [--repeats N] [--cases ddp …] [--json OUT]
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

from hosts import build_host_command, create_hosts, find_obstacle, host_address
from language import build_run_module
from peers import build_parser
from recording import write_result
from text import build_source, prepare_dataset
from train_mlm import build_model

from regauge.accelerators.cpu import Cpu
from regauge.config import merge
from regauge.config.output_files import BENCHMARK

WIDTH, LAYERS, VOCABULARY, LENGTH, ROWS, MICROBATCHES = 256, 4, 4096, 128, 16, 2
"""Sizes of a model whose gradients need a second at 100 Mb/s."""
PORT = 29400
WARMUP_STEPS = 2
BYTES_PER_WEIGHT = {
    "ddp": 4 + 4,
    "zero1": 4 + 2,
    "fsdp": 4 + MICROBATCHES * (2 + 2),
    "hsdp": 4 + 4,
}
"""Bytes per weight over a host's link in a step.

The gradient is reduced in fp32. Then it is gathered in fp32, or the weight in bf16; fsdp gathers
before both passes of each microbatch."""
OVERLAP = 0.9
"""Share of a step's compute that communication can hide behind."""
STATISTIC = "median seconds of a step over repeats"
FORMULAS = {
    "exposed_seconds": "seconds of a step with limited links - with unlimited links, same hosts",
    "efficiency": "seconds of one host's step / (the same + exposed_seconds)",
    "communication": "t = bytes a weight x weights x (n-1) / (n x bytes/s of a link), n in a ring",
    "predicted_exposed_seconds": f"max(0, t - {OVERLAP} x seconds, unlimited) + t / layers",
}


class Case(NamedTuple):
    """A strategy and the processes of each host."""

    strategy: dict[str, Any]
    processes: int = 1


CASES = {
    "ddp": Case({"kind": "ddp"}),
    "ddp, buckets of 1 MiB": Case({"kind": "ddp", "bucket_mib": 1}),
    "zero1": Case({"kind": "zero1"}),
    "fsdp": Case({"kind": "fsdp"}, 2),
    "hsdp": Case({"kind": "hsdp", "shards": 2}, 2),
}


def main() -> None:
    """Measure, and write the results."""
    parser = build_parser(__doc__, "scaling", repeats=1, steps=10)
    parser.set_defaults(width=WIDTH, layers=LAYERS)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--megabits", type=float, nargs="+", default=[1000.0, 100.0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    precision = Cpu().precisions()[0]
    chip = Cpu().chip_peak(precision)
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        source = build_source(options.text)
        prepare_dataset(data, source, VOCABULARY, layout="packed", length=LENGTH)
        bench = Bench(Path(scratch), build_tables(data, options), options)
        figures = {
            "precision": precision,
            "parameters": bench.parameters,
            "formulas": FORMULAS,
            "processes": measure_processes(bench),
            "hosts": measure_hosts(bench),
        }
    write_result(options.json, "scaling over processes and hosts", chip, figures, "transformers")


def build_tables(data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the tables of a run on one process."""
    return {
        "data": {"path": str(data)},
        "task": {"kind": "mlm"},
        "model": build_model(options.width, options.layers, LENGTH),
        "accelerator": "cpu",
        "batch": {"rows": ROWS, "microbatch_rows": ROWS // MICROBATCHES},
        "execution": {"compile": "off", "threads": 1},
        "optimizer": {"learning_rate": 1e-4},
        "evaluation": {"rows": ROWS},
        "stop": {"steps": options.steps},
        "benchmark": {"repeats": 1, "steps": options.steps, "warmup_steps": WARMUP_STEPS},
    }


class Bench:
    """Commands that measure variants of one run, each with a separate folder."""

    def __init__(self, scratch: Path, tables: dict[str, Any], options: argparse.Namespace) -> None:
        self.options = options
        self._scratch = scratch
        self._tables = tables
        self._count = 0
        module = build_run_module(tables)
        self.parameters = sum(value.numel() for value in module.parameters())

    def build_command(self, processes: int, **tables: Any) -> tuple[list[str], Path]:
        """Return a command that measures a run, and the path of its result."""
        self._count += 1
        folder = self._scratch / f"run-{self._count}"
        changes = {"output": {"folder": str(folder)}, "benchmark": {"processes": [processes]}}
        file = folder.with_suffix(".json")
        file.write_text(json.dumps(merge(self._tables, merge(tables, changes))))
        command = [sys.executable, "-m", "regauge", "benchmark", str(file), "--training"]
        return command, folder / BENCHMARK

    def log_path(self) -> Path:
        """Return the path of the latest command's log."""
        return self._scratch / f"run-{self._count}.log"


def measure_processes(bench: Bench) -> dict[str, Any]:
    """Return sequences/s of one process, of two independent processes, and of two in one run."""
    rates: dict[str, list[float]] = {
        "one_process": [],
        "two_independent_processes": [],
        "two_process_ddp": [],
    }
    longer = {"benchmark": {"steps": 4 * bench.options.steps, "warmup_steps": bench.options.steps}}
    for _ in range(bench.options.repeats):
        first, second, third = (bench.build_command(1, **longer) for _ in range(3))
        pair = bench.build_command(2, strategy={"kind": "ddp"}, **longer)
        rates["one_process"].append(_measure_concurrently(bench, first))
        rates["two_independent_processes"].append(_measure_concurrently(bench, second, third))
        rates["two_process_ddp"].append(_measure_concurrently(bench, pair))
    one, independent, ddp = (statistics.median(values) for values in rates.values())
    return {
        "sequences_per_second": rates,
        "efficiency": round(ddp / (2 * one), 3),
        "relative_to_independent_processes": round(ddp / independent, 3),
    }


def measure_hosts(bench: Bench) -> dict[str, Any]:
    """Return the cost of slow links by case, number of hosts and rate."""
    if obstacle := find_obstacle():
        return {"not_measured": obstacle}
    rates = [None, *bench.options.megabits]
    seconds: dict[tuple[str, int, float | None], list[float]] = {}
    for _ in range(bench.options.repeats):
        for name, count, rate in product(bench.options.cases, (1, *bench.options.hosts), rates):
            if count > 1 or rate is None:
                key = name, count, rate
                step_seconds = _measure_step_seconds(bench, *key)
                seconds.setdefault(key, []).append(step_seconds)
                sys.stderr.write(f"{key}: {step_seconds:.3f} s per step\n")
    rows = []
    for name, count, rate in product(
        bench.options.cases, bench.options.hosts, bench.options.megabits
    ):
        one_host, unlimited, limited = (
            statistics.median(seconds[name, number, links])
            for number, links in ((1, None), (count, None), (count, rate))
        )
        predicted = predict_exposed_seconds(bench, CASES[name], (count, rate, unlimited))
        rows.append(
            {
                "case": name,
                "hosts": count,
                "megabits": rate,
                "seconds": {
                    "one_host": one_host,
                    "unlimited_links": unlimited,
                    "limited_links": limited,
                },
                **compare_exposed_seconds(one_host, limited - unlimited, predicted),
            }
        )
    return {"statistic": STATISTIC, "rows": rows}


def predict_exposed_seconds(bench: Bench, case: Case, links: tuple[int, float, float]) -> float:
    """Return the predicted cost of the network per step, by the formulas of the planner.

    `links` has the number of hosts, the rate in Mb/s and the seconds with unlimited links.
    """
    count, megabits, compute = links
    ring = count * case.processes if case.strategy["kind"] == "fsdp" else count
    share = (ring - 1) / ring
    seconds = (
        bench.parameters * BYTES_PER_WEIGHT[case.strategy["kind"]] * share / (megabits * 1e6 / 8)
    )
    return max(0.0, seconds - OVERLAP * compute) + seconds / bench.options.layers


def compare_exposed_seconds(one_host: float, exposed: float, predicted: float) -> dict[str, Any]:
    """Return the measured and the predicted cost of the network per step."""
    return {
        "exposed_seconds": round(exposed, 4),
        "predicted_exposed_seconds": round(predicted, 4),
        "efficiency": round(one_host / (one_host + max(0.0, exposed)), 3),
        "predicted_efficiency": round(one_host / (one_host + predicted), 3),
    }


def _measure_step_seconds(bench: Bench, name: str, count: int, megabits: float | None) -> float:
    """Return the seconds per step of a run on `count` hosts."""
    case = CASES[name]
    one_host = {"kind": "fsdp" if case.processes > 1 else "single"}
    strategy = case.strategy if count > 1 else one_host
    nodes = {"count": str(count), "rendezvous": "c10d", "endpoint": f"{host_address(0)}:{PORT}"}
    execution = {"execution": {"nodes": nodes}} if count > 1 else {}
    command, result = bench.build_command(case.processes, strategy=strategy, **execution)
    with create_hosts(count, megabits) as names:
        _run_concurrently([build_host_command(name, command) for name in names], bench.log_path())
    (row,) = json.loads(result.read_text())["rows"]
    return float(row["seconds_per_step"])


def _measure_concurrently(bench: Bench, *commands: tuple[list[str], Path]) -> float:
    """Run commands at the same time, and return the sum of their sequences/s."""
    _run_concurrently([command for command, _ in commands], bench.log_path())
    results = [json.loads(path.read_text()) for _, path in commands]
    return sum(float(row["sequences_per_second"]) for result in results for row in result["rows"])


def _run_concurrently(commands: list[list[str]], log_path: Path) -> None:
    """Run commands at the same time; raises SystemExit with their log if one fails."""
    with log_path.open("w") as log:
        processes = [
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) for command in commands
        ]
        codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{commands[0]} exited with {codes}:\n{log_path.read_text()}")


if __name__ == "__main__":
    main()
