"""Two runs side by side: what prevents a comparison, what differs, and what noise explains."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regauge.comparison.gaps import Gap, aligned, at, relative
from regauge.comparison.sentences import sentences
from regauge.comparison.verdict import Parity, compare
from regauge.results.run_folder import Run
from regauge.results.series import Series

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


def run(name: str, losses: Series = LOSSES, heldout: Series = HELDOUT, **settings: Any) -> Run:
    return Run(
        folder=Path(name),
        name=name,
        settings={**SETTINGS, "output": {"folder": name}, **settings},
        facts={"data_identity": "d", "weights": "w"},
        series={"train/loss": losses, "heldout/loss": heldout},
    )


def moved(series: Series, share: float, since: int = 0) -> Series:
    return tuple((step, value * (1 + share * (step >= since))) for step, value in series)


def test_equal_runs_pass() -> None:
    found = compare(run("a"), run("b"))
    assert found.verdict == "pass"
    assert (found.parted, found.prevented, found.computed) == (None, (), ())
    assert [gap.share for gap in found.metrics[0].gaps] == [0.0, 0.0]


@pytest.mark.parametrize(("share", "verdict"), [(0.0009, "pass"), (0.0011, "fail")])
def test_the_band_is_a_tenth_of_a_percent(share: float, verdict: str) -> None:
    assert compare(run("a"), run("b", heldout=moved(HELDOUT, share, 40))).verdict == verdict
    assert compare(run("a"), run("b", heldout=moved(HELDOUT, share)), band=0.01).verdict == "pass"


@pytest.mark.parametrize(("noise", "verdict"), [(0.004, "pass"), (0.002, "fail")])
def test_what_a_run_differs_from_itself_is_no_difference(noise: float, verdict: str) -> None:
    again = run("a", heldout=moved(HELDOUT, -noise))
    found = compare(run("a"), run("b", heldout=moved(HELDOUT, 0.003)), [again])
    assert found.verdict == verdict
    assert found.measured
    assert found.metrics[0].limit(found.metrics[0].gaps[-1]) == pytest.approx(noise, rel=1e-2)


def counted(name: str, right: tuple[int, ...], items: int, **other: Series) -> Run:
    shares = tuple((20 * number, count / items) for number, count in enumerate(right, start=1))
    sizes = tuple((step, float(items)) for step, _ in shares)
    series = {"heldout/accuracy": shares, "heldout/items": sizes, **other}
    return replace(run(name), series=series)


@pytest.mark.parametrize(
    ("right", "items", "verdict"),
    [
        ((300, 364), 4780, "not shown"),  # five of 359: 1.4 %
        ((300, 365), 4780, "fail"),  # six
        ((300, 359), 4780, "not shown"),  # none, and one would be 0.28 %
        ((0, 359), 4780, "fail"),
        ((30000, 35905), 47800, "pass"),  # one is 0.003 %, and the band is 36
        ((30000, 35936), 47800, "fail"),
    ],
)
def test_a_count_of_few_items_shows_no_tenth_of_a_percent(
    right: tuple[int, ...], items: int, verdict: str
) -> None:
    first = (300, 359) if items == 4780 else (30000, 35900)
    assert compare(counted("a", first, items), counted("b", right, items)).verdict == verdict


def test_a_count_of_few_items_does_not_stand_in_the_way_of_a_loss() -> None:
    near, far = moved(HELDOUT, 0.0009), moved(HELDOUT, 0.0011)
    ours = counted("a", (300, 359), 4780, **{"heldout/loss": HELDOUT})
    found = compare(ours, counted("b", (300, 361), 4780, **{"heldout/loss": near}))
    assert found.verdict == "pass"
    first, second, *_ = sentences(found)
    assert "at most heldout/loss by 0.09% at step 20" in first
    assert "heldout/accuracy differs by 0.55% at step 40, where one of 4,780 items is" in second
    theirs = counted("b", (300, 361), 4780, **{"heldout/loss": far})
    assert compare(ours, theirs).verdict == "fail"
    assert compare(ours, theirs, judging=["heldout/accuracy"]).verdict == "not shown"
    worse = counted("b", (300, 320), 4780, **{"heldout/loss": near})
    assert compare(ours, worse).verdict == "fail"
    assert compare(ours, worse, judging=["heldout/loss"]).verdict == "pass"


def test_a_mean_of_ranks_is_no_count() -> None:
    def ranked(name: str, value: float) -> Run:
        series = {"heldout/mrr": ((20, value),), "heldout/items": ((20, 1000.0),)}
        return replace(run(name), series=series)

    assert compare(ranked("a", 0.5501234), ranked("b", 0.5511334)).verdict == "fail"


def test_noise_that_comes_later_excuses_nothing_before() -> None:
    again = run("a", heldout=moved(HELDOUT, 0.01, 40))
    early = compare(run("a"), run("b", heldout=moved(HELDOUT, 0.003)), [again])
    assert early.verdict == "fail"
    assert early.metrics[0].worst.step == 20
    late = compare(run("a"), run("b", heldout=moved(HELDOUT, 0.003, 40)), [again])
    assert late.verdict == "pass"


@pytest.mark.parametrize("since", [1, 7, 40])
def test_the_first_step_that_parts_is_named(since: int) -> None:
    def step(share: float, *noise: Run) -> int | None:
        parted = compare(run("a"), run("b", losses=moved(LOSSES, share, since)), noise).parted
        return parted.gap.step if parted else None

    assert step(3e-5) == since
    noisy = run("a", losses=moved(LOSSES, 1e-5))
    assert step(3e-5, noisy) is None
    assert step(9e-5, noisy) == since
    assert step(1e-9) is None


def test_gradients_part_before_the_loss_does() -> None:
    norms: Series = tuple((step, 1.0) for step in STEPS)
    ours, theirs = (
        replace(each, series={**each.series, "train/gradient_norm": norm})
        for each, norm in (
            (run("a"), norms),
            (run("b", losses=moved(LOSSES, 1e-3, 8)), moved(norms, 1e-3, 7)),
        )
    )
    parted = compare(ours, theirs).parted
    assert parted is not None
    assert (parted.name, parted.gap.step) == ("train/gradient_norm", 7)


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        ({}, True),
        ({"environment": {**HERE, "host": "b"}}, False),
        ({"environment": {**HERE, "packages": {"torch": "2.10"}}}, False),
        ({"environment": {}}, False),
        ({"settings": {**SETTINGS, "accelerator": {"kind": "cuda"}}}, False),
        ({"settings": {**SETTINGS, "execution": {"precision": "bf16"}}}, False),
    ],
)
def test_equal_programs_on_one_machine_are_equal_to_the_last_bit(
    change: dict[str, Any],
    alike: bool,  # noqa: FBT001
) -> None:
    """Only there is a difference of the last bit a difference, noise or not."""
    settings = {**SETTINGS, "accelerator": {"kind": "cpu"}}
    ours = replace(run("a", losses=moved(LOSSES, 1e-9, 7)), settings=settings, environment=HERE)
    theirs = replace(run("b"), **{"settings": settings, "environment": HERE, **change})
    found = compare(ours, theirs, [run("c", losses=moved(LOSSES, 1e-6))])
    assert found.alike is alike
    assert (found.parted is not None) is alike


def test_another_rate_is_named_with_its_step() -> None:
    rates: Series = tuple((step, 1e-3) for step in STEPS)
    first = replace(run("a"), series={**run("a").series, "train/learning_rate": rates})
    second = replace(
        run("b"), series={**run("b").series, "train/learning_rate": moved(rates, 0.01, 5)}
    )
    assert compare(first, second).rescheduled == 5
    assert compare(first, first).rescheduled is None


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
def test_runs_of_other_settings_are_not_comparable(change: dict[str, Any], key: str) -> None:
    found = compare(run("a"), run("b", **change))
    assert found.verdict == "not shown"
    assert [each.key for each in found.prevented] == [key]


@pytest.mark.parametrize("fact", ["data_identity", "weights"])
def test_other_data_and_other_weights_are_not_comparable(fact: str) -> None:
    other = replace(run("b"), facts={**run("b").facts, fact: "x"})
    [found] = compare(run("a"), other).prevented
    assert (found.ours, found.theirs) == ({"data_identity": "d", "weights": "w"}[fact], "x")


def test_how_it_is_computed_is_listed_and_prevents_nothing() -> None:
    found = compare(
        run("a"),
        run(
            "b",
            execution={"precision": "bf16"},
            batch={"rows": 8, "microbatch_rows": 2},
            model={"architecture": "bert", "attention": "eager"},
        ),
    )
    assert found.verdict == "pass"
    keys = {each.key for each in found.computed}
    assert keys == {"execution.precision", "batch.microbatch_rows", "model.attention"}


def test_another_torch_is_how_it_is_computed() -> None:
    ours, theirs = (
        replace(run(name), environment={"packages": {"torch": torch, "numpy": "2.1"}})
        for name, torch in (("a", "2.13.0"), ("b", "2.9.0"))
    )
    [found] = compare(ours, theirs).computed
    assert (found.key, found.ours, found.theirs) == ("package torch", "2.13.0", "2.9.0")


def test_without_an_evaluation_in_common_nothing_is_shown() -> None:
    assert compare(run("a"), run("b", heldout=((21, 6.0),))).verdict == "not shown"
    assert isinstance(compare(run("a"), run("b", heldout=())), Parity)


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
def test_a_difference_is_relative_to_the_larger(ours: float, theirs: float, share: float) -> None:
    assert relative(ours, theirs) == share
    assert relative(theirs, ours) == share


def test_steps_are_aligned_and_looked_up() -> None:
    assert aligned(((1, 1.0), (3, 3.0)), ((2, 2.0), (3, 4.0))) == (Gap(3, 3.0, 4.0),)
    series: Series = ((10, 0.1), (20, 0.2))
    assert [at(series, step) for step in (9, 10, 15, 20, 99)] == [0.0, 0.1, 0.1, 0.2, 0.2]
