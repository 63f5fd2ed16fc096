"""What the benchmarks of language models share: a model for each length of rows, by Trainer too."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from peers import Peer, arguments, compared, raced
from recording import keep
from text import prepared, source
from turns import Program

from regauge.accelerators import Chip, Precision
from regauge.accelerators.cpu import Cpu
from regauge.config import build
from regauge.data import mixing
from regauge.models import several
from regauge.models.counting import FLOPS, flops_per_token
from regauge.training.objectives import made
from regauge.training.settings import Training

TOKENS = 4096
"""Of a step: 32 rows of 128, or 8 of 512."""
WIDTH, LAYERS, VOCABULARY = 512, 8, 16384
PACKAGES = ("transformers", "accelerate", "datasets")
FORMULA = f"real tokens/s x ({FLOPS}) / peak FLOP/s"


class Language(NamedTuple):
    """A way to learn a language that is measured."""

    name: str
    """That of its results."""
    title: str
    task: str
    goals: dict[str, float]
    """How many times as fast it has to be, by the style of Trainer."""
    lengths: list[int]
    dropouts: list[float]
    model: Callable[[int, int, int], dict[str, Any]]
    """From width, layers and length to the table of the model."""


def main(doc: str | None, language: Language) -> None:
    """Measure every length and dropout, and write what was found."""
    parser = arguments(doc, language.name, turns=21, steps=5)
    parser.set_defaults(width=WIDTH, layers=LAYERS)
    parser.add_argument("--lengths", type=int, nargs="+", default=language.lengths)
    parser.add_argument("--dropouts", type=float, nargs="+", default=language.dropouts)
    parser.add_argument("--peers", nargs="*", default=["best", "default"])
    parser.add_argument("--microbatch-rows", type=int, help="by default all rows of a step")
    own = parser.parse_args()
    trainer = Peer("trainer", "peer_trainer.py", language.goals)
    precision = Cpu().precisions()[0]
    chip = Cpu().chip(precision)
    with tempfile.TemporaryDirectory() as scratch:
        found = []
        for length in own.lengths:
            data = Path(scratch) / f"data-{length}"
            prepared(data, source(own.text), VOCABULARY, layout="packed", length=length)
            for dropout in own.dropouts:
                folder = Path(scratch) / f"{length}-{dropout}"
                model = language.model(own.width, own.layers, length) | {"dropout": dropout}
                tables = run(data, language.task, model, length, own.turns * own.steps)
                if own.microbatch_rows:
                    tables["batch"]["microbatch_rows"] = own.microbatch_rows
                programs = raced(folder, tables, trainer, own)
                chip = faster_of(chip, precision)
                share = mfu(programs[0], tables, chip.flops_per_second[precision])
                figures = {"mfu": share, **compared(programs)}
                found.append({"length": length, "dropout": dropout, **figures})
    facts = {"precision": precision, "mfu_formula": FORMULA, "peak_source": chip.source}
    keep(own.json, language.title, chip, facts | {"measured": found}, *PACKAGES)


def faster_of(before: Chip, precision: Precision) -> Chip:
    """Return the chip as it was timed before or as it is now: the machine's speed changes."""
    cpu = Cpu()
    cpu.measure_again()
    now = cpu.chip(precision)
    return max(before, now, key=lambda chip: chip.flops_per_second[precision])


def mfu(program: Program, tables: dict[str, Any], peak: float) -> dict[str, Any]:
    """Return the achieved share of a peak, with what it is made of."""
    settings = build(Training, tables | {"output": {"folder": "none"}})
    manifest = mixing.opened(settings.data).manifest
    (part,) = several.parts(made(settings, [manifest])).values()
    flops = flops_per_token(part.model, settings.task.ladder(manifest)[-1])
    rate = statistics.median(program.rates())
    return {"share": round(rate * flops / peak, 4), "flops_per_token": flops, "peak": peak}


def run(data: Path, task: str, model: dict[str, Any], length: int, steps: int) -> dict[str, Any]:
    """Return the tables of a run: what all programs do."""
    return {
        "data": {"path": str(data)},
        "task": {"kind": task},
        "model": model,
        "accelerator": "cpu",
        "execution": {"compile": "blocks"},
        "batch": {"rows": TOKENS // length, "microbatch_rows": TOKENS // length},
        "optimizer": {"learning_rate": 3e-4},  # warm-ups begin at another step in each program
        "stop": {"steps": steps},
        "evaluation": {"rows": 2 * TOKENS // length},
    }
