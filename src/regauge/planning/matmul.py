"""Seconds of a matrix product: a roofline with fitted constants, corrected by measured products.

t = (c^p + b^p)^(1/p) + launch; c = 2 m n k / (peak e) (1 + k0 / k) (1 + m0 / sqrt(m n)) for the
computation, b = 2 (m k + k n + m n) / (bandwidth e_b) for the memory, in bf16. The errors of the
nearest measured products correct the roofline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.files import read_csv_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regauge.planning.calibration import MatmulConstants

ROWS = Path(__file__).with_name("matmul_rows.csv")
NEIGHBOURS = 6
SOFTENING = 0.05
"""Distance that is added, so that an equal product does not decide alone."""
BF16_BYTES = 2


@dataclass(frozen=True)
class MeasuredProduct:
    """A measured product, by the logarithms of its sizes, and log(measured / roofline)."""

    sizes: tuple[float, float, float]
    log_error: float


def roofline_seconds(
    size: tuple[int, int, int], constants: MatmulConstants, peak: float, bandwidth: float
) -> float:
    """Return the seconds of [m, k] x [k, n] in bf16.

    `size` is (m, n, k). `peak` is FLOP/s, `bandwidth` is bytes per second.
    """
    m, n, k = size
    compute = 2.0 * m * n * k / (peak * constants.efficiency)
    compute *= (1 + constants.inner_half / k) * (1 + constants.outer_half / math.sqrt(m * n))
    moved = BF16_BYTES * (float(m) * k + float(k) * n + float(m) * n)
    memory = moved / (bandwidth * constants.bandwidth_efficiency)
    power = constants.sharpness
    return math.pow(compute**power + memory**power, 1 / power) + constants.launch_seconds


def correct_product(size: tuple[int, int, int], rows: Sequence[MeasuredProduct]) -> float:
    """Return the factor of the nearest measured products; 1 without any."""
    point = (math.log(size[0]), math.log(size[1]), math.log(size[2]))
    near = sorted((math.dist(point, row.sizes), row.log_error) for row in rows)[:NEIGHBOURS]
    weights = [1 / (distance + SOFTENING) ** 2 for distance, _ in near]
    if not weights:
        return 1.0
    total = sum(weight * error for weight, (_, error) in zip(weights, near, strict=True))
    return math.exp(total / sum(weights))


@cache
def load_products(path: Path = ROWS) -> Mapping[str, Sequence[MeasuredProduct]]:
    """Return the measured products of each system."""
    systems: dict[str, list[MeasuredProduct]] = {}
    for row in read_csv_rows(path):
        sizes = (math.log(int(row["m"])), math.log(int(row["n"])), math.log(int(row["k"])))
        product = MeasuredProduct(sizes, float(row["log_error"]))
        systems.setdefault(row["system"], []).append(product)
    return systems
