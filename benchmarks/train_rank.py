"""How fast a ranker learns here, and in a plain loop as an engineer writes it.

The same module (a text encoder, and DCN-v2 over its vectors and the features of candidates), first
weights, rows, loss, optimizer and schedule; the loop has torch's DataLoader, pads texts to the
longest of the batch and computes in bf16, compiled as well, or in fp32. The rows are queries of
the documentation of this Python with the candidates that they are shown, or the first sentence of
each text of a file with the rest of its own and of other texts. Every program trains for some
steps, is measured on the held-out rows, which is not timed, and waits for the others.

    python benchmarks/train_rank.py [--text FILE] [--peers best compiled default]
                                    [--turns N] [--steps N] [--json OUT]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from peers import Peer, arguments, compared, raced
from recording import keep
from text import CANDIDATES, Search, prepared, search

from regauge.accelerators.cpu import Cpu

WIDTH, LAYERS, VOCABULARY = 256, 2, 8192
QUERY, DOCUMENT = 24, 64
"""The most tokens of each."""
ROWS, MICROBATCH_ROWS = 64, 16
GOAL = 2.0
PEER = Peer(
    "plain loop", "peer_loop.py", {"best": GOAL, "compiled": GOAL, "default": GOAL}, slow_steps=None
)
PACKAGES = ("transformers",)


def main() -> None:
    """Measure, and write what was found."""
    parser = arguments(__doc__, "train_rank", turns=11, steps=5)
    parser.set_defaults(width=WIDTH, layers=LAYERS)
    parser.add_argument("--peers", nargs="+", default=list(PEER.goals))
    own = parser.parse_args()
    precision = Cpu().precisions()[0]
    with tempfile.TemporaryDirectory() as scratch:
        found = search(own.text, Path(scratch))
        data = prepared(Path(scratch) / "data", found.source, VOCABULARY, **layout(found))
        tables = run(data, found, own.width, own.layers) | {
            "stop": {"steps": own.turns * own.steps}
        }
        programs = raced(Path(scratch) / "programs", tables, PEER, own, "rows")
    facts = {"precision": precision, "rows_per_step": ROWS, "candidates": CANDIDATES}
    title = "ranking beside a plain loop"
    keep(own.json, title, Cpu().chip_peak(precision), facts | compared(programs), *PACKAGES)


def layout(found: Search) -> dict[str, Any]:
    """Return the table of rows: a query, and the texts and features of its candidates."""
    return {
        "layout": "groups",
        "group_by": "query",
        "shared": ("query",),
        "max_group_size": CANDIDATES,
        "fields": {"query": QUERY, "document": DOCUMENT},
        "integers": ("label",),
        "floats": found.reals,
        "categories": found.categories,
    }


def run(data: Path, found: Search, width: int, layers: int) -> dict[str, Any]:
    """Return the tables of a run: what all programs do."""
    return {
        "data": {"path": str(data)},
        "task": {
            "kind": "rank",
            "numeric_features": found.reals,
            "categorical_features": found.categories,
            "max_buckets": 2,
        },
        "model": {
            "architecture": "bert",
            "config": {
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": width // 64,
                "intermediate_size": 4 * width,
                "max_position_embeddings": DOCUMENT,
            },
        },
        "accelerator": "cpu",
        "execution": {"compile": "blocks"},
        "batch": {"rows": ROWS, "microbatch_rows": MICROBATCH_ROWS},
        "optimizer": {"learning_rate": 3e-4, "epsilon": 1e-6},
        "evaluation": {"rows": 4 * ROWS},
    }


if __name__ == "__main__":
    main()
