"""Matrix product rates in bf16 and fp32, measured robustly on a busy machine.

Instruction names do not tell the speed: `avx512_bf16` doubles the fp32 rate on AMD Zen 4 and Zen 5,
and some virtual machines emulate it. Short products alternate between the precisions on one thread,
and the fastest of each counts. Other programs delay some products but not all, and a single thread
waits for no other.

Rates are cached in `~/.cache/regauge` per processor and torch version, so that every command on a
machine chooses the same precision.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

from regauge.config import FORMAT
from regauge.system import timing
from regauge.system.errors import DataError
from regauge.system.files import find_cache_folder, write_json
from regauge.system.json_files import find_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from regauge.accelerators import Precision

    Rates = dict[Precision, float]

DTYPES: Mapping[Precision, str] = {"bf16": "bfloat16", "fp32": "float32"}
SIZE = 512
"""Matrix side. An fp32 product takes 1 to 5 ms on one thread, less than a scheduler time slice."""
MEASURE_SECONDS, MIN_PRODUCTS = 0.1, 5
"""Shortest duration of a measurement, and the fewest products in each precision."""


def find_rates(processor: str, instructions: frozenset[str], floors: Rates) -> Rates:
    """Return single-thread FLOP/s per precision, from the cache or by measurement.

    `floors` are the lowest plausible rates, or 0; lower rates are not cached.
    """
    key = json.dumps([processor, sorted(instructions), version("torch")])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = find_cache_folder() / f"matmul-rates-{digest}.json"
    stored = _read(path)
    if stored is not None:
        return stored
    rates = measure_rates(floors)
    if all(rates[precision] >= floors[precision] for precision in DTYPES):
        document = {"processor": processor, "torch": version("torch"), "flops_per_second": rates}
        with suppress(OSError):  # a home folder that is full or cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"format": FORMAT, **document})
    return rates


def _read(path: Path) -> Rates | None:
    with suppress(DataError, OSError, KeyError, TypeError, ValueError):
        document = find_json(path, "remove it")
        if document is not None:
            rates = document["flops_per_second"]
            return {precision: float(rates[precision]) for precision in DTYPES}
    return None


def measure_rates(floors: Rates) -> Rates:
    """Measure single-thread FLOP/s per precision.

    Repeats for at most a few seconds while a rate is below its floor.
    """
    import torch

    products = {precision: _build_product(dtype) for precision, dtype in DTYPES.items()}
    shortest = dict.fromkeys(DTYPES, math.inf)
    rates: Rates = {}

    def measure() -> float:
        """Update the rates; return the smallest ratio of a rate to its floor."""
        _alternate(products, shortest)
        rates.update((name, 2 * SIZE**3 / seconds) for name, seconds in shortest.items())
        return min(rates[name] / (floors[name] or rates[name]) for name in rates)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timing.repeat_below(measure, 1.0)
    finally:
        torch.set_num_threads(threads)
    return rates


def _alternate(
    products: Mapping[Precision, Callable[[], object]], shortest: dict[Precision, float]
) -> None:
    """Time the products in turn; update the `shortest` seconds of each."""
    deadline, count = time.perf_counter() + MEASURE_SECONDS, 0
    while count < MIN_PRODUCTS or time.perf_counter() < deadline:
        for precision, multiply in products.items():
            began = time.perf_counter()
            multiply()
            shortest[precision] = min(shortest[precision], time.perf_counter() - began)
        count += 1


def _build_product(dtype: str) -> Callable[[], object]:
    import torch

    square = torch.ones(SIZE, SIZE, dtype=getattr(torch, dtype))
    return lambda: square @ square
