"""BERT pre-training speed, compared with transformers' Trainer.

Both train the same model: 8 layers of width 512, 16,384 tokens in the vocabulary. Initial weights,
text, held-out rows, rows per step, optimizer and schedule are equal. Trainer is measured at its
best (bf16, compiled, rows without padding) and with its defaults (fp32, documents with padding).
The programs alternate: each trains some steps and is evaluated on the held-out rows, which is not
timed.

    python benchmarks/train_mlm.py [--text FILE] [--lengths 128 512] [--dropouts 0 0.1]
                                   [--repeats N] [--steps N] [--json OUT]
"""

from __future__ import annotations

from typing import Any

from language import Language, main

GOALS = {"best": 2.0, "default": 5.0}
"""Speedup that must be reached over each style."""


def build_model(width: int, layers: int, length: int) -> dict[str, Any]:
    """Return the table of a BERT."""
    config = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "max_position_embeddings": length,
    }
    return {"architecture": "bert", "config": config}


LANGUAGE = Language(
    "train_mlm",
    "mlm",
    build_model,
    goals=GOALS,
    lengths=[128, 512],
    dropouts=[0.0, 0.1],
    min_mfu={(128, 0.0): 0.55, (512, 0.0): 0.55},
)

if __name__ == "__main__":
    main(__doc__, "masked language modelling compared with Trainer", LANGUAGE)
