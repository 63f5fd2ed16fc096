"""Language model training on one GPU, compared with Trainer and a PyTorch loop.

BERT-large (24 layers of width 1,024) has rows of 128 and 512 tokens. The blocks of Llama-2-7B
(width 4,096) have rows of 4,096 tokens. Both are compiled, in bf16. The programs alternate, so
all of them are in the memory at the same time. The number of blocks, at most 32, is the number
that fits for each program with the AdamW state. The rest is as in `train_large.py`.

    python benchmarks/gpu.py [--models bert llama] [--lengths 128 512] [--text FILE] [--repeats N]
                             [--steps N] [--json OUT]
"""

from __future__ import annotations

from typing import Any

import train_clm
import train_large
from language import PACKAGES, Language, measure
from peers import build_parser
from recording import write_result

from regauge.accelerators import Accelerator, choose

GOALS = {"minimal": 0.98}
"""At most 2 % slower than a PyTorch loop."""
BYTES_PER_WEIGHT = 20
"""Weight and gradient in bf16 and in fp32, and two moments."""
STATE_SHARE = 0.75
"""Share of the memory for weights and their state in all programs; activations use the rest."""
NUM_BLOCKS = 32
"""Blocks of Llama-2-7B."""
WIDTH, VOCABULARY, LENGTH, ROWS = 4096, 32000, 4096, 4


def main() -> None:
    """Measure, and write the results."""
    parser = build_parser(__doc__, "gpu", repeats=11, steps=5)
    parser.add_argument("--models", nargs="+", choices=("bert", "llama"), default=["bert", "llama"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="of BERT-large")
    parser.add_argument("--peers", nargs="*", default=["minimal", "best"])
    options = parser.parse_args()
    accelerator, _ = choose()
    languages = [
        build_bert(options.lengths)
        if name == "bert"
        else build_llama(accelerator, 1 + len(options.peers))
        for name in options.models
    ]
    resized = [language.resize(options) for language in languages]
    chip, facts = measure(options, resized, accelerator)
    write_result(options.json, "language models on one GPU", chip, facts, *PACKAGES)


def build_bert(lengths: list[int]) -> Language:
    """Return BERT-large with 16,384 tokens per step."""
    return train_large.LANGUAGE._replace(
        name="BERT-large",
        goals=GOALS,
        lengths=lengths,
        min_mfu={(512, 0.0): 0.45},
        tokens=16384,
        microbatch_rows=None,
    )


def build_llama(accelerator: Accelerator, num_programs: int) -> Language:
    """Return the blocks of Llama-2-7B that fit for each program, in microbatches of one row."""
    block_weights = 4 * WIDTH**2 + 3 * WIDTH * mlp_width(WIDTH)
    memory_bytes = STATE_SHARE * (accelerator.memory_bytes(1) or 0) / num_programs
    weights = memory_bytes / BYTES_PER_WEIGHT - 2 * VOCABULARY * WIDTH
    layers = max(1, min(NUM_BLOCKS, int(weights // block_weights)))
    return train_clm.LANGUAGE._replace(
        name=f"Llama-2-7B, {layers} of its {NUM_BLOCKS} blocks",
        model=build_model,
        goals=GOALS,
        lengths=[LENGTH],
        min_mfu={(LENGTH, 0.0): 0.5},
        width=WIDTH,
        layers=layers,
        vocabulary=VOCABULARY,
        tokens=ROWS * LENGTH,
        microbatch_rows=1,
    )


def build_model(width: int, layers: int, length: int) -> dict[str, Any]:
    """Return the table of a Llama 2, with heads of width 128."""
    table = train_clm.build_model(width, layers, length)
    heads = max(1, width // 128)
    changes = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": mlp_width(width),
    }
    return table | {"config": table["config"] | changes}


def mlp_width(width: int) -> int:
    """Return the width of a Llama 2's MLP: 8/3 of `width`, rounded up to a multiple of 256."""
    return -(-8 * width // 3 // 256) * 256


if __name__ == "__main__":
    main()
