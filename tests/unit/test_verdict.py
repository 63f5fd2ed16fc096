"""Parity of two runs: comparability, tolerance, noise, and the first divergence."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regauge.evaluation.compare.gaps import Gap, align, relative_difference, value_at
from regauge.evaluation.compare.sentences import describe_parity
from regauge.evaluation.compare.verdict import Parity, SettingDifference, compare_pair
from regauge.run_folders.run_folder import RunFolder
from regauge.run_folders.series import Series

SETTINGS: dict[str, Any] = {
    "seed": 1,
    "task": {"kind": "mlm"},
    "model": {"architecture": "bert", "attention": "sdpa"},
    "optimizer": {"learning_rate": 1e-3, "schedule": {"kind": "linear"}},
    "batch": {"rows": 8, "microbatch_rows": 4},
    "stop": {"steps": 40},
    "output": {"folder": "a"},
    "execution": {"precision": "fp32"},
}
HERE: dict[str, Any] = {"host": "a", "platform": "linux", "packages": {"torch": "2.13"}}
STEPS = range(1, 41)
LOSSES: Series = tuple((step, 8.0 - step / 10) for step in STEPS)
HELDOUT: Series = ((20, 6.0), (40, 4.0))


def run(
    name: str, losses: Series = LOSSES, heldout: Series = HELDOUT, **settings: Any
) -> RunFolder:
    return RunFolder(
        folder=Path(name),
        name=name,
        settings={**SETTINGS, "output": {"folder": name}, **settings},
        identity={"data_fingerprint": "d", "weights_checksum": "w"},
        series={
            "train/loss": losses,
            "train/averaged_steps": tuple((step, 1.0) for step, _ in losses),
            "heldout/loss": heldout,
        },
    )


def shift(series: Series, share: float, since: int = 0) -> Series:
    """Return a series with relatively larger values from a step."""
    return tuple((step, value * (1 + share * (step >= since))) for step, value in series)


def with_series(plain: RunFolder, name: str, series: Series) -> RunFolder:
    return replace(plain, series={**plain.series, name: series})


def test_equal_runs_pass() -> None:
    parity = compare_pair(run("a"), run("b"))
    assert parity.verdict == "pass"
    assert parity.first_divergence is None
    assert parity.blocking_differences == parity.compute_differences == ()
    assert [gap.difference for gap in parity.metrics[0].gaps] == [0.0, 0.0]


@pytest.mark.parametrize(("share", "verdict"), [(0.0009, "pass"), (0.0011, "fail")])
def test_the_default_tolerance_is_a_tenth_of_a_percent(share: float, verdict: str) -> None:
    other = run("b", heldout=shift(HELDOUT, share, 40))
    assert compare_pair(run("a"), other).verdict == verdict
    assert compare_pair(run("a"), other, tolerance=0.01).verdict == "pass"


@pytest.mark.parametrize(("noise", "verdict"), [(0.004, "pass"), (0.002, "fail")])
def test_a_difference_within_the_noise_passes(noise: float, verdict: str) -> None:
    repeat = run("a", heldout=shift(HELDOUT, -noise))
    parity = compare_pair(run("a"), run("b", heldout=shift(HELDOUT, 0.003)), [repeat])
    assert parity.verdict == verdict
    assert parity.has_noise_floor
    assert parity.metrics[0].limit(parity.metrics[0].gaps[-1]) == pytest.approx(noise, rel=1e-2)


def build_accuracy_run(name: str, right: tuple[int, ...], items: int, **other: Series) -> RunFolder:
    shares = tuple((20 * number, count / items) for number, count in enumerate(right, start=1))
    sizes = tuple((step, float(items)) for step, _ in shares)
    series = {"heldout/accuracy": shares, "heldout/items": sizes, **other}
    return replace(run(name), series=series)


@pytest.mark.parametrize(
    ("right", "items", "verdict"),
    [
        ((300, 364), 4780, "inconclusive"),  # five items of 359: 1.4 %
        ((300, 365), 4780, "fail"),  # six items
        ((300, 359), 4780, "inconclusive"),  # no item differs; one item would be 0.28 %
        ((0, 359), 4780, "fail"),
        ((30000, 35905), 47800, "pass"),  # one item is 0.003 %; the tolerance is 36 items
        ((30000, 35936), 47800, "fail"),
    ],
)
def test_a_metric_of_few_items_cannot_resolve_the_tolerance(
    right: tuple[int, ...], items: int, verdict: str
) -> None:
    first = (300, 359) if items == 4780 else (30000, 35900)
    pair = build_accuracy_run("a", first, items), build_accuracy_run("b", right, items)
    assert compare_pair(*pair).verdict == verdict


def test_a_metric_of_few_items_does_not_prevent_a_pass_by_the_loss() -> None:
    near, far = shift(HELDOUT, 0.0009), shift(HELDOUT, 0.0011)
    ours = build_accuracy_run("a", (300, 359), 4780, **{"heldout/loss": HELDOUT})
    parity = compare_pair(ours, build_accuracy_run("b", (300, 361), 4780, **{"heldout/loss": near}))
    assert parity.verdict == "pass"
    first, second, *_ = describe_parity(parity)
    assert first.endswith("the largest difference is heldout/loss, 0.09% at step 20.")
    assert second.startswith("heldout/accuracy differs by 0.55% at step 40; one of 4,780 items is ")
    theirs = build_accuracy_run("b", (300, 361), 4780, **{"heldout/loss": far})
    assert compare_pair(ours, theirs).verdict == "fail"
    assert compare_pair(ours, theirs, metrics=["heldout/accuracy"]).verdict == "inconclusive"
    worse = build_accuracy_run("b", (300, 320), 4780, **{"heldout/loss": near})
    assert compare_pair(ours, worse).verdict == "fail"
    assert compare_pair(ours, worse, metrics=["heldout/loss"]).verdict == "pass"


def test_a_mean_reciprocal_rank_is_not_a_share_of_items() -> None:
    def build_mrr_run(name: str, value: float) -> RunFolder:
        series = {"heldout/mrr": ((20, value),), "heldout/items": ((20, 1000.0),)}
        return replace(run(name), series=series)

    pair = build_mrr_run("a", 0.5501234), build_mrr_run("b", 0.5511334)
    assert compare_pair(*pair).verdict == "fail"


def test_later_noise_does_not_explain_an_earlier_difference() -> None:
    repeat = run("a", heldout=shift(HELDOUT, 0.01, 40))
    early = compare_pair(run("a"), run("b", heldout=shift(HELDOUT, 0.003)), [repeat])
    assert early.verdict == "fail"
    assert early.metrics[0].worst_gap.step == 20
    late = compare_pair(run("a"), run("b", heldout=shift(HELDOUT, 0.003, 40)), [repeat])
    assert late.verdict == "pass"


@pytest.mark.parametrize("since", [1, 7, 40])
def test_the_first_diverging_step_is_detected(since: int) -> None:
    def step(share: float, *noise: RunFolder) -> int | None:
        parted = compare_pair(
            run("a"), run("b", losses=shift(LOSSES, share, since)), noise
        ).first_divergence
        return parted.gap.step if parted else None

    assert step(3e-5) == since
    noisy = run("a", losses=shift(LOSSES, 1e-5))
    assert step(3e-5, noisy) is None
    assert step(9e-5, noisy) == since
    assert step(1e-9) is None


def test_gradients_diverge_before_the_loss() -> None:
    norms: Series = tuple((step, 1.0) for step in STEPS)
    ours = with_series(run("a"), "train/grad_norm", norms)
    theirs = run("b", losses=shift(LOSSES, 1e-3, 8))
    theirs = with_series(theirs, "train/grad_norm", shift(norms, 1e-3, 7))
    parted = compare_pair(ours, theirs).first_divergence
    assert parted is not None
    assert (parted.series_name, parted.gap.step) == ("train/grad_norm", 7)


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        ({}, True),
        ({"environment": {**HERE, "host": "b"}}, False),
        ({"environment": {**HERE, "packages": {"torch": "2.10"}}}, False),
        ({"environment": {}}, False),
        ({"settings": {**SETTINGS, "accelerator": {"kind": "cuda"}}}, False),
        ({"settings": {**SETTINGS, "execution": {"precision": "bf16"}}}, False),
        ({"world_sizes": frozenset({1})}, True),
        ({"world_sizes": frozenset({1, 2})}, False),
    ],
)
def test_equal_programs_on_one_machine_are_equal_to_the_last_bit(
    change: dict[str, Any],
    alike: bool,  # noqa: FBT001
) -> None:
    """Only then a difference in the last bit counts, for any noise."""
    settings = {**SETTINGS, "accelerator": {"kind": "cpu"}}
    ours = replace(run("a", losses=shift(LOSSES, 1e-9, 7)), settings=settings, environment=HERE)
    theirs = replace(run("b"), **{"settings": settings, "environment": HERE, **change})
    parity = compare_pair(ours, theirs, [run("c", losses=shift(LOSSES, 1e-6))])
    assert parity.expects_equal_bits is alike
    assert (parity.first_divergence is not None) is alike


def test_losses_over_different_steps_are_not_compared() -> None:
    """The first line after a resume averages fewer steps than the line of an undisturbed run."""
    stopped = run(
        "b", losses=tuple((step, value * 2 if step == 7 else value) for step, value in LOSSES)
    )
    windows = tuple((step, 3.0 if step == 7 else 1.0) for step in STEPS)
    stopped = with_series(stopped, "train/averaged_steps", windows)
    parity = compare_pair(run("a"), stopped)
    assert parity.first_divergence is None
    assert [gap.step for gap in parity.loss_gaps] == [step for step in STEPS if step != 7]
    unknown = with_series(stopped, "train/averaged_steps", windows[7:])
    assert compare_pair(run("a"), unknown).first_divergence is None
    assert compare_pair(unknown, unknown, [unknown]).noise_floor[0][0] == 8


def test_the_first_step_with_another_learning_rate_is_detected() -> None:
    rates: Series = tuple((step, 1e-3) for step in STEPS)
    first = with_series(run("a"), "train/learning_rate", rates)
    second = with_series(run("b"), "train/learning_rate", shift(rates, 0.01, 5))
    assert compare_pair(first, second).first_lr_difference == 5
    assert compare_pair(first, first).first_lr_difference is None


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 2}, "seed"),
        (
            {"optimizer": {"learning_rate": 2e-3, "schedule": {"kind": "linear"}}},
            "optimizer.learning_rate",
        ),
        ({"batch": {"rows": 16, "microbatch_rows": 4}}, "batch.rows"),
        ({"stop": {"steps": 80}}, "stop.steps"),
    ],
)
def test_runs_with_different_blocking_settings_are_not_comparable(
    change: dict[str, Any], key: str
) -> None:
    parity = compare_pair(run("a"), run("b", **change))
    assert parity.verdict == "inconclusive"
    assert [item.key for item in parity.blocking_differences] == [key]


@pytest.mark.parametrize("fact", ["data_fingerprint", "weights_checksum"])
def test_runs_on_different_data_or_weights_are_not_comparable(fact: str) -> None:
    ours, theirs = run("a"), replace(run("b"), identity={**run("b").identity, fact: "x"})
    [difference] = compare_pair(ours, theirs).blocking_differences
    assert (difference.baseline, difference.candidate) == (ours.identity[fact], "x")


def test_execution_settings_are_listed_and_do_not_block() -> None:
    parity = compare_pair(
        run("a"),
        run(
            "b",
            execution={"precision": "bf16"},
            batch={"rows": 8, "microbatch_rows": 2},
            model={"architecture": "bert", "attention": "eager"},
        ),
    )
    assert parity.verdict == "pass"
    keys = {item.key for item in parity.compute_differences}
    assert keys == {"execution.precision", "batch.microbatch_rows", "model.attention"}


@pytest.mark.parametrize(
    ("environments", "difference"),
    [
        (
            [{"packages": {"torch": torch, "numpy": "2.1"}} for torch in ("2.13.0", "2.9.0")],
            SettingDifference("package torch", "2.13.0", "2.9.0"),
        ),
        (  # two fp32 runs, of which one computes products in tf32
            [
                {"device": {"fp32_products": {**tf32, "float32_matmul_precision": "highest"}}}
                for tf32 in ({"allow_tf32": True}, {})
            ],
            SettingDifference("fp32 allow_tf32", baseline=True, candidate=None),
        ),
    ],
)
def test_versions_and_device_settings_are_listed_and_do_not_block(
    environments: list[dict[str, Any]], difference: SettingDifference
) -> None:
    first, second = environments
    ours, theirs = replace(run("a"), environment=first), replace(run("b"), environment=second)
    parity = compare_pair(ours, theirs)
    assert parity.compute_differences == (difference,)
    assert parity.verdict == "pass"
    assert difference.key in " ".join(describe_parity(parity))


def test_runs_without_a_common_evaluation_are_inconclusive() -> None:
    assert compare_pair(run("a"), run("b", heldout=((21, 6.0),))).verdict == "inconclusive"
    assert isinstance(compare_pair(run("a"), run("b", heldout=())), Parity)


@pytest.mark.parametrize(
    ("ours", "theirs", "share"),
    [
        (2.0, 2.0, 0.0),
        (0.0, 0.0, 0.0),
        (2.0, 1.0, 0.5),
        (-2.0, -1.0, 0.5),
        (0.0, 1.0, 1.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.inf, math.inf),
        (math.nan, math.nan, 0.0),
    ],
)
def test_a_difference_is_relative_to_the_larger_value(
    ours: float, theirs: float, share: float
) -> None:
    assert relative_difference(ours, theirs) == share
    assert relative_difference(theirs, ours) == share


def test_series_are_aligned_and_read_at_a_step() -> None:
    assert align(((1, 1.0), (3, 3.0)), ((2, 2.0), (3, 4.0))) == (Gap(3, 3.0, 4.0),)
    series: Series = ((10, 0.1), (20, 0.2))
    assert [value_at(series, step) for step in (9, 10, 15, 20, 99)] == [0.0, 0.1, 0.1, 0.2, 0.2]
