"""What the benchmarks of language models share: a model for each length of rows, by others too."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from peers import Peer, arguments, compared, raced
from recording import keep
from text import prepared, source
from turns import Program

from regauge.accelerators import Accelerator, ChipPeak, Precision
from regauge.accelerators.cpu import Cpu
from regauge.benchmarking.settings import TrainingBenchmarkSettings
from regauge.config import build
from regauge.data import mixture
from regauge.models import multitask
from regauge.models.flops import FLOPS_FORMULA, flops_per_token
from regauge.models.modules import TextModule
from regauge.training.objectives import build_module

PACKAGES = ("transformers", "accelerate", "datasets")
FORMULA = f"real tokens/s x ({FLOPS_FORMULA}) / peak FLOP/s"


class Language(NamedTuple):
    """A way to learn a language that is measured."""

    name: str
    task: str
    model: Callable[[int, int, int], dict[str, Any]]
    """From width, layers and length to the table of the model."""
    goals: dict[str, float]
    """How many times as fast it has to be, by the style of Trainer."""
    lengths: list[int]
    dropouts: list[float]
    least_mfu: dict[tuple[int, float], float]
    """Share of the peak that has to be reached, by length and dropout, where one has to."""
    width: int = 512
    layers: int = 8
    vocabulary: int = 16384
    tokens: int = 4096
    """Of a step: 32 rows of 128, or 8 of 512."""
    rows_at_once: int | None = None
    """Rows that are computed at a time; None for all of a step."""

    def sized(self, own: argparse.Namespace) -> Language:
        """Return this with the width and layers that the command line asks for."""
        asked = {"width": own.width, "layers": own.layers}
        return self._replace(**{name: value for name, value in asked.items() if value})


def main(doc: str | None, title: str, language: Language, turns: int = 21) -> None:
    """Measure every length and dropout on CPUs, and write what was found."""
    parser = arguments(doc, language.name, turns=turns, steps=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=language.lengths)
    parser.add_argument("--dropouts", type=float, nargs="+", default=language.dropouts)
    parser.add_argument("--peers", nargs="*", default=list(language.goals))
    parser.add_argument("--rows-at-once", type=int, default=language.rows_at_once)
    own = parser.parse_args()
    asked = {
        "lengths": own.lengths,
        "dropouts": own.dropouts,
        "rows_at_once": own.rows_at_once,
    }
    chip, facts = measured(own, [language.sized(own)._replace(**asked)], Cpu())
    keep(own.json, title, chip, facts, *PACKAGES)


def measured(
    own: argparse.Namespace, languages: list[Language], accelerator: Accelerator
) -> tuple[ChipPeak, dict[str, Any]]:
    """Measure every length and dropout of languages; return the chip, and what was found."""
    precision = accelerator.precisions()[0]
    chip, found = accelerator.chip_peak(precision), []
    for language, length in ((each, length) for each in languages for length in each.lengths):
        with tempfile.TemporaryDirectory() as scratch:
            tables = run(own, language, length, Path(scratch) / "data")
            tables["accelerator"] = accelerator.kind
            for dropout in language.dropouts:
                tables["model"]["dropout"] = dropout
                trainer = Peer(
                    "trainer", "peer_trainer.py", language.goals, rows=language.rows_at_once
                )
                programs = raced(Path(scratch) / f"{dropout}", tables, trainer, own)
                chip = faster_of(chip, accelerator, precision)
                share = mfu(programs[0], made_of(tables), length, chip.flops_per_second[precision])
                if goal := language.least_mfu.get((length, dropout)):
                    share |= {"goal": goal, "met": share["share"] >= goal}
                what = {"name": language.name, "length": length, "dropout": dropout}
                found.append(what | {"mfu": share, **compared(programs)})
    facts = {"precision": precision, "mfu_formula": FORMULA, "peak_source": chip.source}
    return chip, facts | {"measured": found}


def faster_of(before: ChipPeak, accelerator: Accelerator, precision: Precision) -> ChipPeak:
    """Return the chip as it was timed before or as it is now: the machine's speed changes."""
    accelerator.clear_measurements()
    now = accelerator.chip_peak(precision)
    return max(before, now, key=lambda chip: chip.flops_per_second[precision])


def mfu(program: Program, module: TextModule, length: int, peak: float) -> dict[str, Any]:
    """Return the achieved share of a peak, with what it is made of."""
    flops = flops_per_token(module.model, length)
    rate = statistics.median(program.rates())
    return {"share": round(rate * flops / peak, 4), "flops_per_token": flops, "peak": peak}


def made_of(tables: dict[str, Any]) -> TextModule:
    """Return the module of a run, without weights of its own."""
    settings = build(TrainingBenchmarkSettings, tables | {"output": {"folder": "none"}})
    (found,) = multitask.modules_by_task(
        build_module(settings, [mixture.open_data(settings.data).manifest])
    ).values()
    return found


def run(own: argparse.Namespace, language: Language, length: int, data: Path) -> dict[str, Any]:
    """Prepare the text, and return the tables of a run: what all programs do."""
    prepared(data, source(own.text), language.vocabulary, layout="packed", length=length)
    rows = language.tokens // length
    return {
        "data": {"path": str(data)},
        "task": {"kind": language.task},
        "model": language.model(language.width, language.layers, length),
        "accelerator": "cpu",
        "execution": {"compile": "blocks"},
        "batch": {"rows": rows, "microbatch_rows": language.rows_at_once or rows},
        "optimizer": {"learning_rate": 3e-4},  # warm-ups begin at another step in each program
        "stop": {"steps": own.turns * own.steps},
        "evaluation": {"rows": 2 * rows},
    }
