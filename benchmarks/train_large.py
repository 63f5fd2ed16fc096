"""MFU of BERT-large pre-training on one processor: rows of 128 tokens, microbatches of eight rows.

24 layers of width 1,024, 30,522 tokens in the vocabulary, 32 rows per step. The rest is as in
`train_mlm.py`. There is no peer by default; `--peers` adds some.

    python benchmarks/train_large.py [--text FILE] [--repeats N] [--steps N] [--json OUT]
"""

from __future__ import annotations

import train_mlm
from language import main

LANGUAGE = train_mlm.LANGUAGE._replace(
    name="train_large",
    goals={},
    lengths=[128],
    dropouts=[0.0],
    min_mfu={(128, 0.0): 0.6},
    width=1024,
    layers=24,
    vocabulary=30522,
    microbatch_rows=8,
)

if __name__ == "__main__":
    main(__doc__, "BERT-large on one processor", LANGUAGE, repeats=6)
