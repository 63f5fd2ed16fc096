"""What a profile says to change first, from seconds that are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distributed.runs import settings
from regauge.accelerators import Chip
from regauge.training.profile.advice import ProfileReport
from regauge.training.profile.breakdown import Breakdown, Part

KINDS = {
    "products": 0.5, "other": 0.3, "optimizer": 0.1, "communication": 0.0, "data": 0.0, "host": 0.1,
}  # fmt: skip


def observed(
    kinds: dict[str, float], *, flops: float = 1e9, changes: Any = None, **facts: Any
) -> ProfileReport:
    """Return two steps of a second; products compute `flops` in each."""
    doubled: Any = {name: 2 * seconds for name, seconds in kinds.items()}
    part = Part(forward=0.4, backward=1.2, products=2 * kinds["products"], flops=2 * flops)
    known: dict[str, Any] = {
        "times": Breakdown(2, sum(doubled.values()), doubled, 0.0, {"layers.*": part}),
        "settings": settings(Path("run"), Path("data"), "mlm", **(changes or {})),
        "chip": Chip("a chip"),
        "peak": 2e9,
        "faster": None,
        "bytes_per_second": 1e9,
        "model_flops": 1e9,
        "padding": 0.0,
        "weights": 1000,
        "processes": 1,
    }
    return ProfileReport(**{**known, **facts})


def advised(*given: Any, **named: Any) -> dict[str, float]:
    """Return the seconds of a step that each change saves at most."""
    found = {each.change: each.seconds for each in observed(*given, **named).advice}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    return found


COMPILED = {"execution": {"compile": "blocks"}}


def test_an_eager_run_is_told_to_compile_once_for_both_reasons() -> None:
    found = advised(KINDS)
    assert found['set execution.compile = "blocks"'] == pytest.approx(0.4)


def test_a_compiled_run_whose_device_waits_gets_larger_microbatches() -> None:
    found = advised(KINDS, flops=1.2e9, changes=COMPILED, peak=2e9)
    assert found == {
        "raise batch.microbatch_rows (2)": pytest.approx(0.1),
        "raise batch.rows (8) and the learning rate with it": pytest.approx(0.05),
    }


def test_waiting_for_rows_comes_first_where_it_takes_most() -> None:
    found = advised({**KINDS, "data": 2.0}, changes=COMPILED)
    assert next(iter(found)) == "raise data.workers (0) or data.prefetch_steps (2)"
    assert found[next(iter(found))] == pytest.approx(2.0)


def test_communication_counts_where_there_are_others() -> None:
    kinds = {**KINDS, "communication": 1.0}
    change = "raise batch.rows (8), or use a faster link"
    assert change not in advised(kinds)
    assert advised(kinds, processes=2)[change] == pytest.approx(1.0)


def test_padding_precision_and_recomputation_cost_their_shares_of_computing() -> None:
    kinds = {**KINDS, "other": 0.0, "optimizer": 0.0, "host": 0.0}
    found = advised(kinds, changes=COMPILED, padding=0.2)
    assert found['prepare the rows with rows.layout = "packed"'] == pytest.approx(0.1)
    found = advised(kinds, changes=COMPILED, faster=("bf16", 4.0))
    assert found['set execution.precision = "bf16"'] == pytest.approx(0.375)
    again = {"execution": {"compile": "blocks", "activation_checkpointing": "full"}}
    found = advised(kinds, changes=again)
    assert found['set execution.activation_checkpointing = "none"'] == pytest.approx(0.2)


def test_products_below_the_usual_share_of_the_peak_are_too_small() -> None:
    kinds = {**KINDS, "host": 0.0, "other": 0.0, "optimizer": 0.0}
    found = advised(kinds, flops=0.15e9, changes=COMPILED, peak=1e9)
    assert found == {"raise batch.microbatch_rows (2)": pytest.approx(0.5 - 0.25)}
    assert advised(kinds, flops=0.15e9, changes=COMPILED, peak=None) == {}


def test_three_changes_are_shown_and_none_that_saves_less_than_a_hundredth() -> None:
    many = dict.fromkeys(KINDS, 1.0)
    assert len(advised(many, processes=2, padding=0.5)) == 3
    few = {**KINDS, "host": 0.005, "other": 0.005, "optimizer": 0.002}
    assert advised(few, flops=1e9) == {}


def test_shares_and_rates_follow_from_the_seconds() -> None:
    told = observed(KINDS).document
    assert told["seconds_per_step"] == pytest.approx(1.0)
    assert told["mfu"] == pytest.approx(1e9 / 2 / 2e9)
    assert told["products"]["flops_per_second"] == pytest.approx(2e9)
    assert told["products"]["share_of_peak"] == pytest.approx(1.0)
    (row,) = told["parts"]
    assert (row["forward"], row["backward"]) == pytest.approx((0.2, 0.6))
