"""Advice of a profile, from given seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distributed.runs import settings
from regauge.accelerators import ChipPeak
from regauge.training.profile.advice import ProfileReport
from regauge.training.profile.trace import Breakdown, PartTime

KINDS = {
    "matmul": 0.5, "other": 0.3, "optimizer": 0.1, "communication": 0.0, "data": 0.0, "host": 0.1,
}  # fmt: skip


def build_report(
    kinds: dict[str, float], *, flops: float = 1e9, changes: Any = None, **facts: Any
) -> ProfileReport:
    """Return a report on two steps of one second, each with matmuls of `flops`."""
    doubled: Any = {name: 2 * seconds for name, seconds in kinds.items()}
    part = PartTime(forward=0.4, backward=1.2, matmul_seconds=2 * kinds["matmul"], flops=2 * flops)
    defaults: dict[str, Any] = {
        "breakdown": Breakdown(2, sum(doubled.values()), doubled, 0.0, {"layers.*": part}),
        "settings": settings(Path("run"), Path("data"), "mlm", **(changes or {})),
        "chip": ChipPeak("a chip"),
        "peak": 2e9,
        "faster_precision": None,
        "bytes_per_second": 1e9,
        "model_flops": 1e9,
        "padding_fraction": 0.0,
        "num_weights": 1000,
        "num_processes": 1,
    }
    return ProfileReport(**{**defaults, **facts})


def find_advice(*arguments: Any, **options: Any) -> dict[str, float]:
    """Return the largest saving of each recommended change, in seconds per step."""
    savings = {
        advice.change: advice.max_saved_seconds
        for advice in build_report(*arguments, **options).advice
    }
    assert list(savings.values()) == sorted(savings.values(), reverse=True)
    return savings


COMPILED = {"execution": {"compile": "blocks"}}


def test_advice_to_compile_merges_both_reasons() -> None:
    savings = find_advice(KINDS)
    assert savings['set execution.compile = "blocks"'] == pytest.approx(0.4)


def test_a_compiled_run_with_host_overhead_needs_larger_microbatches() -> None:
    savings = find_advice(KINDS, flops=1.2e9, changes=COMPILED, peak=2e9)
    assert savings == {
        "raise batch.microbatch_rows (2)": pytest.approx(0.1),
        "raise batch.rows (8) and the learning rate with it": pytest.approx(0.05),
    }


def test_the_largest_saving_comes_first() -> None:
    savings = find_advice({**KINDS, "data": 2.0}, changes=COMPILED)
    assert next(iter(savings)) == "raise data.workers (0) or data.prefetch_steps (2)"
    assert savings[next(iter(savings))] == pytest.approx(2.0)


def test_communication_counts_with_several_processes() -> None:
    kinds = {**KINDS, "communication": 1.0}
    change = "raise batch.rows (8), or use a faster link"
    assert change not in find_advice(kinds)
    assert find_advice(kinds, num_processes=2)[change] == pytest.approx(1.0)


def test_savings_of_padding_precision_and_recomputation() -> None:
    kinds = {**KINDS, "other": 0.0, "optimizer": 0.0, "host": 0.0}
    savings = find_advice(kinds, changes=COMPILED, padding_fraction=0.2)
    assert savings['prepare the rows with rows.layout = "packed"'] == pytest.approx(0.1)
    savings = find_advice(kinds, changes=COMPILED, faster_precision=("bf16", 4.0))
    assert savings['set execution.precision = "bf16"'] == pytest.approx(0.375)
    recomputing = {"execution": {"compile": "blocks", "activation_checkpointing": "full"}}
    savings = find_advice(kinds, changes=recomputing)
    assert savings['set execution.activation_checkpointing = "none"'] == pytest.approx(0.2)


def test_matmuls_far_below_the_peak_need_larger_microbatches() -> None:
    kinds = {**KINDS, "host": 0.0, "other": 0.0, "optimizer": 0.0}
    savings = find_advice(kinds, flops=0.15e9, changes=COMPILED, peak=1e9)
    assert savings == {"raise batch.microbatch_rows (2)": pytest.approx(0.5 - 0.25)}
    assert find_advice(kinds, flops=0.15e9, changes=COMPILED, peak=None) == {}


def test_at_most_three_changes_are_recommended_and_none_below_one_percent() -> None:
    many = dict.fromkeys(KINDS, 1.0)
    assert len(find_advice(many, num_processes=2, padding_fraction=0.5)) == 3
    few = {**KINDS, "host": 0.005, "other": 0.005, "optimizer": 0.002}
    assert find_advice(few, flops=1e9) == {}


def test_rates_follow_from_the_seconds() -> None:
    document = build_report(KINDS).document
    assert document["seconds_per_step"] == pytest.approx(1.0)
    assert document["mfu"] == pytest.approx(1e9 / 2 / 2e9)
    assert document["matmul"]["flops_per_second"] == pytest.approx(2e9)
    assert document["matmul"]["peak_fraction"] == pytest.approx(1.0)
    (row,) = document["by_module"]
    assert (row["forward_seconds"], row["backward_seconds"]) == pytest.approx((0.2, 0.6))
