"""Fits and judges the seconds of matrix products and of collectives against measured rows."""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from planner_chips import find_chip, find_chip_row
from scipy.optimize import least_squares

from regauge.planning.calibration import ANY, MatmulConstants, load_calibration
from regauge.planning.collective_times import (
    CurveKey,
    build_curves,
    collective_seconds,
    load_curves,
)
from regauge.planning.matmul import (
    MeasuredProduct,
    correct_product,
    load_products,
    roofline_seconds,
)

MIN_FLOPS, MIN_BYTES = 1e9, 2**20
"""Products and messages below these sizes are not judged."""
FP16_BYTES = 2
FOLDS = 5
SAMPLED = 20
"""First rows of a file, which tell whether the package has seen it."""
REFERENCE_FLOPS = 500e12
"""FLOP/s of a chip whose peak is unpublished; its efficiency refers to it."""
LIKE = math.log(1.25)
"""Distance of peak and bandwidth within which one system stands in for another."""
FITTED = (
    "efficiency",
    "bandwidth_efficiency",
    "inner_half",
    "outer_half",
    "sharpness",
    "launch_seconds",
)
START = (0.85, 0.85, 130.0, 200.0, 3.0, 3e-6)
LOWER = (0.1, 0.2, 1.0, 1.0, 1.0, 1e-7)
UPPER = (1.5, 1.3, 2000.0, 5000.0, 8.0, 6e-5)


@dataclass(frozen=True)
class Product:
    """A measured product of [m, k] and [k, n]."""

    system: str
    size: tuple[int, int, int]
    seconds: float


@dataclass(frozen=True)
class Message:
    """A measured collective."""

    key: CurveKey
    size: float
    seconds: float


def find_rates(system: str) -> tuple[float, float]:
    """Return the peak FLOP/s and the memory bandwidth of a system."""
    row = find_chip_row(system)
    peak = float(row["bf16_teraflops"]) * 1e12 if row["bf16_teraflops"] else REFERENCE_FLOPS
    return peak, float(row["bandwidth_gb_per_s"]) * 1e9


def find_links(systems: Sequence[str]) -> dict[str, float]:
    """Return the bytes per second of one device's link, for each system."""
    return {name: float(find_chip_row(name)["link_gb_per_s"]) * 1e9 for name in systems}


def read_products(rows: Sequence[Mapping[str, str]]) -> list[Product]:
    """Return the measured products that are large enough to be judged."""
    products = [
        Product(
            row["system"],
            (int(row["m"]), int(row["n"]), int(row["k"])),
            float(row["latency_ms"]) / 1e3,
        )
        for row in rows
    ]
    return [item for item in products if 2.0 * math.prod(item.size) > MIN_FLOPS]


def fit_matmul(system: str, products: Sequence[Product], source: str = "") -> MatmulConstants:
    """Return the roofline of one system, or of several with their judged rates."""
    start = MatmulConstants(system, *START, 0.12, len(products), REFERENCE_FLOPS, source)
    rates = {item.system: find_rates(item.system) for item in products}
    sizes = np.array([item.size for item in products], dtype=float)
    peaks = np.array([rates[item.system][0] for item in products])
    bandwidths = np.array([rates[item.system][1] for item in products])
    measured = np.log([item.seconds for item in products])

    def errors(point: np.ndarray) -> np.ndarray:
        efficiency, share, inner, outer, power, launch = np.exp(point)
        m, n, k = sizes.T
        compute = 2 * m * n * k / (peaks * efficiency) * (1 + inner / k)
        compute *= 1 + outer / np.sqrt(m * n)
        moved = 2 * (m * k + k * n + m * n) / (bandwidths * share)
        return np.log((compute**power + moved**power) ** (1 / power) + launch) - measured

    bounds = (np.log(LOWER), np.log(UPPER))
    solution = least_squares(errors, np.log(START), bounds=bounds, loss="soft_l1", f_scale=0.1)
    values = dict(zip(FITTED, np.exp(solution.x).tolist(), strict=True))
    spread = float(np.std(errors(solution.x)))
    reference = next(iter(rates.values()))[0] if len(rates) == 1 else REFERENCE_FLOPS
    return replace(start, **values, spread=spread, reference_flops=reference)


def log_residual(product: Product, constants: MatmulConstants) -> MeasuredProduct:
    """Return a measured product with its error against the roofline."""
    seconds = roofline_seconds(product.size, constants, *find_rates(product.system))
    m, n, k = (math.log(size) for size in product.size)
    return MeasuredProduct((m, n, k), math.log(product.seconds / seconds))


def write_matmul_rows(
    path: Path, products: Sequence[Product], constants: Mapping[str, MatmulConstants]
) -> None:
    """Write the errors of the measured products against the roofline of their system."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("system", "m", "n", "k", "log_error"))
        for item in products:
            error = log_residual(item, constants[item.system]).log_error
            writer.writerow((item.system, *item.size, f"{error:.4f}"))


def find_stand_in(system: str, fitted: Mapping[str, MatmulConstants]) -> str:
    """Return the measured system whose rates are near, or `ANY`."""
    rates = find_rates(system)
    distances = {
        name: max(abs(math.log(a / b)) for a, b in zip(rates, find_rates(name), strict=True))
        for name in fitted
        if name != ANY
    }
    nearest = min(distances, key=lambda name: distances[name], default=ANY)
    return nearest if distances.get(nearest, math.inf) <= 2 * LIKE else ANY


def predict_product(
    product: Product,
    fitted: Mapping[str, MatmulConstants],
    rows: Mapping[str, Sequence[MeasuredProduct]],
) -> float:
    """Return the seconds of a product, by its system or by the one that stands in."""
    name = product.system if product.system in fitted else find_stand_in(product.system, fitted)
    seconds = roofline_seconds(product.size, fitted[name], *find_rates(product.system))
    return seconds * correct_product(product.size, rows.get(name, ()))


def has_seen_products(rows: Sequence[Mapping[str, str]]) -> bool:
    """Return whether a file has products of the package's calibration."""
    known = load_products()
    return any(
        tuple(map(math.log, item.size)) in {row.sizes for row in known.get(item.system, ())}
        for item in read_products(rows[:SAMPLED])
    )


def has_seen_collectives(rows: Sequence[Mapping[str, str]]) -> bool:
    """Return whether a file has systems of the package's calibration."""
    known = {curve.system for curve in load_curves()}
    return any(item.key.system in known for item in read_messages(rows))


def _select_known(
    rows: Sequence[Mapping[str, str]], kind: str
) -> tuple[list[Mapping[str, str]], dict[str, dict[str, object]]]:
    """Return the rows of chips in the catalog, and a table that counts the others."""
    known = {name for name in {row["system"] for row in rows} if find_chip(name)}
    unknown = Counter(row["system"] for row in rows if row["system"] not in known)
    left_out = {f"{kind}, not in the catalog": dict(unknown)} if unknown else {}
    return [row for row in rows if row["system"] in known], left_out


def judge_products(
    rows: Sequence[Mapping[str, str]], *, is_held_out: bool
) -> dict[str, dict[str, object]]:
    """Return the errors of products: by folds of a system, and without the system."""
    rows, left_out = _select_known(rows, "products")
    products = read_products(rows)
    systems = sorted({item.system for item in products})
    if is_held_out:
        fitted, known = load_calibration().matmuls, load_products()
        by_rows = {
            f"products, {name}": _figures(
                _cross_validate_products(name, [i for i in products if i.system == name])
            )
            for name in systems
            if name not in fitted
        }
        return (
            left_out
            | by_rows
            | {
                f"products, {name}" + ("" if name in fitted else " (data sheet alone)"): _figures(
                    [
                        predict_product(item, fitted, known) / item.seconds - 1
                        for item in products
                        if item.system == name
                    ]
                )
                for name in systems
            }
        )
    tables = dict(left_out)
    for name in systems:
        judged = [item for item in products if item.system == name]
        others = [item for item in products if item.system != name]
        tables[f"products, {name}"] = _figures(_cross_validate_products(name, judged))
        if others:
            fitted = {
                s: fit_matmul(s, [i for i in others if i.system == s]) for s in systems if s != name
            } | {ANY: fit_matmul(ANY, others)}
            residuals = {
                s: [log_residual(i, fitted[s]) for i in others if i.system == s]
                for s in systems
                if s != name
            }
            errors = [predict_product(i, fitted, residuals) / i.seconds - 1 for i in judged]
            tables[f"products, {name} (data sheet alone)"] = _figures(errors)
    return tables


def _cross_validate_products(name: str, products: Sequence[Product]) -> list[float]:
    order = np.random.default_rng(0).permutation(len(products)) % FOLDS
    errors = []
    for number in range(FOLDS):
        kept = [item for item, fold in zip(products, order, strict=True) if fold != number]
        held = [item for item, fold in zip(products, order, strict=True) if fold == number]
        fitted = {name: fit_matmul(name, kept)}
        residuals = {name: [log_residual(item, fitted[name]) for item in kept]}
        errors += [predict_product(item, fitted, residuals) / item.seconds - 1 for item in held]
    return errors


def read_messages(rows: Sequence[Mapping[str, str]]) -> list[Message]:
    """Return the measured collectives of a file."""
    return [
        Message(
            CurveKey(row["system"], row["collective"], int(row["num_gpus"]), row["nccl_version"]),
            float(row["message_elements_fp16"]) * FP16_BYTES,
            float(row["latency_ms"]) / 1e3,
        )
        for row in rows
    ]


def as_rows(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return collectives as rows of `collective_rows.csv`."""
    return [
        {
            "system": item.key.system,
            "version": item.key.version,
            "collective": item.key.collective,
            "devices": str(item.key.devices),
            "bytes": f"{item.size:.0f}",
            "seconds": f"{item.seconds:.6g}",
        }
        for item in messages
    ]


def merge_collectives(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return one row for each system, library version, collective, devices and size."""
    source = rows[0]["source"].split(",")[0]
    curves = build_curves(as_rows(read_messages(rows)))
    messages = [
        Message(
            CurveKey(curve.system, curve.collective, curve.devices, curve.version), size, seconds
        )
        for curve in curves
        for size, seconds in zip(curve.sizes, curve.seconds, strict=True)
    ]
    return [{**row, "source": source} for row in as_rows(messages)]


def judge_collectives(
    rows: Sequence[Mapping[str, str]], *, is_held_out: bool
) -> dict[str, dict[str, object]]:
    """Return the errors of collectives: by folds of the sizes, and without the system."""
    rows, left_out = _select_known(rows, "collectives")
    messages = read_messages(rows)
    systems = sorted({item.key.system for item in messages})
    if is_held_out:
        curves = load_curves()
        known = {curve.system for curve in curves}
        links = find_links([*systems, *known])
        unseen = [item for item in messages if item.key.system not in known]
        return (
            left_out
            | _cross_validate_collectives(unseen)
            | {
                f"collectives, {name}" + ("" if name in known else " (data sheet alone)"): _figures(
                    [
                        collective_seconds(item.key, item.size, curves, links) / item.seconds - 1
                        for item in messages
                        if item.key.system == name and item.size > MIN_BYTES
                    ]
                )
                for name in systems
            }
        )
    tables = left_out | _cross_validate_collectives(messages)
    links = find_links(systems)
    for name in systems:
        judged = [m for m in messages if m.key.system == name and m.size > MIN_BYTES]
        others = build_curves(as_rows([m for m in messages if m.key.system != name]))
        if others:
            errors = [
                collective_seconds(m.key, m.size, others, links) / m.seconds - 1 for m in judged
            ]
            tables[f"collectives, {name} (data sheet alone)"] = _figures(errors)
    return tables


def _cross_validate_collectives(messages: Sequence[Message]) -> dict[str, dict[str, object]]:
    """Return the errors of each system by the other folds of its sizes."""
    systems = sorted({item.key.system for item in messages})
    links = find_links(systems)
    order = np.random.default_rng(0).permutation(len(messages)) % FOLDS
    folds = [
        build_curves(as_rows([m for m, f in zip(messages, order, strict=True) if f != number]))
        for number in range(FOLDS)
    ]
    pairs = [pair for pair in zip(messages, order, strict=True) if pair[0].size > MIN_BYTES]
    return {
        f"collectives, {name}": _figures(
            [
                collective_seconds(m.key, m.size, folds[fold], links) / m.seconds - 1
                for m, fold in pairs
                if m.key.system == name
            ]
        )
        for name in systems
    }


def _figures(errors: Sequence[float]) -> dict[str, object]:
    sizes = [abs(error) for error in errors]
    if not sizes:
        return {"rows": 0}
    return {
        "rows": len(sizes),
        "mean": round(statistics.mean(sizes), 4),
        "p90": round(float(np.quantile(sizes, 0.9)), 4),
    }
