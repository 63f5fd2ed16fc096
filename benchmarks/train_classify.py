"""Fine-tuning speed of a text classifier on short texts, compared with Trainer.

Both fine-tune all-MiniLM-L6-v2 with a new head, with the same initial weights, texts, batch, loss,
optimizer and schedule. Trainer is measured in bf16 with batches of similar lengths
(`train_sampling_strategy="group_by_length"`), in bf16 with random batches, and with its defaults.
The texts are the first paragraphs of docstrings, and the class is the module. With `--text` they
are the fields `text` and `label` of the records of a file. The programs alternate: each trains some
steps and is evaluated on the held-out texts, which is not timed. Regauge has its default options.

    python benchmarks/train_classify.py [--text FILE] [--peers best ungrouped default]
                                        [--repeats N] [--steps N] [--json OUT]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from peers import Peer, build_parser, compare_programs, run_alternating
from predict import find_packaged_model
from recording import write_result
from text import build_label_source, prepare_dataset

from regauge.accelerators.cpu import Cpu

MAX_TOKENS, ROWS = 128, 32
GOAL = 2.0
LABELS = {
    "best": "Trainer (bf16, grouped by length)",
    "ungrouped": "Trainer (bf16)",
    "default": "Trainer (default)",
}
PEER = Peer(LABELS, "peer_classify.py", dict.fromkeys(LABELS, GOAL), slow_steps=None)
PACKAGES = ("transformers", "accelerate", "datasets")


def main() -> None:
    """Measure, and write the results."""
    parser = build_parser(__doc__, "train_classify", repeats=11, steps=20)
    parser.add_argument("--peers", nargs="+", default=list(LABELS))
    options = parser.parse_args()
    precision = Cpu().precisions()[0]
    with tempfile.TemporaryDirectory() as scratch:
        data, model = Path(scratch) / "data", find_packaged_model()
        source = build_label_source(options.text, Path(scratch))
        layout = {"layout": "fields", "fields": {"text": MAX_TOKENS}, "labels": ["label"]}
        prepare_dataset(data, source, {"path": str(model)}, **layout)
        tables = build_tables(data, model)
        programs = run_alternating(Path(scratch) / "programs", tables, PEER, options, "texts")
    facts = {"precision": precision, "texts_per_step": ROWS, **compare_programs(programs)}
    title = "text classification compared with Trainer"
    write_result(options.json, title, Cpu().chip_peak(precision), facts, *PACKAGES)


def build_tables(data: Path, model: Path) -> dict[str, Any]:
    """Return the tables of the run that all programs train."""
    return {
        "data": {"path": str(data)},
        "task": {"kind": "classify"},
        "model": {"path": str(model)},
        "accelerator": "cpu",
        "batch": {"rows": ROWS},
        "optimizer": {"learning_rate": 5e-5},
        "evaluation": {"rows": 16 * ROWS},
    }


if __name__ == "__main__":
    main()
