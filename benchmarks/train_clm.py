"""How fast a Llama learns a language here, and in transformers' Trainer.

The same model (8 layers of 512, 16,384 words), first weights, text, held-out rows, rows of a step,
optimizer and schedule; Trainer at its best (bf16, compiled, one stream of text cut into rows) and
as it is by default (fp32, documents with padding). Every program trains for some steps, is measured
on the held-out rows, which is not timed, and waits for the others.

    python benchmarks/train_clm.py [--text FILE] [--lengths 512] [--turns N] [--steps N]
                                   [--json OUT]
"""

from __future__ import annotations

from typing import Any

from language import Language, main

GOALS = {"best": 1.3}
"""How many times as fast it has to be."""


def model(width: int, layers: int, length: int) -> dict[str, Any]:
    """Return the table of a Llama; its inner layers are 8/3 as wide, in steps of 32."""
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
    model,
    goals=GOALS,
    lengths=[512],
    dropouts=[0.0],
    least_mfu={},
)

if __name__ == "__main__":
    main(__doc__, "causal language modelling beside Trainer", LANGUAGE)
