"""Verdicts of `regauge compare` on equivalent variants of a run, and on injected bugs.

The baseline is the search of the quickstart (`runs/quickstart.toml`, stage `match`), from its
warmed-up weights. It uses dropout 0.1, one processor and fp32. A repeat with smaller microbatches
measures its noise. The variants are bf16, fsdp on two processes, torch.compile, and XLA if there is
an environment with torch_xla. Then six bugs are injected from step `--from-step` on, one per run.
The comparison must find the step, and its replay the part of the model.

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

from recording import RESULTS, write_result

from regauge import commands, config
from regauge.accelerators.cpu import Cpu
from regauge.commands._parts.localize import localize_divergence
from regauge.config import merge
from regauge.evaluation.compare.first_divergence import describe_divergence
from regauge.evaluation.compare.sentences import describe_parity
from regauge.evaluation.compare.verdict import Parity, compare_pair
from regauge.run_folders.run_folder import read_run_folder
from regauge.supervision.faults.faults import BUGS

QUICKSTART = Path(__file__).resolve().parents[1] / "runs" / "quickstart.toml"
SOURCE = QUICKSTART.parents[1] / "src"
VARIANTS: dict[str, dict[str, Any]] = {
    "repeat": {"batch": {"microbatch_rows": 32}},
    "bf16": {"execution": {"precision": "bf16"}},
    "fsdp on 2": {"strategy": "fsdp", "execution": {"processes": 2, "threads": 1}},
    "compiled": {"execution": {"compile": "blocks"}},
    "xla": {"accelerator": "xla"},
}
Tables = dict[str, Any]


def main() -> None:
    """Run and compare the variants, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--from-step", type=int, default=33, help="first step of a bug")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--xla", type=Path, help="Python of an environment with torch_xla")
    parser.add_argument("--json", type=Path, default=RESULTS / "parity.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        base = prepare_baseline(root, arguments.steps, arguments.seed)
        baseline = train_run(root / "baseline", base)
        figures = {
            "steps": arguments.steps,
            "seed": arguments.seed,
            "variants": compare_variants(root, base, baseline, arguments.xla),
            "injected_bugs": compare_bugs(root, base, baseline, arguments.from_step),
        }
    write_result(arguments.json, "verdicts of comparisons", Cpu().chip_peak("fp32"), figures)


def prepare_baseline(root: Path, steps: int, seed: int) -> Tables:
    """Prepare the quickstart's corpus, warm up its model, and return the tables of the search."""
    stages = {stage["name"]: stage for stage in tomllib.loads(QUICKSTART.read_text())["stage"]}
    run_verb(root, "prepare", "corpus", stages["corpus"])
    warm_up = stages["warm-up"] | {"data": {"path": str(root / "corpus" / "text")}, "seed": seed}
    run_verb(root, "train", "warm-up", warm_up)
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


def compare_variants(root: Path, base: Tables, baseline: Path, xla: Path | None) -> list[Tables]:
    """Return the verdict on each variant of the baseline."""
    repeat = train_run(root / "repeat", merge(base, VARIANTS["repeat"]))
    rows = []
    for name, changes in VARIANTS.items():
        if name == "xla" and xla is None:
            continue
        python = str(xla) if name == "xla" else sys.executable
        folder = root / name.replace(" ", "-")
        is_repeat = name == "repeat"
        variant = repeat if is_repeat else train_run(folder, merge(base, changes), python)
        parity = compare_pair(
            read_run_folder(baseline),
            read_run_folder(variant),
            () if is_repeat else (read_run_folder(repeat),),
        )
        rows.append(build_row(name, parity))
    return rows


def compare_bugs(root: Path, base: Tables, baseline: Path, step: int) -> list[Tables]:
    """Return the verdict on each injected bug, and the divergence that its replay localizes."""
    rows = []
    for kind in BUGS:
        plan = root / f"{kind}.plan.json"
        fault: Tables = {"kind": kind, "rank": -1, "step": step, "count": 10**6, "attempt": 0}
        fault |= {"at": "order"} if kind == "row-shift" else {}
        plan.write_text(json.dumps({"fault": [fault]}))
        run = train_run(root / kind, base, sys.executable, "--chaos", str(plan))
        parity = compare_pair(read_run_folder(baseline), read_run_folder(run))
        row = {"injected_from_step": step, **build_row(kind, parity)}
        if parity.first_divergence is not None:
            divergence = localize_divergence(
                (baseline, run), parity, root / f"compare-{kind}", float64=False
            )
            description = describe_divergence(divergence)
            row |= {"localized_step": divergence.step, "localized_divergence": description}
            sys.stderr.write(f"{description}\n")
        rows.append(row)
    return rows


def build_row(name: str, parity: Parity) -> Tables:
    """Return the figures and the sentences of a comparison."""
    metrics = {
        metric.name: {
            "max_difference": metric.worst_gap.difference,
            "step": metric.worst_gap.step,
            "noise": metric.noise[-1][1] if metric.noise else None,
        }
        for metric in parity.metrics
    }
    divergence = parity.first_divergence
    sentences = describe_parity(parity)
    sys.stderr.write(f"{name}: {' '.join(sentences)}\n")
    return {
        "name": name,
        "verdict": parity.verdict,
        "first_divergence_step": divergence.gap.step if divergence else None,
        "sentences": sentences,
        **metrics,
    }


def train_run(folder: Path, tables: Tables, python: str = sys.executable, *options: str) -> Path:
    """Train a run; return its folder."""
    run_verb(folder.parent, "train", folder.name, tables, python, *options)
    return folder


def run_verb(
    root: Path, verb: str, name: str, tables: Tables, python: str = sys.executable, *options: str
) -> None:
    """Run a verb with a run file of these tables; raises SystemExit if it fails."""
    settings = {key: value for key, value in tables.items() if key not in ("verb", "name")}
    file = root / f"{name}.run.json"
    output = config.apply_overrides({}, (f"{commands.import_verb(verb).OUTPUT}={root / name}",))
    file.write_text(json.dumps(merge(settings, output)))
    command = [python, "-m", "regauge", verb, str(file), *options]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}  # another Python has no regauge
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
    sys.stderr.write(f"{name}: done\n")


if __name__ == "__main__":
    main()
