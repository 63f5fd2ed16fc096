"""How much of a batch is real tokens: the ladder against powers of two and one fixed length.

Three distributions of text lengths, drawn with a fixed seed, and every text padded to the smallest
declared length that holds it. Nothing is timed.

    python benchmarks/ladder.py [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from regauge.data.buckets import choose_bucket_lengths, real_token_share

TEXTS = 100_000
LONGEST = 512
SHAPES = (4, 8, 16)
DISTRIBUTIONS = {
    "short": (24, 0.5, "queries and titles: median 24 tokens"),
    "long-tailed": (40, 1.0, "posts: median 40, some of 500"),
    "documents": (300, 0.8, "paragraphs and pages: median 300, a quarter at the limit"),
}
"""Median and spread (standard deviation of the logarithm) of a log-normal, cut at 512."""


def main() -> None:
    """Print a row for each distribution and way to declare lengths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file to write as well")
    arguments = parser.parse_args()
    rows = [row for name in DISTRIBUTIONS for row in measured(name)]
    for row in rows:
        line = "{lengths:>11}  {how:<14} {count:>2} shapes  real {real:.3f}\n".format(**row)
        sys.stdout.write(line)
    if arguments.json:
        text = json.dumps({"benchmark": "ladder", "rows": rows}, indent=2)
        arguments.json.write_text(text + "\n")


def measured(name: str) -> list[dict[str, object]]:
    """Return the real-token share of each way to declare lengths for a distribution."""
    median, spread, _ = DISTRIBUTIONS[name]
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(np.log(median), spread, TEXTS)).round().clip(4, LONGEST)
    histogram = tuple(np.bincount(lengths.astype(int)).tolist())
    longest = len(histogram) - 1
    powers = tuple(2**n for n in range(3, 10) if 2 ** (n - 1) < longest)
    ways = {
        "one length": (LONGEST,),
        "powers of two": powers,
        "ladder": choose_bucket_lengths(histogram, len(powers)),
        **{f"ladder, {count}": choose_bucket_lengths(histogram, count) for count in SHAPES},
    }
    return [
        {
            "lengths": name,
            "how": how,
            "count": len(rungs),
            "real": real_token_share(histogram, rungs),
            "rungs": list(rungs),
        }
        for how, rungs in ways.items()
    ]


if __name__ == "__main__":
    main()
