"""Prints how far the planner is from measured rows, by cross-validation.

    python benchmarks/planner_accuracy.py --train FILE --memory FILE --facts FILE

Rows of the package's own calibration are predicted by constants that did not see them: in a stack
by folds, across stacks without the row's source. Rows that the package never saw are predicted by
its constants. With --held-out, that is how all rows are predicted. `planner_facts.py` plans the
rows of --facts, whose form is that of its MODELS and columns; --list prints each of them.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import planner_facts
import planner_references as references
from fit_planner import build_anchor, fit_memory, fit_stacks, hold_calibration
from planner_rows import Sample, read_samples

from regauge.planner import anchors, flops, intervals
from regauge.planner.calibration import PlannerConstants, load_calibration
from regauge.planner.step_time import plan_step
from regauge.planner.training_plan import plan_memory

RESULT = Path("benchmarks/results/planner_accuracy.json")
FOLDS = 5
SEEDS = (0, 1, 2)
"""Seeds of the synthetic rows."""
DIFFERENT = 0.10
"""Relative difference of two measured rows from which their order counts."""
EXACT_POINTS = 0.1
"""Difference in points within which a published MFU is reproduced."""
Prediction = tuple[Sample, float, float]
"""A row, its predicted value, and the standard deviation of its logarithm."""


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("train", "memory", "facts"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--held-out", action="store_true", help="use the package's constants")
    parser.add_argument("--list", action="store_true", help="print each public fact")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    tables: dict[str, dict[str, object]] = {}
    if options.train:
        samples = read_samples(options.train)
        tables |= _count_left_out("training rows", options.train, samples)
        seen = [] if options.held_out else _select_seen(samples, anchors.load_published())
        tables |= _judge_parts(judge_training, samples, seen)
    if options.memory:
        samples = read_samples(options.memory)
        tables |= _count_left_out("memory rows", options.memory, samples)
        seen = [] if options.held_out else samples
        tables |= _judge_parts(judge_memory, samples, seen)
    if options.facts:
        tables |= planner_facts.judge_facts(options.facts)
        for line in planner_facts.list_facts(options.facts) if options.list else ():
            sys.stdout.write(f"{line}\n")
    tables |= references.judge_references()
    for name, table in tables.items():
        sys.stdout.write(f"{name}: {json.dumps(table)}\n")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


def _count_left_out(
    kind: str, path: Path, samples: Sequence[Sample]
) -> dict[str, dict[str, object]]:
    """Return a table of the training rows whose model or machine the planner cannot express."""
    names = {sample.name for sample in samples}
    rows = [row for row in _read(path) if row["kind"] == "train" and row["id"] not in names]
    machines = Counter(f"{row['model']} on {row['hardware']}" for row in rows)
    return {f"{kind}, left out": dict(machines)} if rows else {}


def _select_seen(samples: Sequence[Sample], published: Sequence[anchors.Anchor]) -> list[Sample]:
    """Return the samples of the package's calibration, and beside them those that have no anchor.

    Rows out of memory and contradictory rows have none.
    """
    names = {anchor.name.rsplit(", ", maxsplit=1)[-1] for anchor in published}
    if not any(row.name in names for row in samples):
        return []
    return [
        row for row in samples if row.name in names or row.is_out_of_memory or row.is_contradictory
    ]


def _judge_parts(
    judge: Callable[..., dict[str, dict[str, object]]],
    samples: Sequence[Sample],
    seen: Sequence[Sample],
) -> dict[str, dict[str, object]]:
    """Return the tables of seen rows by cross-validation, and of the others by the package."""
    names = {row.name for row in seen}
    others = [row for row in samples if row.name not in names]
    tables = judge(seen, is_held_out=False) if seen else {}
    if not others:
        return tables
    prefix = "held back: " if seen else ""
    new = judge(others, is_held_out=True)
    return tables | {f"{prefix}{name}": table for name, table in new.items()}


def judge_training(samples: Sequence[Sample], *, is_held_out: bool) -> dict[str, dict[str, object]]:
    """Return the errors of step times: in the stack, across stacks, and of more machines."""
    rows = [row for row in samples if row.step_seconds]
    if is_held_out:
        fitted = load_calibration()
        known = [row for row in rows if (row.machine.chip, row.job.stack) in fitted.stacks]
        others = [row for row in rows if row not in known]
        near = anchors.load_published()
        inside = [_predict(row, fitted, near) for row in known]
        across = [_predict(row, fitted) for row in others]
    else:
        inside = _cross_validate(rows)
        across = _leave_out_sources(rows)
    more = [item for item in inside if item[0].count > 1]
    return {
        "time, same stack": _summarize(inside),
        "time, same stack, several machines": _summarize(more),
        "time, other stack (source left out)": _summarize(across),
        **{f"time, same stack, {name}": _summarize(group) for name, group in _by_source(inside)},
        **{f"time, other stack, {name}": _summarize(group) for name, group in _by_source(across)},
        "ranking of strategies": rank(inside),
        "published MFU": judge_mfu(samples),
    } | ({} if is_held_out else {"time, synthetic rows": judge_synthetic(rows)})


def judge_synthetic(rows: Sequence[Sample]) -> dict[str, object]:
    """Return the errors of step times that the planner itself predicts, with its noise.

    The noise is log-normal, with the deviation of the row's stack. An interval that is right
    covers 80 % of such rows.
    """
    fitted = load_calibration()
    predictions = []
    for seed in SEEDS:
        noise = np.random.default_rng(seed)
        predictions += _cross_validate([_draw_row(row, fitted, noise) for row in rows])
    return _summarize(predictions)


def _draw_row(row: Sample, fitted: PlannerConstants, noise: np.random.Generator) -> Sample:
    """Return a row with a step time that is drawn from its prediction."""
    fused = row.job.has_fused_attention
    spread = fitted.find_stack(row.machine.chip, row.job.stack, is_fused=fused).spread
    seconds = plan_step(row.job, row.machine, row.count, fitted).total
    return replace(row, step_seconds=seconds * math.exp(noise.normal(0.0, spread)))


def _cross_validate(rows: Sequence[Sample]) -> list[Prediction]:
    """Return predictions of rows by constants fitted to the other folds.

    Rows of a stack that the other folds lack are left out: they are predicted across stacks.
    """
    order = np.random.default_rng(0).permutation(len(rows))
    folds = {rows[position].name: index % FOLDS for index, position in enumerate(order)}
    predictions = []
    for number in range(FOLDS):
        kept = [row for row in rows if folds[row.name] != number]
        fitted = hold_calibration(fit_stacks(kept))
        near = [build_anchor(replace(row, memory_bytes=None), fitted) for row in kept]
        held = [row for row in rows if folds[row.name] == number]
        predictions += [
            _predict(row, fitted, near)
            for row in held
            if (row.machine.chip, row.job.stack) in fitted.stacks
        ]
    return predictions


def _leave_out_sources(rows: Sequence[Sample]) -> list[Prediction]:
    """Return predictions of each source by constants of the others."""
    predictions = []
    for source in sorted({row.family for row in rows}):
        kept = [row for row in rows if row.family != source]
        fitted = hold_calibration(fit_stacks(kept))
        chips = {row.machine.chip for row in kept}
        held = [row for row in rows if row.family == source and row.machine.chip in chips]
        predictions += [_predict(row, fitted) for row in held]
    return predictions


def _describe(row: Sample) -> anchors.Features:
    features = anchors.describe(row.job, row.machine, row.count)
    return replace(features, year=anchors.parse_year(row.date))


def _predict(
    row: Sample, fitted: PlannerConstants, near: Sequence[anchors.Anchor] = ()
) -> Prediction:
    seconds = plan_step(row.job, row.machine, row.count, fitted).total
    features = _describe(row)
    neighbours = anchors.find_nearest(features, near or anchors.load_published())
    factor = anchors.correct(neighbours) if near else 1.0
    fused = row.job.has_fused_attention
    spread = fitted.find_stack(row.machine.chip, row.job.stack, is_fused=fused).spread
    return row, seconds * factor, intervals.widen(spread, neighbours[0].distance)


def _summarize(predictions: Sequence[Prediction]) -> dict[str, object]:
    """Return number, mean and p90 of the relative errors, and the coverage of p10 to p90."""
    if not predictions:
        return {"rows": 0}
    errors = [abs(value / (row.step_seconds or math.nan) - 1) for row, value, _ in predictions]
    inside = [
        _covers(value, spread, row.step_seconds or math.nan) for row, value, spread in predictions
    ]
    return _figures(errors) | {"coverage": round(statistics.mean(inside), 3)}


def _covers(value: float, spread: float, measured: float) -> bool:
    interval = intervals.estimate(value, spread)
    return interval.p10 <= measured <= interval.p90


def _figures(errors: Sequence[float]) -> dict[str, object]:
    return {
        "rows": len(errors),
        "mean": round(statistics.mean(errors), 4),
        "p90": round(float(np.quantile(errors, 0.9)), 4),
    }


def _by_source(predictions: Sequence[Prediction]) -> Iterable[tuple[str, list[Prediction]]]:
    for name in sorted({row.family for row, _, _ in predictions}):
        yield name, [item for item in predictions if item[0].family == name]


def rank(predictions: Sequence[Prediction]) -> dict[str, object]:
    """Return Kendall's tau over rows of one model on one chip and number of devices.

    Pairs count if their seconds per token differ by more than 10 %, and if their jobs differ:
    several releases of one software under one job are no choice of a strategy.
    """
    groups: dict[tuple[str, str, int, int], list[tuple[float, float, object]]] = {}
    for row, value, _ in predictions:
        key = (row.row["model"], row.machine.chip, row.devices, row.job.length)
        tokens = row.job.tokens_per_pass * row.job.accumulation / row.job.parallelism.devices
        job = replace(row.job, stack=None)
        groups.setdefault(key, []).append((value / tokens, (row.step_seconds or 0) / tokens, job))
    agree = [
        (first[0] - second[0]) * (first[1] - second[1]) > 0
        for group in groups.values()
        for index, first in enumerate(group)
        for second in group[:index]
        if abs(math.log(first[1] / second[1])) > math.log1p(DIFFERENT) and first[2] != second[2]
    ]
    tau = 2 * statistics.mean(agree) - 1 if agree else None
    return {"pairs": len(agree), "tau": round(tau, 3) if tau is not None else None}


def judge_mfu(samples: Sequence[Sample]) -> dict[str, object]:
    """Return the difference between computed and published MFU, in points."""
    points = []
    for row in samples:
        if row.published_mfu and row.step_seconds and row.machine.peak_flops:
            copies = row.devices / row.job.parallelism.devices
            rows = copies * row.job.micro_batch * row.job.accumulation
            rate = rows * row.job.length / row.step_seconds / row.devices
            peak = row.machine.peak_flops * (2 if row.job.precision == "fp8" else 1)
            parameters = float(row.row["params"])
            attention = flops.attention_flops(row.job.shape, row.job.length)
            work = rate * (6.0 * parameters + attention)  # the form of many published figures
            points.append(abs(100 * work / peak - row.published_mfu))
    if not points:
        return {"rows": 0}
    return {
        "rows": len(points),
        "mean points": round(statistics.mean(points), 3),
        "within 0.1": sum(point <= EXACT_POINTS for point in points),
    }


def judge_memory(samples: Sequence[Sample], *, is_held_out: bool) -> dict[str, dict[str, object]]:
    """Return the errors of the peak memory, and the verdicts on rows that ran and that did not."""
    contradictory = [row.name for row in samples if row.is_contradictory]
    samples = [row for row in samples if not row.is_contradictory]
    order = np.random.default_rng(0).permutation(len(samples))
    folds = {samples[position].name: index % FOLDS for index, position in enumerate(order)}
    plans = []
    for number in range(1 if is_held_out else FOLDS):
        kept = [row for row in samples if folds[row.name] != number]
        fitted = load_calibration() if is_held_out else hold_calibration([], fit_memory(kept))
        held = [row for row in samples if is_held_out or folds[row.name] == number]
        plans += [(row, *_plan_memory(row, fitted)) for row in held]
    errors = [
        (row, abs(total.p50 / row.memory_bytes - 1))
        for row, total, _ in plans
        if row.memory_bytes and not row.is_out_of_memory
    ]
    inside = [
        total.p10 <= row.memory_bytes <= total.p90
        for row, total, _ in plans
        if row.memory_bytes and not row.is_out_of_memory
    ]
    by_source = {
        f"memory, {name}": _figures([error for row, error in errors if row.family == name])
        for name in sorted({row.family for row, _ in errors})
    }
    verdicts = [(row.is_out_of_memory, verdict) for row, _, verdict in plans]
    return {
        "memory": _figures([error for _, error in errors])
        | {"coverage": round(statistics.mean(inside), 3)},
        **by_source,
        "memory, contradictory rows": {"left out": contradictory},
        "memory verdicts": {
            "out of memory, called a fit": verdicts.count((True, "fits")),
            "out of memory, undecided": verdicts.count((True, "undecided")),
            "out of memory, refused": verdicts.count((True, "does not fit")),
            "ran, called a fit": verdicts.count((False, "fits")),
            "ran, undecided": verdicts.count((False, "undecided")),
            "ran, refused": verdicts.count((False, "does not fit")),
            "wrong rows": [
                row.name
                for row, _, verdict in plans
                if verdict == ("fits" if row.is_out_of_memory else "does not fit")
            ],
        },
    }


def _plan_memory(row: Sample, fitted: PlannerConstants) -> tuple[intervals.Estimate, str]:
    plan = plan_memory(row.job, row.machine, row.count, fitted, nearest=())
    return plan.total, plan.verdict


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
