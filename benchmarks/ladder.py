"""Share of real tokens in a batch: chosen bucket lengths, powers of two, and one fixed length.

Text lengths come from three distributions with a fixed seed. Every text is padded to the smallest
bucket length that is long enough. Nothing is timed.

    python benchmarks/ladder.py [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from regauge.data.buckets import choose_bucket_lengths, real_token_fraction

NUM_TEXTS = 100_000
MAX_LENGTH = 512
NUM_BUCKETS = (4, 8, 16)
DISTRIBUTIONS = {
    "short": (24, 0.5, "queries and titles: median 24 tokens"),
    "long-tailed": (40, 1.0, "posts: median 40, up to 500"),
    "documents": (300, 0.8, "paragraphs and pages: median 300, a quarter at the limit"),
}
"""Median and standard deviation of the logarithm (sigma) of a log-normal, cut at 512."""


def main() -> None:
    """Print a row for each distribution and method to choose bucket lengths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    rows = [row for name in DISTRIBUTIONS for row in build_rows(name)]
    line = "{distribution:>11}  {method:<14} {num_buckets:>2} {real_token_fraction:.3f}\n"
    for row in rows:
        sys.stdout.write(line.format(**row))
    if arguments.json:
        text = json.dumps({"benchmark": "ladder", "rows": rows}, indent=2)
        arguments.json.write_text(text + "\n")


def build_rows(name: str) -> list[dict[str, Any]]:
    """Return the share of real tokens of each method for a distribution."""
    median, sigma, _ = DISTRIBUTIONS[name]
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.normal(np.log(median), sigma, NUM_TEXTS)).round().clip(4, MAX_LENGTH)
    histogram = tuple(np.bincount(lengths.astype(int)).tolist())
    longest = len(histogram) - 1
    powers = tuple(2**n for n in range(3, 10) if 2 ** (n - 1) < longest)
    methods = {
        "one length": (MAX_LENGTH,),
        "powers of two": powers,
        "buckets": choose_bucket_lengths(histogram, len(powers)),
        **{f"buckets, {count}": choose_bucket_lengths(histogram, count) for count in NUM_BUCKETS},
    }
    return [
        {
            "distribution": name,
            "method": method,
            "num_buckets": len(bucket_lengths),
            "real_token_fraction": real_token_fraction(histogram, bucket_lengths),
            "bucket_lengths": list(bucket_lengths),
        }
        for method, bucket_lengths in methods.items()
    ]


if __name__ == "__main__":
    main()
