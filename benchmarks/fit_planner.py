"""Fits the constants of the planner to measured rows, and writes them into the package.

    python benchmarks/fit_planner.py --train FILE --memory FILE --collectives FILE

Each constant belongs to a chip and a software stack. Rows of one stack are fitted together, with
priors, so that a stack with two rows does not get the noise of two rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import planner_references as references
import stack_effects
from planner_rows import Sample, read_samples
from scipy.optimize import least_squares

from regauge.machines.catalog import CatalogChip, load_chips
from regauge.machines.machine_rates import find_machine
from regauge.planner import calibration as constants
from regauge.planner.anchors import (
    MEASURED,
    MEASUREMENTS,
    Anchor,
    describe,
    parse_year,
)
from regauge.planner.calibration import (
    ANY,
    LinkConstants,
    MemoryConstants,
    PlannerConstants,
    StackConstants,
)
from regauge.planner.memory_plan import plan_parts
from regauge.planner.step_time import BETWEEN, INSIDE, plan_step

PRIOR = {
    "efficiency": (0.65, 0.5),
    "hidden_half": (400.0, 0.5),
    "token_half": (1156.0, 0.5),
    "attention_efficiency": (0.3, 0.4),
    "traffic": (1.2, 0.3),
    "fixed_seconds": (0.002, 1.5),
}
"""Median and log standard deviation of each constant before any row; medians by an A100 fit."""
FITTED = tuple(PRIOR)
MIN_BYTES = 2**20
"""Smaller messages do not show the bandwidth of a link."""
PASSES = 2
"""Fits with a prior by the other stacks, after the one with the prior above."""
NOISE = 0.04
"""Log standard deviation of one row around its stack."""
OVERLAP, GROWTH = 0.9, 0.015
"""Assumed, since no single-node row shows them."""
NO_OVERLAP = ("NeMo", "Korthikanti", "MT-NLG", "DeepSpeed ZeRO-1")
"""Stacks whose collectives wait for the backward pass by default."""
MIN_SPREAD, ONE_ROW_SPREAD = 0.025, 0.12
FAMILY_SPREAD, CHIP_SPREAD, ANY_SPREAD = 0.1, 0.15, 0.35
REFERENCE_FLOPS = 100e12
"""FLOP/s to which efficiencies refer if the peak is unpublished."""


def main() -> None:
    """Fit all constants and write the data files of the package."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("train", "memory", "collectives"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    train, memory = read_samples(options.train), read_samples(options.memory)
    memory = [item for item in memory if not item.is_contradictory]
    document = {
        "stacks": [asdict(entry) for entry in fit_stacks([*train, *references.single_machines()])],
        "memory": [asdict(entry) for entry in fit_memory(memory)],
        "links": [asdict(entry) for entry in fit_links(read_rows(options.collectives))],
    }
    path = constants.CALIBRATION
    path.write_text(json.dumps(_round(document), indent=1) + "\n", encoding="utf-8")
    fitted = constants.parse_calibration(document)
    timed = [build_anchor(item, fitted) for item in train if item.step_seconds]
    write_anchors(MEASURED, timed, MEASUREMENTS[:2])


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write rows with equal keys as a CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def fit_stacks(samples: Sequence[Sample]) -> list[StackConstants]:
    """Return the constants of each chip and stack, of each chip, and of all.

    The prior of a stack is what the other stacks say of its chip, kind and source.
    """
    measured = [item for item in samples if item.step_seconds]
    groups = _group(measured, lambda item: (item.machine.chip, item.job.stack or ANY))
    stacks = [fit_stack(key, rows, PRIOR) for key, rows in groups.items()]
    for _ in range(PASSES):
        stacks = [
            fit_stack(key, rows, _predict_constants([s for s in stacks if s != entry], entry))
            for entry, (key, rows) in zip(stacks, groups.items(), strict=True)
        ]
    entries = [*stacks, *_stand_ins(stacks)]
    return [*entries, *_list_relatives(entries)]


def _list_relatives(entries: Sequence[StackConstants]) -> list[StackConstants]:
    """Return the constants of the catalog's chips without rows: those of a chip like them.

    It is the vendor's measured chip with the most similar FLOPs per byte. The efficiency changes by
    the ratio of their best measured products, if both are known.
    """
    chips, relatives = load_chips(), {}
    measured = [chips[entry.chip] for entry in entries if entry.chip in chips]
    families = {constants.find_family(chip.name) for chip in measured}
    widest = max(entry.spread for entry in entries if entry.chip == ANY)
    for chip in chips.values():
        family = constants.find_family(chip.name)
        near = [other for other in measured if other.vendor == chip.vendor and intensity(other)]
        if family in families or not near or not intensity(chip):
            continue
        nearest = min(near, key=lambda item: abs(math.log(intensity(item) / intensity(chip))))
        ratio = 1.0
        if nearest.measured_bf16_teraflops and chip.measured_bf16_teraflops:
            ratio = chip.measured_bf16_teraflops / chip.bf16_teraflops
            ratio *= nearest.bf16_teraflops / nearest.measured_bf16_teraflops
        for entry in entries:
            if entry.chip == constants.find_family(nearest.name) and entry.stack.startswith(ANY):
                relatives[family, entry.stack] = replace(
                    entry,
                    chip=family,
                    efficiency=entry.efficiency * ratio,
                    spread=widest,
                    rows=0,
                    source=nearest.name,
                )
    return list(relatives.values())


def intensity(chip: CatalogChip) -> float:
    """Return a chip's peak per byte of bandwidth; 0 if one is unknown."""
    peak = chip.bf16_teraflops or chip.fp16_teraflops
    return peak / chip.bandwidth_gb_per_s if peak and chip.bandwidth_gb_per_s else 0.0


def _stand_ins(stacks: Sequence[StackConstants]) -> list[StackConstants]:
    """Return the constants for unknown stacks: of families, of kinds, and of both."""
    entries = []
    for family in (*sorted({constants.find_family(entry.chip) for entry in stacks}), ANY):
        near = _select_family(stacks, family)
        for is_fused, kind in constants.ANY_KIND.items():
            entries.append(_stand_in(stacks, family, kind, is_fused=is_fused))
        fused_rows = sum(entry.rows for entry in near if entry.has_fused_attention)
        is_fused = 2 * fused_rows >= sum(entry.rows for entry in near)
        entries.append(_stand_in(stacks, family, ANY, is_fused=is_fused))
        kinds = {entry.stack: entry.has_fused_attention for entry in near}
        entries += [_stand_in(stacks, family, s, is_fused=fused) for s, fused in kinds.items()]
    return entries


def _select_family(stacks: Sequence[StackConstants], family: str) -> list[StackConstants]:
    return [s for s in stacks if family in (ANY, constants.find_family(s.chip))]


def _stand_in(
    stacks: Sequence[StackConstants], family: str, stack: str, *, is_fused: bool
) -> StackConstants:
    """Return the constants that stand in for an unmeasured pair of family and stack."""
    near = _select_family(stacks, family)
    exact = [s for s in near if s.stack == stack] or near
    start = replace(exact[0], chip=family, stack=stack, has_fused_attention=is_fused)
    predicted = _predict_constants(stacks, start)
    alike = [math.log(s.efficiency) for s in exact if s.has_fused_attention == is_fused]
    return replace(
        start,
        **{name: predicted[name][0] for name in FITTED},
        overlap=OVERLAP,
        spread=max(predicted["efficiency"][1], FAMILY_SPREAD, float(np.std(alike or [0.0]))),
        rows=sum(s.rows for s in exact),
        source="; ".join(sorted({s.source for s in exact})),
    )


def _predict_constants(
    stacks: Sequence[StackConstants], entry: StackConstants
) -> dict[str, tuple[float, float]]:
    """Return median and log standard deviation of each constant of a stack, by the others.

    A constant is the product of effects of the chip, its family, the kind of attention, the source
    and the stack, which are log-normal: the best linear unbiased prediction.
    """
    labels = [_list_effects(s) for s in stacks]
    return stack_effects.predict_constants(labels, _list_effects(entry), stacks, PRIOR)


def _list_effects(entry: StackConstants) -> dict[str, str]:
    """Return what a stack may have in common with others; one name for each effect.

    Efficiencies of a chip without a published peak have an arbitrary unit: they say nothing of
    other chips.
    """
    family = constants.find_family(entry.chip)
    unit = family if entry.reference_flops == REFERENCE_FLOPS else ""
    return {
        "all": unit,
        "family": family,
        "chip": entry.chip,
        "kind": unit + kind_of(entry),
        "source": entry.stack.split()[0],
        "stack": entry.stack,
    }


def kind_of(entry: StackConstants) -> str:
    """Return the name of the stacks with the same kind of attention."""
    return constants.ANY_KIND[entry.has_fused_attention]


def fit_stack(
    key: tuple[str, str], rows: Sequence[Sample], prior: Mapping[str, tuple[float, float]]
) -> StackConstants:
    """Return the constants of one chip and stack: the maximum a posteriori, with its spread."""
    start = initial_constants(key, rows)
    values = _solve(start, rows, prior)
    fitted = replace(start, **values)
    return replace(fitted, spread=_spread(fitted, rows), rows=len(rows))


def initial_constants(key: tuple[str, str], rows: Sequence[Sample]) -> StackConstants:
    """Return the medians of the prior for a chip and a stack."""
    chip, stack = key
    peak = rows[0].machine.peak_flops
    return StackConstants(
        chip=chip,
        stack=stack,
        **{name: PRIOR[name][0] for name in FITTED},
        overlap=0.0 if stack.startswith(NO_OVERLAP) else OVERLAP,
        growth=GROWTH,
        spread=ONE_ROW_SPREAD,
        rows=len(rows),
        reference_flops=peak or REFERENCE_FLOPS,
        has_fused_attention=rows[0].job.has_fused_attention,
        source="; ".join(sorted({item.source for item in rows})),
    )


def _solve(
    start: StackConstants, rows: Sequence[Sample], prior: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Return the fitted values: robust least squares of log errors, with the priors."""
    medians = np.log([prior[name][0] for name in FITTED])
    widths = np.array([prior[name][1] for name in FITTED])

    def residuals(point: np.ndarray) -> np.ndarray:
        candidate = replace(start, **dict(zip(FITTED, np.exp(point).tolist(), strict=True)))
        errors = np.array([log_error(candidate, row) for row in rows]) / NOISE
        return np.concatenate(
            [np.sign(errors) * np.sqrt(_huber(errors)), (point - medians) / widths]
        )

    solution = least_squares(residuals, medians, max_nfev=60)
    return dict(zip(FITTED, np.exp(solution.x).tolist(), strict=True))


def _huber(errors: np.ndarray, limit: float = 2.0) -> np.ndarray:
    """Return squared errors that grow linearly beyond the limit."""
    size = np.abs(errors)
    return np.where(size <= limit, size**2, 2 * limit * size - limit**2)


def log_error(entry: StackConstants, row: Sample) -> float:
    """Return log(predicted / measured) of a step."""
    single = PlannerConstants({(ANY, ANY): entry}, {}, _links())
    seconds = plan_step(row.job, row.machine, row.count, single).total
    return math.log(seconds / (row.step_seconds or math.nan))


def _spread(entry: StackConstants, rows: Sequence[Sample]) -> float:
    """Return the standard deviation of log errors, corrected for the fitted constants."""
    if len(rows) == 1:
        return ONE_ROW_SPREAD
    errors = np.array([log_error(entry, row) for row in rows])
    used = min(len(FITTED), len(rows) / 2)
    spread = math.sqrt(float((errors**2).sum()) / (len(rows) - used))
    return max(math.hypot(spread, ONE_ROW_SPREAD / len(rows)), MIN_SPREAD)


def fit_memory(samples: Sequence[Sample]) -> list[MemoryConstants]:
    """Return the constants of the memory of each stack, and of all."""
    rows = [item for item in samples if item.memory_bytes and not item.is_out_of_memory]
    groups = _group(rows, lambda item: item.job.stack or ANY)
    stacks = [_fit_memory_of(name, group, MEMORY_PRIOR) for name, group in groups.items()]
    for _ in range(PASSES):
        stacks = [
            _fit_memory_of(s.stack, groups[s.stack], _predict_memory(stacks, s.stack))
            for s in stacks
        ]
    everything = _predict_memory(stacks, ANY)
    errors = [
        memory_log_error(_fix_memory(_predict_memory(stacks, s.stack), s), row)
        for s in stacks
        for row in groups[s.stack]
    ]
    spread = math.sqrt(statistics.mean(error**2 for error in errors))
    start = replace(stacks[0], stack=ANY, spread=spread, rows=len(rows))
    sources = "; ".join(sorted({s.source for s in stacks}))
    return [_fix_memory(everything, replace(start, source=sources)), *stacks]


def _fix_memory(
    predicted: Mapping[str, tuple[float, float]], entry: MemoryConstants
) -> MemoryConstants:
    """Return an entry with the medians of a prediction."""
    values = {name: predicted[name][0] for name in MEMORY_FITTED}
    return replace(entry, **values | {"fragmentation": max(values["fragmentation"], 1.0)})


def _predict_memory(
    stacks: Sequence[MemoryConstants], stack: str
) -> dict[str, tuple[float, float]]:
    """Return median and log standard deviation of each constant of a stack, by the others."""
    others = [entry for entry in stacks if entry.stack != stack]
    labels = [_list_memory_effects(entry.stack) for entry in others]
    effects = stack_effects.MEMORY_EFFECTS
    target = _list_memory_effects(stack)
    return stack_effects.predict_constants(labels, target, others, MEMORY_PRIOR, effects)


def _list_memory_effects(stack: str) -> dict[str, str]:
    return {"all": "", "source": stack.split(maxsplit=1)[0], "stack": stack}


MEMORY_FITTED = ("context_bytes", "fragmentation", "activation_scale")
MEMORY_PRIOR = {
    "context_bytes": (1.0e9, 0.5),
    "fragmentation": (1.06, 0.08),
    "activation_scale": (1.0, 0.5),
}
MEMORY_NOISE, MEMORY_SPREAD = 0.08, 0.12
MIN_MEMORY_SPREAD = 0.1
"""Log standard deviation of one job's memory in repeated runs of BigScience."""


def _fit_memory_of(
    stack: str, rows: Sequence[Sample], prior: Mapping[str, tuple[float, float]]
) -> MemoryConstants:
    """Return the constants of one stack: the maximum a posteriori, with its spread."""
    medians = np.log([prior[name][0] for name in MEMORY_FITTED])
    widths = np.array([prior[name][1] for name in MEMORY_FITTED])
    source = "; ".join(sorted({item.source for item in rows}))
    start = MemoryConstants(stack, 0.0, 1.0, 1.0, MEMORY_SPREAD, len(rows), source)

    def build(point: np.ndarray) -> MemoryConstants:
        entry = replace(start, **dict(zip(MEMORY_FITTED, np.exp(point).tolist(), strict=True)))
        return replace(entry, fragmentation=max(entry.fragmentation, 1.0))

    def residuals(point: np.ndarray) -> np.ndarray:
        errors = np.array([memory_log_error(build(point), row) for row in rows]) / MEMORY_NOISE
        return np.concatenate(
            [np.sign(errors) * np.sqrt(_huber(errors)), (point - medians) / widths]
        )

    entry = build(least_squares(residuals, medians, max_nfev=60).x)
    errors = np.array([memory_log_error(entry, row) for row in rows])
    used = min(len(MEMORY_FITTED), len(rows) / 2)
    spread = math.sqrt(float((errors**2).sum()) / (len(rows) - used))
    return replace(
        entry, spread=max(math.hypot(spread, MEMORY_SPREAD / len(rows)), MIN_MEMORY_SPREAD)
    )


def memory_log_error(entry: MemoryConstants, row: Sample) -> float:
    """Return log(predicted / measured) of the peak memory."""
    parts = plan_parts(row.job, row.devices, entry)
    return math.log(parts.total / (row.memory_bytes or math.nan))


def default_links() -> list[LinkConstants]:
    """Return the constants of links without measurements."""
    inside, between = "8 to 34 MB on 8 GPUs, 80 % of nominal", "Ethernet and InfiniBand: assumed"
    return [
        LinkConstants(INSIDE, 0.8, 20e6, 20e-6, inside),
        LinkConstants(BETWEEN, 0.8, 10e6, 50e-6, between),
    ]


LINKED = {
    "p4de.24xlarge": ("p4de.24xlarge", "p4d.24xlarge"),
    "p5.48xlarge": ("p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge"),
}
"""MachineRates types whose network one measured system stands for."""


def fit_links(rows: Sequence[dict[str, str]]) -> list[LinkConstants]:
    """Return the constants of networks between machines: B and S_half by least squares."""
    links = default_links()
    for system, names in LINKED.items():
        chosen = [
            row
            for row in rows
            if row["system"].startswith(system)
            and int(row["n_nodes"]) > 1
            and float(row["size_bytes"]) >= MIN_BYTES
        ]
        nominal = find_machine(system).network_bandwidth
        sizes = np.array([float(row["size_bytes"]) for row in chosen])
        seconds = np.array([float(row["time_us"]) for row in chosen]) / 1e6
        machines = np.array([float(row["n_nodes"]) for row in chosen])

        def errors(point: np.ndarray) -> np.ndarray:
            efficiency, half = np.exp(point)
            moved = 2 * (machines - 1) / machines * (sizes + half)  # noqa: B023 (used at once)
            return np.log((moved / (nominal * efficiency) + 50e-6) / seconds)  # noqa: B023

        point = least_squares(errors, np.log([0.8, 3e7]), loss="soft_l1", f_scale=0.1).x
        efficiency, half = np.exp(point).tolist()
        source = chosen[0]["repo_file"]
        links += [LinkConstants(f"{n} network", efficiency, half, 50e-6, source) for n in names]
    return links


def _links() -> dict[str, LinkConstants]:
    return {entry.system: entry for entry in default_links()}


def hold_calibration(
    stacks: Sequence[StackConstants], memory: Sequence[MemoryConstants] = ()
) -> PlannerConstants:
    """Return constants as the planner reads them, without a file."""
    return PlannerConstants(
        {(entry.chip, entry.stack): entry for entry in stacks},
        {entry.stack: entry for entry in memory},
        _links(),
    )


def build_anchor(item: Sample, fitted: PlannerConstants) -> Anchor:
    """Return a measured row beside its prediction."""
    plan = plan_step(item.job, item.machine, item.count, fitted) if item.step_seconds else None
    memory = fitted.find_memory(item.job.stack) if item.memory_bytes else None
    parts = memory and plan_parts(item.job, item.devices, memory)
    return Anchor(
        f"{item.row['model']}, {item.row['strategy']}, {item.name}",
        replace(describe(item.job, item.machine, item.count), year=parse_year(item.date)),
        item.row["repo_file"] or item.source,
        measured_seconds=item.step_seconds,
        predicted_seconds=plan.total if plan else None,
        date=item.date,
        measured_bytes=item.memory_bytes,
        predicted_bytes=parts.total if parts else None,
    )


def write_anchors(path: Path, anchors: Iterable[Anchor], measurements: Sequence[str]) -> None:
    """Write the measured rows with their predictions, which the planner shows as nearest rows."""
    rows = []
    for anchor in anchors:
        values = asdict(anchor)
        features = values.pop("features")
        features.pop("year")
        figures = {name: f"{values[name]:.6g}" for name in measurements}
        rows.append(
            {
                "name": anchor.name,
                **features,
                **figures,
                "source": anchor.source,
                "date": anchor.date,
            }
        )
    write_rows(path, rows)


def _group(items: Iterable, key: Callable) -> dict:
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _round(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    return [_round(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
