"""How fast a BERT learns a language here, and in transformers' Trainer.

The same model (8 layers of 512, 16,384 words), first weights, text, held-out rows, rows of a step,
optimizer and schedule; Trainer at its best (bf16, compiled, rows without padding) and as it is by
default (fp32, documents with padding). Every program trains for some steps, is measured on the
held-out rows, which is not timed, and waits for the others.

    python benchmarks/train_mlm.py [--text FILE] [--lengths 128 512] [--dropouts 0 0.1]
                                   [--turns N] [--steps N] [--json OUT]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from peers import BEST, DEFAULT, OURS, compared, ours, trainer
from recording import RESULTS, keep
from text import prepared, source
from turns import Program, alternate

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
GOALS = {BEST: 1.4, DEFAULT: 5.0}
"""How many times as fast it has to be."""


def main() -> None:
    """Measure every length and dropout, and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, help="by default the documentation of this Python")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--dropouts", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--turns", type=int, default=21, help="of each program; one is a warm-up")
    parser.add_argument("--steps", type=int, default=5, help="of each turn")
    parser.add_argument("--peers", nargs="+", default=["best", "default"])
    parser.add_argument("--json", type=Path, default=RESULTS / "train_mlm.json")
    own = parser.parse_args()
    chip = Cpu().chip("bf16")
    with tempfile.TemporaryDirectory() as scratch:
        found = []
        for length in own.lengths:
            data = Path(scratch) / f"data-{length}"
            prepared(data, source(own.text), VOCABULARY, layout="packed", length=length)
            for dropout in own.dropouts:
                folder = Path(scratch) / f"{length}-{dropout}"
                tables = run(data, length, dropout, own.turns * own.steps)
                programs = [
                    ours(folder / OURS, tables, own.steps),
                    *(trainer(folder / style, tables, style, own.steps) for style in own.peers),
                ]
                alternate(programs, own.turns)
                figures = compared(programs, GOALS)
                share = mfu(programs[0], tables, chip.flops_per_second["bf16"])
                found.append({"length": length, "dropout": dropout, "mfu": share, **figures})
    facts = {"mfu_formula": FORMULA, "peak_source": chip.source, "measured": found}
    keep(own.json, "masked language modelling beside Trainer", chip, facts, *PACKAGES)


def mfu(program: Program, tables: dict[str, Any], peak: float) -> dict[str, Any]:
    """Return the achieved share of a peak, with what it is made of."""
    settings = build(Training, tables | {"output": {"folder": "none"}})
    manifest = mixing.opened(settings.data).manifest
    (part,) = several.parts(made(settings, [manifest])).values()
    flops = flops_per_token(part.model, settings.task.ladder(manifest)[-1])
    rate = statistics.median(program.rates())
    return {"share": round(rate * flops / peak, 4), "flops_per_token": flops, "peak": peak}


def run(data: Path, length: int, dropout: float, steps: int) -> dict[str, Any]:
    """Return the tables of a run: what all programs do."""
    return {
        "data": {"path": str(data)},
        "task": {"kind": "mlm"},
        "model": {
            "architecture": "bert",
            "dropout": dropout,
            "config": {
                "hidden_size": WIDTH,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": WIDTH // 64,
                "intermediate_size": 4 * WIDTH,
                "max_position_embeddings": length,
            },
        },
        "accelerator": "cpu",
        "execution": {"compile": "blocks"},
        "batch": {"rows": TOKENS // length, "microbatch_rows": TOKENS // length},
        "optimizer": {"learning_rate": 3e-4},  # warm-ups begin at another step in each program
        "stop": {"steps": steps},
        "evaluation": {"rows": 2 * TOKENS // length},
    }


if __name__ == "__main__":
    main()
