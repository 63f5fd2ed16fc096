"""Run files of tiny models, as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge.config import build, merge
from regauge.training.settings import Training

BERT = {
    "architecture": "bert",
    "dropout": 0.1,
    "config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    },
}
LLAMA = {
    "architecture": "llama",
    "config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    },
}
TASKS: dict[str, dict[str, Any]] = {
    "mlm": {"task": {"kind": "mlm"}, "model": BERT},
    "clm": {"task": {"kind": "clm"}, "model": LLAMA},
    "contrastive": {"task": {"kind": "contrastive", "shapes": 2}, "model": BERT},
}


def settings(folder: Path, data: Path, task: str = "mlm", **changes: Any) -> Training:
    """Return a run of 12 steps of 8 rows in 4 microbatches; `changes` are laid over it."""
    base: dict[str, Any] = {
        "output": {
            "folder": str(folder),
            "trackers": ("jsonl",),
            "every_steps": 1,
            "checkpoint": {"every_steps": 4, "keep": 10, "writing": "blocking"},
        },
        "seed": 7,
        "data": {"path": str(data), "workers": 0},
        "batch": {"rows": 8, "microbatch_rows": 2},
        "optimizer": {"learning_rate": 0.003, "schedule": {"warmup_steps": 3}},
        "execution": {"precision": "fp32", "threads": 1},
        "accelerator": "cpu",
        "stop": {"steps": 12},
        **TASKS[task],
    }
    return build(Training, merge(base, changes))
