"""Classes and values of texts and pairs equal the logits of transformers, text by text."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers import reference
from peers.architectures import PEERS, POSITIONS, SHORT_LIMIT
from peers.comparison import check_equal, compute_in_batches
from peers.folders import save_classifier
from peers.texts import QUERIES, TEXTS

import regauge

LABELS = {0: "calm", 1: "glad", 2: "sad"}
WITHOUT_CLASSES = {"olmo", "olmo2", "granite", "cohere"}
"""Architectures for which transformers has no sequence classification."""
CLASSIFIERS = [name for name in PEERS if name not in WITHOUT_CLASSES]


@pytest.mark.parametrize("limit", [POSITIONS, SHORT_LIMIT])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_equal_transformers(name: str, limit: int, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, name, limit, id2label=LABELS)
    logits = reference.compute_logits(folder, TEXTS)
    model = regauge.load(folder, threads=1)
    for size in (1, 16):
        probabilities = compute_in_batches(
            lambda batch: model.predict(batch)["probabilities"], size, TEXTS
        )
        check_equal(probabilities, logits.softmax(1).numpy())
    labels = [LABELS[int(index)] for index in logits.argmax(1)]
    assert model.predict(TEXTS)["predicted_label"] == labels


@pytest.mark.parametrize("limit", [POSITIONS, SHORT_LIMIT])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_values_of_pairs_equal_transformers(name: str, limit: int, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, name, limit, num_labels=1)
    expected = reference.compute_logits(folder, QUERIES, TEXTS).sigmoid().numpy()
    model = regauge.load(folder, threads=1, text={"pair_fields": ("query", "document")})
    for size in (1, 16):
        values = compute_in_batches(
            lambda *pair: model.predict(*pair)["value"], size, QUERIES, TEXTS
        )
        check_equal(values[:, None], expected)
