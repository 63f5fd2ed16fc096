"""Lowest plausible matrix product rate of a CPU, by instruction set.

A measured rate below this floor has one of two causes: other work used the cores meanwhile, or the
instructions are unusable because a hypervisor hides them or torch was built without them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.accelerators import Precision

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
