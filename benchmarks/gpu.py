"""How fast one GPU learns languages here, in transformers' Trainer and in a loop by hand.

BERT-large (24 layers of 1,024) at rows of 128 and 512, and blocks of Llama-2-7B (4,096 wide) at
rows of 4,096, in bf16, compiled: as many of the 32 blocks as the memory holds with all of AdamW's
state. Otherwise as `train_large.py`, which says what is alike.

    python benchmarks/gpu.py [--rungs bert llama] [--text FILE] [--turns N] [--steps N] [--json OUT]
"""

from __future__ import annotations

from typing import Any

import train_clm
import train_large
from language import PACKAGES, Language, measured
from peers import arguments
from recording import keep

from regauge.accelerators import Accelerator, choose

GOALS = {"minimal": 0.98}
"""Within two in a hundred of a loop by hand."""
HELD_BYTES = 20
"""Of a weight: itself and its gradient in bf16 and in fp32, and two moments."""
SHARE_HELD = 0.75
"""Of the memory, for weights and their state; the rest is the steps'."""
BLOCKS = 32
"""Of Llama-2-7B."""
WIDTH, VOCABULARY, LENGTH, ROWS = 4096, 32000, 4096, 4


def main() -> None:
    """Measure, and write what was found."""
    parser = arguments(__doc__, "gpu", turns=11, steps=5)
    parser.add_argument("--rungs", nargs="+", choices=("bert", "llama"), default=["bert", "llama"])
    parser.add_argument("--peers", nargs="*", default=["minimal", "best"])
    own = parser.parse_args()
    accelerator, _ = choose()
    found = [bert() if rung == "bert" else llama(accelerator) for rung in own.rungs]
    chip, facts = measured(own, [each.sized(own) for each in found], accelerator)
    keep(own.json, "languages on one GPU", chip, facts, *PACKAGES)


def bert() -> Language:
    """Return BERT-large: 16,384 tokens a step."""
    return train_large.LANGUAGE._replace(
        name="BERT-large",
        goals=GOALS,
        lengths=[128, 512],
        least_mfu={(512, 0.0): 0.45},
        tokens=16384,
        rows_at_once=None,
    )


def llama(accelerator: Accelerator) -> Language:
    """Return as many blocks of Llama-2-7B as fit with their state: four rows a step, one by one."""
    block = 4 * WIDTH**2 + 3 * WIDTH * inner(WIDTH)
    weights = SHARE_HELD * (accelerator.memory_bytes(1) or 0) / HELD_BYTES - 2 * VOCABULARY * WIDTH
    layers = max(1, min(BLOCKS, int(weights // block)))
    return train_clm.LANGUAGE._replace(
        name=f"Llama-2-7B, {layers} of its {BLOCKS} blocks",
        model=model,
        goals=GOALS,
        lengths=[LENGTH],
        least_mfu={(LENGTH, 0.0): 0.5},
        width=WIDTH,
        layers=layers,
        vocabulary=VOCABULARY,
        tokens=ROWS * LENGTH,
        rows_at_once=1,
    )


def model(width: int, layers: int, length: int) -> dict[str, Any]:
    """Return the table of a Llama 2: heads of 128."""
    found = train_clm.model(width, layers, length)
    heads = max(1, width // 128)
    own = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": inner(width),
    }
    return found | {"config": found["config"] | own}


def inner(width: int) -> int:
    """Return how wide the inner layers of a Llama 2 are: 8/3, in steps of 256."""
    return -(-8 * width // 3 // 256) * 256


if __name__ == "__main__":
    main()
