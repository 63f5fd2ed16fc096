"""How fast a BERT learns a language here, and in transformers' Trainer.

The same model (8 layers of 512, 16,384 words), first weights, text, held-out rows, rows of a step,
optimizer and schedule; Trainer at its best (bf16, compiled, rows without padding) and as it is by
default (fp32, documents with padding). Every program trains for some steps, is measured on the
held-out rows, which is not timed, and waits for the others.

    python benchmarks/train_mlm.py [--text FILE] [--lengths 128 512] [--dropouts 0 0.1]
                                   [--turns N] [--steps N] [--json OUT]
"""

from __future__ import annotations

from typing import Any

from language import Language, main

GOALS = {"best": 1.4, "default": 5.0}
"""How many times as fast it has to be."""


def model(width: int, layers: int, length: int) -> dict[str, Any]:
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
    model,
    goals=GOALS,
    lengths=[128, 512],
    dropouts=[0.0, 0.1],
    least_mfu={(128, 0.0): 0.55, (512, 0.0): 0.55},
)

if __name__ == "__main__":
    main(__doc__, "masked language modelling beside Trainer", LANGUAGE)
