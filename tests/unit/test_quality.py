"""How far answers are from those of fp32, against what is worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regauge.artifacts.quality import NEIGHBOURS, cosine, differences, metrics_loss, overlap


def drawn(rows: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def near(vectors: np.ndarray, place: int) -> set[int]:
    """Return which others are the nearest to one, by their products."""
    products = [
        (-float(vectors[place] @ other), number)
        for number, other in enumerate(vectors)
        if number != place
    ]
    return {number for _, number in sorted(products)[:NEIGHBOURS]}


def test_equal_answers_have_no_difference() -> None:
    values = drawn(30, 8)
    found = differences(values, values.copy(), "vectors")
    assert found == {
        "max_abs": 0.0,
        "cosine": 1.0,
        "cosine_least": 1.0,
        "neighbours@10": 1.0,
        "loss": 0.0,
    }
    assert differences(values, values, "classes")["loss"] == 0.0
    assert differences(values, values, "values")["loss"] == 0.0


def test_vectors_differ_by_their_cosines_and_their_neighbours() -> None:
    theirs = drawn(40, 8)
    ours = theirs + drawn(40, 8, seed=1) * np.float32(0.3)
    found = differences(ours, theirs, "vectors")
    cosines = [
        float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
        for a, b in zip(ours.astype(float), theirs.astype(float), strict=True)
    ]
    assert found["cosine"] == pytest.approx(sum(cosines) / 40, rel=1e-6)
    assert found["cosine_least"] == pytest.approx(min(cosines), rel=1e-6)
    assert found["loss"] == pytest.approx(1 - sum(cosines) / 40, rel=1e-5)
    assert found["max_abs"] == pytest.approx(float(np.abs(ours - theirs).max()))
    shared = sum(len(near(ours, place) & near(theirs, place)) for place in range(40))
    assert found["neighbours@10"] == pytest.approx(shared / 400)
    assert 0 < shared < 400


@pytest.mark.parametrize("rows", [11, 12, 700])
def test_neighbours_are_looked_for_among_all(rows: int) -> None:
    theirs, ours = drawn(rows, 4), drawn(rows, 4, seed=2)
    assert ("neighbours@10" in differences(ours, theirs, "vectors")) is (rows > NEIGHBOURS + 1)
    if rows > NEIGHBOURS + 1:
        kept = []
        for vectors in (ours, theirs):
            products = vectors @ vectors.T
            np.fill_diagonal(products, -np.inf)
            kept.append(np.argsort(-products, axis=1)[:, :NEIGHBOURS])
        shared = [len({*a} & {*b}) / NEIGHBOURS for a, b in zip(*kept, strict=True)]
        assert overlap(ours, theirs) == pytest.approx(np.mean(shared), rel=1e-9)
        assert overlap(theirs, theirs * 2) == 1.0


def test_a_vector_that_is_zero_in_both_is_the_same() -> None:
    ours = np.array([[0, 0], [0, 0], [3, 4], [1, 0]], np.float32)
    theirs = np.array([[0, 0], [3, 4], [3, 4], [-2, 0]], np.float32)
    assert cosine(ours, theirs).tolist() == [1.0, 0.0, 1.0, -1.0]


def test_vectors_of_another_length_and_one_direction_lose_nothing() -> None:
    theirs = drawn(5, 8)
    found = differences(theirs * 3, theirs, "vectors")
    assert found["loss"] == pytest.approx(0.0, abs=1e-6)
    assert found["loss"] >= 0.0
    assert found["max_abs"] > 1


def test_classes_lose_the_share_of_texts_that_change_theirs() -> None:
    theirs = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]], np.float32)
    ours = np.array([[2, 1, 0], [0, 1, 0], [3, 0, 1], [1, 0, 0]], np.float32)
    found = differences(ours, theirs, "classes")
    assert found == {"max_abs": 3.0, "same_class": 0.75, "loss": 0.25}


def test_a_text_loses_what_comes_behind_the_first_token_that_is_another() -> None:
    theirs = np.array([[5, 6, 7, 8], [5, 6, -1, -1], [9, 9, 9, -1], [-1, -1, -1, -1]], np.float32)
    ours = np.array([[5, 6, 1, 8], [5, 6, -1, -1], [1, 9, 9, -1], [-1, -1, -1, -1]], np.float32)
    found = differences(ours, theirs, "text")
    assert found["same_tokens"] == pytest.approx((2 + 2 + 0 + 0) / (4 + 2 + 3))
    assert found["loss"] == pytest.approx(1 - 4 / 9)
    assert differences(theirs, theirs, "text")["loss"] == 0.0
    longer = np.array([[5, 6, 7, 8]], np.float32)
    assert differences(longer, theirs[1:2], "text")["same_tokens"] == 1.0


def test_no_cosine_is_more_than_one() -> None:
    values = drawn(2000, 384)
    assert cosine(values, values * np.float32(1.1)).max() <= 1.0


@pytest.mark.parametrize("answers", ["values", "scores", "tensor"])
def test_numbers_lose_their_share_of_the_mean(answers: str) -> None:
    theirs = np.array([[1.0], [-3.0], [4.0]], np.float32)
    ours = np.array([[1.5], [-3.0], [3.5]], np.float32)
    found = differences(ours, theirs, answers)  # type: ignore[arg-type]
    assert found["max_abs"] == 0.5
    assert found["relative"] == pytest.approx((0.5 + 0.5) / (1 + 3 + 4))
    assert found["loss"] == found["relative"]


def test_numbers_that_are_all_zero_have_a_difference_all_the_same() -> None:
    zero = np.zeros((3, 1), np.float32)
    assert differences(zero, zero, "values")["loss"] == 0.0
    assert differences(zero + 0.5, zero, "values")["loss"] == 0.5


def loss(ours: float, theirs: float, items: float = 1024, name: str = "accuracy") -> float:
    return metrics_loss({name: ours, "items": items}, {name: theirs, "items": items})


def test_a_metric_loses_by_its_share_of_the_reference() -> None:
    assert loss(0.75, 1.0) == pytest.approx(0.25)
    assert loss(0.25, 0.5) == pytest.approx(0.5)
    assert loss(-0.75, -0.5, name="matthews") == pytest.approx(0.5)


def test_a_metric_that_is_better_loses_nothing() -> None:
    assert loss(0.9, 0.8) == 0.0
    assert loss(0.8, 0.8) == 0.0
    assert metrics_loss({}, {}) == 0.0


def test_the_worst_metric_counts() -> None:
    ours = {"accuracy": 0.5, "f1": 0.25, "mrr": 0.9, "items": 1024.0}
    theirs = {"accuracy": 1.0, "f1": 1.0, "mrr": 0.5, "items": 1024.0}
    assert metrics_loss(ours, theirs) == pytest.approx(0.75)


@pytest.mark.parametrize("name", ["loss", "perplexity", "calibration"])
def test_what_is_no_quality_does_not_count(name: str) -> None:
    assert loss(0.25, 1.0, name=name) == 0.0
    assert loss(1.0, 0.25, name=name) == 0.0
    assert metrics_loss({"items": 10.0}, {"items": 1000.0}) == 0.0


def test_five_items_say_nothing_and_six_do() -> None:
    assert loss((512 - 5) / 1024, 0.5) == 0.0
    assert loss((512 - 6) / 1024, 0.5) == pytest.approx(6 / 512)
    assert loss(0.0, 5 / 8, items=8) == 0.0


def test_of_a_metric_that_is_zero_nothing_can_be_lost() -> None:
    assert loss(0.0, 0.0) == 0.0
    assert loss(-1.0, 0.0) == 0.0
