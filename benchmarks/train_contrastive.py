"""Contrastive training speed of a text encoder, compared with sentence-transformers.

Both train the same encoder (a BERT of MiniLM's size: 6 layers of width 384) with the same initial
weights, pairs, batch, loss, optimizer and schedule. SentenceTransformerTrainer is measured in bf16,
in bf16 and compiled, and with its defaults (fp32). The pairs are summaries and bodies of the
documentation of this Python. With `--text` they are the first sentence and the rest of each text of
the file. The programs alternate: each trains some steps and is evaluated on the held-out pairs,
which is not timed.

    python benchmarks/train_contrastive.py [--text FILE] [--peers best compiled default]
                                           [--repeats N] [--steps N] [--json OUT]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from peers import Peer, build_parser, compare_programs, run_alternating
from recording import write_result
from text import build_pair_source, prepare_dataset

from regauge.accelerators.cpu import Cpu

WIDTH, LAYERS, VOCABULARY = 384, 6, 8192
MAX_SUMMARY_TOKENS, MAX_BODY_TOKENS = 24, 128
ROWS = 256
GOAL = 2.5
LABELS = {
    "best": "sentence-transformers (bf16)",
    "compiled": "sentence-transformers (bf16, compiled)",
    "default": "sentence-transformers (fp32)",
}
PEER = Peer(LABELS, "peer_sentences.py", {"best": GOAL, "compiled": GOAL}, slow_steps=None)
PACKAGES = ("transformers", "sentence-transformers", "accelerate", "datasets")


def main() -> None:
    """Measure, and write the results."""
    parser = build_parser(__doc__, "train_contrastive", repeats=11, steps=3)
    parser.set_defaults(width=WIDTH, layers=LAYERS)
    parser.add_argument("--peers", nargs="+", default=["best", "compiled", "default"])
    options = parser.parse_args()
    precision = Cpu().precisions()[0]
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        limits = {"summary": MAX_SUMMARY_TOKENS, "body": MAX_BODY_TOKENS}
        source = build_pair_source(options.text, Path(scratch))
        prepare_dataset(data, source, VOCABULARY, layout="fields", fields=limits)
        tables = build_tables(data, options.width, options.layers)
        programs = run_alternating(Path(scratch) / "programs", tables, PEER, options, "pairs")
    facts = {"precision": precision, "pairs_per_step": ROWS, **compare_programs(programs)}
    title = "contrastive learning compared with sentence-transformers"
    write_result(options.json, title, Cpu().chip_peak(precision), facts, *PACKAGES)


def build_tables(data: Path, width: int, layers: int) -> dict[str, Any]:
    """Return the tables of the run that all programs train."""
    return {
        "data": {"path": str(data)},
        "task": {
            "kind": "contrastive",
            "query": "summary",
            "document": "body",
            "symmetric": False,
        },
        "model": {
            "architecture": "bert",
            "config": {
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": width // 32,
                "intermediate_size": 4 * width,
                "max_position_embeddings": MAX_BODY_TOKENS,
            },
        },
        "accelerator": "cpu",
        "batch": {"rows": ROWS},
        "optimizer": {"learning_rate": 5e-4},
        "evaluation": {"rows": ROWS},
    }


if __name__ == "__main__":
    main()
