"""Common parts of the language model benchmarks: one model per row length, and its peers."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from peers import NUM_STEPS, Peer, build_parser, compare_programs, run_alternating
from recording import write_result
from text import build_source, prepare_dataset
from turns import Program

from regauge.accelerators import Accelerator, ChipPeak, Precision
from regauge.accelerators.cpu import Cpu
from regauge.config import build
from regauge.data import mixture
from regauge.evaluation.benchmark.settings import TrainingBenchmarkSettings
from regauge.models import multitask
from regauge.models.flops import FLOPS_FORMULA, flops_per_token
from regauge.models.modules import TextModule
from regauge.training.task_runtime import build_module

PACKAGES = ("transformers", "accelerate", "datasets")
FORMULA = f"real tokens/s x ({FLOPS_FORMULA}) / peak FLOP/s"
LABELS = {
    "best": "Trainer (best)",
    "default": "Trainer (default)",
    "minimal": "PyTorch loop (bf16, compiled)",
}


class Language(NamedTuple):
    """The configuration of a language model benchmark."""

    name: str
    task: str
    model: Callable[[int, int, int], dict[str, Any]]
    """Function from width, layers and length to the table of the model."""
    goals: dict[str, float]
    """Speedup that Regauge must reach over each style of Trainer."""
    lengths: list[int]
    dropouts: list[float]
    min_mfu: dict[tuple[int, float], float]
    """MFU that must be reached, by length and dropout."""
    width: int = 512
    layers: int = 8
    vocabulary: int = 16384
    tokens: int = 4096
    """Tokens of a step: 32 rows of 128, or 8 of 512."""
    microbatch_rows: int | None = None
    """Rows of a microbatch; None for the default of Regauge, and all rows of a step for Trainer."""

    def resize(self, options: argparse.Namespace) -> Language:
        """Return this configuration with the width and layers of the command line."""
        sizes = {"width": options.width, "layers": options.layers}
        return self._replace(**{name: value for name, value in sizes.items() if value})


def main(doc: str | None, title: str, language: Language, repeats: int = 21) -> None:
    """Measure every length and dropout on a CPU, and write the results."""
    parser = build_parser(doc, language.name, repeats=repeats, steps=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=language.lengths)
    parser.add_argument("--dropouts", type=float, nargs="+", default=language.dropouts)
    parser.add_argument("--peers", nargs="*", default=list(language.goals))
    parser.add_argument("--microbatch-rows", type=int, default=language.microbatch_rows)
    options = parser.parse_args()
    changes = {
        "lengths": options.lengths,
        "dropouts": options.dropouts,
        "microbatch_rows": options.microbatch_rows,
    }
    languages = [language.resize(options)._replace(**changes)]
    chip, facts = measure(options, languages, Cpu())
    write_result(options.json, title, chip, facts, *PACKAGES)


def measure(
    options: argparse.Namespace,
    languages: list[Language],
    accelerator: Accelerator,
    data: Path | None = None,
) -> tuple[ChipPeak, dict[str, Any]]:
    """Measure every length and dropout of languages; return the chip and the results.

    A single language of one length may keep its dataset in the folder `data`.
    """
    precision = accelerator.precisions()[0]
    chip, workloads = accelerator.chip_peak(precision), []
    for language, length in ((item, length) for item in languages for length in item.lengths):
        with tempfile.TemporaryDirectory() as scratch:
            tables = prepare_run(options, language, length, data or Path(scratch) / "data")
            tables["accelerator"] = accelerator.kind
            for dropout in language.dropouts:
                tables["model"]["dropout"] = dropout
                trainer = Peer(
                    LABELS, "peer_trainer.py", language.goals, rows=language.microbatch_rows
                )
                folder = Path(scratch) / f"{dropout}"
                programs = run_alternating(folder, tables, trainer, options)
                chip = find_faster_chip(chip, accelerator, precision)
                peak = chip.flops_per_second[precision]
                mfu = compute_mfu(programs[0], build_run_module(tables), length, peak)
                if goal := language.min_mfu.get((length, dropout)):
                    mfu |= {"goal": goal, "met": mfu["fraction"] >= goal}
                workload = {"name": language.name, "length": length, "dropout": dropout}
                workloads.append(workload | {"mfu": mfu, **compare_programs(programs)})
    facts = {"precision": precision, "mfu_formula": FORMULA, "peak_source": chip.source}
    return chip, facts | {"workloads": workloads}


def find_faster_chip(before: ChipPeak, accelerator: Accelerator, precision: Precision) -> ChipPeak:
    """Time the chip again and return the faster result: the machine's speed changes."""
    accelerator.clear_measurements()
    now = accelerator.chip_peak(precision)
    return max(before, now, key=lambda chip: chip.flops_per_second[precision])


def compute_mfu(program: Program, module: TextModule, length: int, peak: float) -> dict[str, Any]:
    """Return the MFU with the values that it is computed from."""
    flops = flops_per_token(module.model, length)
    rate = statistics.median(program.rates())
    return {"fraction": round(rate * flops / peak, 4), "flops_per_token": flops, "peak": peak}


def build_run_module(tables: dict[str, Any]) -> TextModule:
    """Return the module of a run, without its initial weights."""
    others = {"stop": {"steps": NUM_STEPS}, "output": {"folder": "none"}}
    settings = build(TrainingBenchmarkSettings, tables | others)
    (module,) = multitask.modules_by_task(
        build_module(settings, [mixture.open_data(settings.data).manifest])
    ).values()
    return module


def prepare_run(
    options: argparse.Namespace, language: Language, length: int, data: Path
) -> dict[str, Any]:
    """Prepare the text, and return the tables of the run that all programs train."""
    source = build_source(options.text)
    prepare_dataset(data, source, language.vocabulary, layout="packed", length=length)
    rows = language.tokens // length
    size = language.microbatch_rows
    sizes = {} if size is None else {"microbatch_rows": size}
    return {
        "data": {"path": str(data)},
        "task": {"kind": language.task},
        "model": language.model(language.width, language.layers, length),
        "accelerator": "cpu",
        "batch": {"rows": rows} | sizes,
        "optimizer": {"learning_rate": 3e-4},
        "evaluation": {"rows": 2 * rows},
    }
