"""What a comparison says of ways to compute one run, and of mistakes that it must find.

The search of the quickstart (`runs/quickstart.toml`, stage `match`) from its warmed-up weights,
with dropout of 0.1 and on one processor in fp32, is the first run. It is repeated with smaller
microbatches, which is its noise. Beside it stand bf16, fsdp on two processes, torch.compile, and
XLA where an environment with torch_xla is given. Then six mistakes are injected, one at a time and
from step `--from` on; the comparison must tell the step, and its replay the place.

    python benchmarks/parity.py [--steps 100] [--seed 1] [--xla PYTHON] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from recording import RESULTS, keep

from regauge import config, verbs
from regauge.accelerators.cpu import Cpu
from regauge.comparison.first_divergence import describe_divergence
from regauge.comparison.sentences import describe_parity
from regauge.comparison.verdict import Parity, compare_pair
from regauge.config import merge
from regauge.results.run_folder import read_run_folder
from regauge.testing.faults import BUGS
from regauge.verbs._localize import localize_divergence

QUICKSTART = Path(__file__).resolve().parents[1] / "runs" / "quickstart.toml"
SOURCE = QUICKSTART.parents[1] / "src"
WAYS: dict[str, dict[str, Any]] = {
    "again": {"batch": {"microbatch_rows": 32}},
    "bf16": {"execution": {"precision": "bf16"}},
    "fsdp on 2": {"strategy": "fsdp", "execution": {"processes": 2, "threads": 1}},
    "compiled": {"execution": {"compile": "blocks"}},
    "xla": {"accelerator": "xla"},
}
Tables = dict[str, Any]


def main() -> None:
    """Run, compare, and keep the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--from", dest="first", type=int, default=33)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--xla", type=Path, help="Python of an environment with torch_xla")
    parser.add_argument("--json", type=Path, default=RESULTS / "parity.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        base = prepared(root, arguments.steps, arguments.seed)
        first = trained(root / "first", base)
        figures = {
            "steps": arguments.steps,
            "seed": arguments.seed,
            "beside": beside(root, base, first, arguments.xla),
            "mistakes": mistakes(root, base, first, arguments.first),
        }
    keep(arguments.json, "verdicts of comparisons", Cpu().chip_peak("fp32"), figures)


def prepared(root: Path, steps: int, seed: int) -> Tables:
    """Prepare the quickstart's corpus, warm its model up, and return the settings of the search."""
    stages = {stage["name"]: stage for stage in tomllib.loads(QUICKSTART.read_text())["stage"]}
    run(root, "prepare", "corpus", stages["corpus"])
    warm_up = stages["warm-up"] | {"data": {"path": str(root / "corpus" / "text")}, "seed": seed}
    run(root, "train", "warm-up", warm_up)
    return merge(
        stages["match"],
        {
            "data": {"path": str(root / "corpus" / "pairs")},
            "model": {"path": str(root / "warm-up" / "model"), "dropout": 0.1},
            "seed": seed,
            "accelerator": "cpu",
            "execution": {"precision": "fp32", "processes": 1, "threads": 2},
            "stop": {"steps": steps},
            "evaluation": {"every_steps": max(1, steps // 5)},
            "output": {"log_every_steps": 1, "checkpoint": {"every_steps": 10, "keep_last": steps}},
        },
    )


def beside(root: Path, base: Tables, first: Path, xla: Path | None) -> list[Tables]:
    """Return the verdict on each way to compute the same run."""
    noise = trained(root / "again", merge(base, WAYS["again"]))
    table = []
    for name, changes in WAYS.items():
        if name == "xla" and xla is None:
            continue
        python = str(xla) if name == "xla" else sys.executable
        folder = root / name.replace(" ", "-")
        other = noise if name == "again" else trained(folder, merge(base, changes), python)
        found = compare_pair(
            read_run_folder(first),
            read_run_folder(other),
            () if name == "again" else (read_run_folder(noise),),
        )
        table.append(row(name, found))
    return table


def mistakes(root: Path, base: Tables, first: Path, step: int) -> list[Tables]:
    """Return for each injected mistake where it was seen, and what its replay names."""
    table = []
    for kind in BUGS:
        plan = root / f"{kind}.plan.json"
        fault = {"kind": kind, "rank": -1, "step": step, "count": 10**6, "attempt": 0}
        fault |= {"at": "order"} if kind == "row-shift" else {}
        plan.write_text(json.dumps({"fault": [fault]}))
        other = trained(root / kind, base, sys.executable, "--chaos", str(plan))
        found = compare_pair(read_run_folder(first), read_run_folder(other))
        told = {"injected_from_step": step, **row(kind, found)}
        if found.first_divergence is not None:
            where = localize_divergence(
                (first, other), found, root / f"beside-{kind}", float64=False
            )
            named = describe_divergence(where)
            told |= {"step": where.step, "named": named}
            sys.stderr.write(f"{named}\n")
        table.append(told)
    return table


def row(name: str, found: Parity) -> Tables:
    """Return what a comparison says, in figures and in words."""
    metrics = {
        metric.name: {
            "apart": metric.worst_gap.difference,
            "at_step": metric.worst_gap.step,
            "noise": metric.noise[-1][1] if metric.noise else None,
        }
        for metric in found.metrics
    }
    parted = found.first_divergence.gap.step if found.first_divergence else None
    said = describe_parity(found)
    sys.stderr.write(f"{name}: {' '.join(said)}\n")
    return {"name": name, "verdict": found.verdict, "parted": parted, "said": said} | metrics


def trained(folder: Path, tables: Tables, python: str = sys.executable, *options: str) -> Path:
    """Train a run; return its folder."""
    run(folder.parent, "train", folder.name, tables, python, *options)
    return folder


def run(
    root: Path, verb: str, name: str, tables: Tables, python: str = sys.executable, *options: str
) -> None:
    """Run a verb on some tables; a failure ends the benchmark."""
    own = {key: value for key, value in tables.items() if key not in ("verb", "name")}
    file = root / f"{name}.run.json"
    place = config.apply_overrides({}, (f"{verbs.import_verb(verb).OUTPUT}={root / name}",))
    file.write_text(json.dumps(merge(own, place)))
    command = [python, "-m", "regauge", verb, str(file), *options]
    own = {**os.environ, "PYTHONPATH": str(SOURCE)}  # another Python has no regauge installed
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    sys.stderr.write(f"{name}: done\n")


if __name__ == "__main__":
    main()
