"""Training speed of a ranking model, compared with a plain PyTorch loop.

Both train the same module: a text encoder, and DCN-v2 over its vectors and the features of
candidates. Initial weights, rows, loss, optimizer and schedule are equal. The loop uses torch's
DataLoader and pads texts to the longest of the batch. It is measured in bf16, in bf16 and compiled,
and in fp32. The rows are queries of the documentation of this Python with their candidates. With
`--text` the queries are first sentences, and the candidates are the rests of texts. The programs
alternate: each trains some steps and is evaluated on the held-out rows, which is not timed.

    python benchmarks/train_rank.py [--text FILE] [--peers best compiled default]
                                    [--repeats N] [--steps N] [--json OUT]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from peers import Peer, build_parser, compare_programs, run_alternating
from recording import write_result
from text import NUM_CANDIDATES, Search, build_search_source, prepare_dataset

from regauge.accelerators.cpu import Cpu

WIDTH, LAYERS, VOCABULARY = 256, 2, 8192
MAX_QUERY_TOKENS, MAX_DOCUMENT_TOKENS = 24, 64
ROWS = 64
GOALS = {"best": 1.8, "compiled": 1.6, "default": 1.8}
LABELS = {
    "best": "PyTorch loop (bf16)",
    "compiled": "PyTorch loop (bf16, compiled)",
    "default": "PyTorch loop (default)",
}
PEER = Peer(LABELS, "peer_loop.py", GOALS, slow_steps=None)
PACKAGES = ("transformers",)


def main() -> None:
    """Measure, and write the results."""
    parser = build_parser(__doc__, "train_rank", repeats=11, steps=5)
    parser.set_defaults(width=WIDTH, layers=LAYERS)
    parser.add_argument("--peers", nargs="+", default=list(PEER.goals))
    options = parser.parse_args()
    precision = Cpu().precisions()[0]
    with tempfile.TemporaryDirectory() as scratch:
        search = build_search_source(options.text, Path(scratch))
        layout = build_layout(search)
        data = prepare_dataset(Path(scratch) / "data", search.source, VOCABULARY, **layout)
        tables = build_tables(data, search, options.width, options.layers)
        programs = run_alternating(Path(scratch) / "programs", tables, PEER, options, "rows")
    facts = {"precision": precision, "rows_per_step": ROWS, "candidates": NUM_CANDIDATES}
    facts |= compare_programs(programs)
    title = "ranking compared with a plain loop"
    write_result(options.json, title, Cpu().chip_peak(precision), facts, *PACKAGES)


def build_layout(search: Search) -> dict[str, Any]:
    """Return the table of rows: a query, and the texts and features of its candidates."""
    return {
        "layout": "groups",
        "group_by": "query",
        "shared": ("query",),
        "max_group_size": NUM_CANDIDATES,
        "fields": {"query": MAX_QUERY_TOKENS, "document": MAX_DOCUMENT_TOKENS},
        "integers": ("label",),
        "floats": search.numeric_features,
        "categories": search.categorical_features,
    }


def build_tables(data: Path, search: Search, width: int, layers: int) -> dict[str, Any]:
    """Return the tables of the run that all programs train."""
    return {
        "data": {"path": str(data)},
        "task": {
            "kind": "rank",
            "numeric_features": search.numeric_features,
            "categorical_features": search.categorical_features,
        },
        "model": {
            "architecture": "bert",
            "config": {
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": width // 64,
                "intermediate_size": 4 * width,
                "max_position_embeddings": MAX_DOCUMENT_TOKENS,
            },
        },
        "accelerator": "cpu",
        "batch": {"rows": ROWS},
        "optimizer": {"learning_rate": 3e-4, "epsilon": 1e-6},
        "evaluation": {"rows": 4 * ROWS},
    }


if __name__ == "__main__":
    main()
