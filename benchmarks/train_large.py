"""How near BERT-large comes to the peak of the processor: rows of 128, eight at a time.

24 layers of 1,024 and 30,522 words, 32 rows a step. Otherwise as `train_mlm.py`, which says what
is alike, and beside nobody unless it is asked for.

    python benchmarks/train_large.py [--text FILE] [--turns N] [--steps N] [--json OUT]
"""

from __future__ import annotations

import train_mlm
from language import main

LANGUAGE = train_mlm.LANGUAGE._replace(
    name="train_large",
    goals={},
    lengths=[128],
    dropouts=[0.0],
    least_mfu={(128, 0.0): 0.6},
    width=1024,
    layers=24,
    vocabulary=30522,
    rows_at_once=8,
)

if __name__ == "__main__":
    main(__doc__, "BERT-large on one processor", LANGUAGE, turns=6)
