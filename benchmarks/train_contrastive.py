"""How fast an encoder learns to find documents here, and by sentence-transformers.

The same encoder (a BERT of 6 layers of 384, as MiniLM is), first weights, pairs, batch, loss,
optimizer and schedule; SentenceTransformerTrainer at its best (bf16), compiled as well, and as it
is by default (fp32). The pairs are summaries and bodies of the documentation of this Python, or the
first sentence of each text of a file and the rest. Every program trains for some steps, is measured
on the held-out pairs, which is not timed, and waits for the others.

    python benchmarks/train_contrastive.py [--text FILE] [--peers best compiled default]
                                           [--turns N] [--steps N] [--json OUT]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from peers import Peer, arguments, compared, raced
from recording import keep
from text import pairs, prepared

from regauge.accelerators.cpu import Cpu

WIDTH, LAYERS, VOCABULARY = 384, 6, 8192
SUMMARY, BODY = 24, 128
"""The most tokens of each."""
ROWS, MICROBATCH_ROWS = 256, 16
GOAL = 2.0
PEER = Peer(
    "sentence-transformers", "peer_sentences.py", {"best": GOAL, "compiled": GOAL}, slow_steps=None
)
PACKAGES = ("transformers", "sentence-transformers", "accelerate", "datasets")


def main() -> None:
    """Measure, and write what was found."""
    parser = arguments(__doc__, "train_contrastive", turns=11, steps=3)
    parser.set_defaults(width=WIDTH, layers=LAYERS)
    parser.add_argument("--peers", nargs="+", default=["best", "compiled", "default"])
    own = parser.parse_args()
    precision = Cpu().precisions()[0]
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        limits = {"summary": SUMMARY, "body": BODY}
        prepared(data, pairs(own.text, Path(scratch)), VOCABULARY, layout="fields", fields=limits)
        tables = run(data, own.width, own.layers, own.turns * own.steps)
        programs = raced(Path(scratch) / "programs", tables, PEER, own, "pairs")
    facts = {"precision": precision, "pairs_per_step": ROWS, **compared(programs)}
    title = "contrastive learning beside sentence-transformers"
    keep(own.json, title, Cpu().chip_peak(precision), facts, *PACKAGES)


def run(data: Path, width: int, layers: int, steps: int) -> dict[str, Any]:
    """Return the tables of a run: what all programs do."""
    return {
        "data": {"path": str(data)},
        "task": {
            "kind": "contrastive",
            "query": "summary",
            "document": "body",
            "symmetric": False,
            "max_buckets": 5,
        },
        "model": {
            "architecture": "bert",
            "config": {
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": width // 32,
                "intermediate_size": 4 * width,
                "max_position_embeddings": BODY,
            },
        },
        "accelerator": "cpu",
        "execution": {"compile": "blocks"},
        "batch": {"rows": ROWS, "microbatch_rows": MICROBATCH_ROWS},
        "optimizer": {"learning_rate": 5e-4},
        "stop": {"steps": steps},
        "evaluation": {"rows": ROWS},
    }


if __name__ == "__main__":
    main()
