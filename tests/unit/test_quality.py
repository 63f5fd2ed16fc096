"""Quality losses, compared with values that are computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regauge.inference.export.quality import (
    NUM_NEIGHBORS,
    cosine_similarity,
    metrics_loss,
    neighbor_overlap,
    quality_loss,
)


def random_vectors(rows: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def nearest_neighbors(vectors: np.ndarray, index: int) -> set[int]:
    """Return the indices of the nearest neighbors of a vector, by dot product."""
    products = [
        (-float(vectors[index] @ other), other_index)
        for other_index, other in enumerate(vectors)
        if other_index != index
    ]
    return {other_index for _, other_index in sorted(products)[:NUM_NEIGHBORS]}


def test_equal_outputs_have_no_loss() -> None:
    values = random_vectors(30, 8)
    row = quality_loss(values, values.copy(), "vectors")
    assert row == {
        "max_abs_error": 0.0,
        "mean_cosine": 1.0,
        "min_cosine": 1.0,
        "neighbor_overlap@10": 1.0,
        "quality_loss": 0.0,
    }
    assert quality_loss(values, values, "classes")["quality_loss"] == 0.0
    assert quality_loss(values, values, "values")["quality_loss"] == 0.0


def test_vectors_differ_by_their_cosines_and_their_neighbors() -> None:
    reference = random_vectors(40, 8)
    outputs = reference + random_vectors(40, 8, seed=1) * np.float32(0.3)
    row = quality_loss(outputs, reference, "vectors")
    cosines = [
        float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
        for a, b in zip(outputs.astype(float), reference.astype(float), strict=True)
    ]
    assert row["mean_cosine"] == pytest.approx(sum(cosines) / 40, rel=1e-6)
    assert row["min_cosine"] == pytest.approx(min(cosines), rel=1e-6)
    assert row["quality_loss"] == pytest.approx(1 - sum(cosines) / 40, rel=1e-5)
    assert row["max_abs_error"] == pytest.approx(float(np.abs(outputs - reference).max()))
    shared = sum(
        len(nearest_neighbors(outputs, index) & nearest_neighbors(reference, index))
        for index in range(40)
    )
    assert row["neighbor_overlap@10"] == pytest.approx(shared / 400)
    assert 0 < shared < 400


@pytest.mark.parametrize("rows", [11, 12, 700])
def test_neighbors_are_searched_among_all_vectors(rows: int) -> None:
    reference, outputs = random_vectors(rows, 4), random_vectors(rows, 4, seed=2)
    assert ("neighbor_overlap@10" in quality_loss(outputs, reference, "vectors")) is (
        rows > NUM_NEIGHBORS + 1
    )
    if rows > NUM_NEIGHBORS + 1:
        neighbors = []
        for vectors in (outputs, reference):
            products = vectors @ vectors.T
            np.fill_diagonal(products, -np.inf)
            neighbors.append(np.argsort(-products, axis=1)[:, :NUM_NEIGHBORS])
        shared = [len({*a} & {*b}) / NUM_NEIGHBORS for a, b in zip(*neighbors, strict=True)]
        assert neighbor_overlap(outputs, reference) == pytest.approx(np.mean(shared), rel=1e-9)
        assert neighbor_overlap(reference, reference * 2) == 1.0


def test_two_zero_vectors_are_equal() -> None:
    outputs = np.array([[0, 0], [0, 0], [3, 4], [1, 0]], np.float32)
    reference = np.array([[0, 0], [3, 4], [3, 4], [-2, 0]], np.float32)
    assert cosine_similarity(outputs, reference).tolist() == [1.0, 0.0, 1.0, -1.0]


def test_scaled_vectors_have_no_loss() -> None:
    reference = random_vectors(5, 8)
    row = quality_loss(reference * 3, reference, "vectors")
    assert row["quality_loss"] == pytest.approx(0.0, abs=1e-6)
    assert row["quality_loss"] >= 0.0
    assert row["max_abs_error"] > 1


def test_the_loss_of_classes_is_the_share_of_changed_classes() -> None:
    reference = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]], np.float32)
    outputs = np.array([[2, 1, 0], [0, 1, 0], [3, 0, 1], [1, 0, 0]], np.float32)
    row = quality_loss(outputs, reference, "classes")
    assert row == {"max_abs_error": 3.0, "class_agreement": 0.75, "quality_loss": 0.25}


def test_a_text_loses_the_tokens_from_the_first_difference_on() -> None:
    reference = np.array(
        [[5, 6, 7, 8], [5, 6, -1, -1], [9, 9, 9, -1], [-1, -1, -1, -1]], np.float32
    )
    outputs = np.array([[5, 6, 1, 8], [5, 6, -1, -1], [1, 9, 9, -1], [-1, -1, -1, -1]], np.float32)
    row = quality_loss(outputs, reference, "text")
    assert row["token_agreement"] == pytest.approx((2 + 2 + 0 + 0) / (4 + 2 + 3))
    assert row["quality_loss"] == pytest.approx(1 - 4 / 9)
    assert quality_loss(reference, reference, "text")["quality_loss"] == 0.0
    longer = np.array([[5, 6, 7, 8]], np.float32)
    assert quality_loss(longer, reference[1:2], "text")["token_agreement"] == 1.0


def test_cosine_similarity_is_at_most_one() -> None:
    values = random_vectors(2000, 384)
    assert cosine_similarity(values, values * np.float32(1.1)).max() <= 1.0


@pytest.mark.parametrize("output_kind", ["values", "scores", "tensor"])
def test_the_loss_of_numbers_is_relative_to_their_mean(output_kind: str) -> None:
    reference = np.array([[1.0], [-3.0], [4.0]], np.float32)
    outputs = np.array([[1.5], [-3.0], [3.5]], np.float32)
    row = quality_loss(outputs, reference, output_kind)  # type: ignore[arg-type]
    assert row["max_abs_error"] == 0.5
    assert row["relative_error"] == pytest.approx((0.5 + 0.5) / (1 + 3 + 4))
    assert row["quality_loss"] == row["relative_error"]


def test_the_loss_of_zeros_is_absolute() -> None:
    zero = np.zeros((3, 1), np.float32)
    assert quality_loss(zero, zero, "values")["quality_loss"] == 0.0
    assert quality_loss(zero + 0.5, zero, "values")["quality_loss"] == 0.5


def loss(outputs: float, reference: float, items: float = 1024, name: str = "accuracy") -> float:
    return metrics_loss({name: outputs, "items": items}, {name: reference, "items": items})


def test_the_loss_of_a_metric_is_relative_to_the_reference() -> None:
    assert loss(0.75, 1.0) == pytest.approx(0.25)
    assert loss(0.25, 0.5) == pytest.approx(0.5)
    assert loss(-0.75, -0.5, name="matthews") == pytest.approx(0.5)


def test_a_better_metric_has_no_loss() -> None:
    assert loss(0.9, 0.8) == 0.0
    assert loss(0.8, 0.8) == 0.0
    assert metrics_loss({}, {}) == 0.0


def test_the_worst_metric_counts() -> None:
    outputs = {"accuracy": 0.5, "f1": 0.25, "mrr": 0.9, "items": 1024.0}
    reference = {"accuracy": 1.0, "f1": 1.0, "mrr": 0.5, "items": 1024.0}
    assert metrics_loss(outputs, reference) == pytest.approx(0.75)


@pytest.mark.parametrize("name", ["loss", "perplexity", "calibration"])
def test_other_metrics_are_ignored(name: str) -> None:
    assert loss(0.25, 1.0, name=name) == 0.0
    assert loss(1.0, 0.25, name=name) == 0.0
    assert metrics_loss({"items": 10.0}, {"items": 1000.0}) == 0.0


def test_a_drop_of_five_items_is_ignored_and_of_six_is_not() -> None:
    assert loss((512 - 5) / 1024, 0.5) == 0.0
    assert loss((512 - 6) / 1024, 0.5) == pytest.approx(6 / 512)
    assert loss(0.0, 5 / 8, items=8) == 0.0


def test_a_metric_of_zero_has_no_loss() -> None:
    assert loss(0.0, 0.0) == 0.0
    assert loss(-1.0, 0.0) == 0.0
