"""Matrix product rates in bf16 and fp32, measured robustly on a busy machine.

Instruction names do not tell the speed: `avx512_bf16` doubles the fp32 rate on AMD Zen 4 and Zen 5,
and some virtual machines emulate it. Short products alternate between the precisions on one thread,
and the fastest of each counts. Other programs delay some products but not all, and a single thread
waits for no other.

Rates are cached in `~/.cache/regauge` per processor and torch version, so that every command on a
machine chooses the same precision.

A rate below the lowest plausible one has one of two causes: other work used the cores meanwhile, or
the instructions are unusable because a hypervisor hides them or torch was built without them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
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
FLOPS_PER_CYCLE: dict[str, tuple[tuple[frozenset[str], int], ...]] = {
    "bf16": (
        (frozenset({"amx_bf16"}), 1024),
        (frozenset({"avx512_bf16"}), 64),
        (frozenset({"bf16", "svebf16"}), 32),
    ),
    "fp32": (
        (frozenset({"avx512f"}), 32),
        (frozenset({"fma"}), 16),
        (frozenset({"avx", "asimd", "sve"}), 8),
        (frozenset({"sse2"}), 4),
    ),
}
"""Operations per cycle of one execution unit, by precision and instruction set, widest first.

A multiplication with its addition counts as two operations. `amx_bf16`: 16 x 16 x 32 products in
16 cycles (Intel 64 and IA-32 Architectures Optimization Reference Manual, on Intel AMX). The others
follow from the width of the registers. The registers of `bf16` (BFMMLA) have 128 bits.
"""
MIN_PEAK_SHARE = 0.05
"""Share of the peak. Measured with `amx_bf16`: 0.44 on an idle machine, 0.07 on a shared one."""
UNKNOWN_CLOCK_HZ = 1e9
"""Used if the clock is unknown; lower than the base clock of processors that train models."""
_NOMINAL = re.compile(r"^model name\s*:.*@\s*([\d.]+)\s*GHz", re.MULTILINE)
_CURRENT = re.compile(r"^cpu MHz\s*:\s*([\d.]+)", re.MULTILINE)


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


def min_plausible_rate(
    precision: Precision, instructions: frozenset[str], cores: int, clock_hz: float
) -> float:
    """Return the lowest plausible FLOP/s; 0 for unknown instructions.

    The peak is cores x clock x operations per cycle: Dolbeau, "Theoretical peak FLOPS per
    instruction set: a tutorial", Journal of Supercomputing 74 (2018).
    """
    sets = FLOPS_PER_CYCLE.get(precision, ())
    per_cycle = next((count for names, count in sets if names & instructions), 0)
    return MIN_PEAK_SHARE * cores * clock_hz * per_cycle


def read_clock_hz(cpuinfo: Path) -> float:
    """Return the base clock in the CPU name, else the current clock, else 1 GHz."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    for pattern, unit in ((_NOMINAL, 1e9), (_CURRENT, 1e6)):
        if (match := pattern.search(text)) and (clock := float(match[1]) * unit) > 0:
            return clock
    return UNKNOWN_CLOCK_HZ
