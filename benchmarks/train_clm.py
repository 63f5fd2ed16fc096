"""Llama pre-training speed, compared with transformers' Trainer.

Both train the same model: 8 layers of width 512, 16,384 tokens in the vocabulary. Initial weights,
text, held-out rows, rows per step, optimizer and schedule are equal. Trainer is measured at its
best (bf16, compiled, one stream of text cut into rows) and with its defaults (fp32, documents with
padding). The programs alternate: each trains some steps and is evaluated on the held-out rows,
which is not timed.

    python benchmarks/train_clm.py [--text FILE] [--lengths 512] [--repeats N] [--steps N]
                                   [--json OUT]
"""

from __future__ import annotations

from typing import Any

from language import Language, main

GOALS = {"best": 1.8}
"""Speedup that must be reached over each style."""


def build_model(width: int, layers: int, length: int) -> dict[str, Any]:
    """Return the table of a Llama; the MLP is 8/3 as wide, rounded up to a multiple of 32."""
    config = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "intermediate_size": -(-8 * width // 3 // 32) * 32,
        "max_position_embeddings": length,
    }
    return {"architecture": "llama", "config": config}


LANGUAGE = Language(
    "train_clm",
    "clm",
    build_model,
    goals=GOALS,
    lengths=[512],
    dropouts=[0.0],
    min_mfu={},
)

if __name__ == "__main__":
    main(__doc__, "causal language modelling compared with Trainer", LANGUAGE)
