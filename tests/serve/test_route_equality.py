"""Every route returns what the artifact computes for a record, whatever the options."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from regauge.inference.export.model import LoadedModel
from serve.live_server import LABELS

LoadModel = Callable[[str], LoadedModel]
TEXTS = [
    "anna lives in oslo",
    "a",
    "",
    "e\u0301 \u00e9 \U0001f600",
    "nul \0 here",
    " ".join("ab" * 10),
]
QUERY = "where is anna?"
ATOL = 1e-5


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """Return an answer, which `/invocations` repeats if it has the route."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not path.startswith("/v2"):
        assert http.post("/invocations", json=body).json() == answer.json()
    return answer.json()


def infer(http: httpx.Client, model: str, columns: dict[str, list[str]]) -> dict[str, np.ndarray]:
    """Return the outputs of the Open Inference Protocol, [records, ...]."""
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        for name, texts in columns.items()
    ]
    outputs = post(http, f"/v2/models/{model}/infer", {"inputs": inputs})["outputs"]
    return {item["name"]: np.reshape(item["data"], item["shape"]) for item in outputs}


def test_vectors(http: httpx.Client, load_model: LoadModel) -> None:
    expected = load_model("encoder").encode(TEXTS)
    ids = [
        [token["id"] for token in row]
        for row in http.post("/tokenize", json={"inputs": TEXTS}).json()
    ]
    answers = [
        post(http, "/embed", {"inputs": TEXTS}),
        post(http, "/embed", {"inputs": ids, "normalize": True}),
        [item["embedding"] for item in post(http, "/v1/embeddings", {"input": TEXTS})["data"]],
        infer(http, "encoder", {"text": TEXTS})["embedding"],
    ]
    encoded = post(http, "/v1/embeddings", {"input": ids, "encoding_format": "base64"})["data"]
    answers.append([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in encoded])
    for answer in answers:
        np.testing.assert_allclose(answer, expected, atol=ATOL)
    cosines = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
    answer = post(http, "/similarity", cosines)
    np.testing.assert_allclose(answer, expected @ expected[0], atol=ATOL)


@pytest.mark.parametrize("dimensions", [1, 5, 32])
def test_shortened_vectors(http: httpx.Client, load_model: LoadModel, dimensions: int) -> None:
    first = load_model("encoder").encode(TEXTS)[:, :dimensions]
    expected = first / np.linalg.norm(first, axis=1, keepdims=True)
    body = {"input": TEXTS, "dimensions": dimensions}
    for answer in (
        post(http, "/embed", {"inputs": TEXTS, "dimensions": dimensions}),
        [item["embedding"] for item in post(http, "/v1/embeddings", body)["data"]],
    ):
        np.testing.assert_allclose(answer, expected, atol=ATOL)


def test_classes(http: httpx.Client, load_model: LoadModel) -> None:
    columns = load_model("classifier").predict(TEXTS)
    expected = np.asarray(columns["probabilities"])
    body = {"inputs": [[text] for text in TEXTS], "model": "classifier"}
    names = list(LABELS.values())
    for is_raw in (False, True):
        rows = post(http, "/predict", {**body, "raw_scores": is_raw})
        scores = np.array(
            [
                [row["score"] for name in names for row in classes if row["label"] == name]
                for classes in rows
            ]
        )
        if is_raw:
            assert np.abs(scores - expected).max() > 1e-3
            scores = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        np.testing.assert_allclose(scores, expected, atol=ATOL)
    outputs = infer(http, "classifier", {"text": TEXTS})
    np.testing.assert_allclose(outputs["probabilities"], expected, atol=ATOL)
    labels = np.asarray(columns["predicted_label"]).tolist()
    assert (
        outputs["predicted_label"].tolist()
        == labels
        == [row[0]["label"] for row in post(http, "/predict", body)]
    )


def test_scores_of_pairs(http: httpx.Client, load_model: LoadModel) -> None:
    queries = [QUERY] * len(TEXTS)
    expected = load_model("reranker").predict(queries, TEXTS)["value"]
    pairs = {"inputs": [[QUERY, text] for text in TEXTS], "model": "reranker"}
    ranking = {"query": QUERY, "texts": TEXTS, "model": "reranker"}
    for is_raw in (False, True):
        rows = post(http, "/predict", {**pairs, "raw_scores": is_raw})
        ranked = post(http, "/rerank", {**ranking, "raw_scores": is_raw, "return_text": True})
        assert [row["text"] for row in ranked] == [TEXTS[row["index"]] for row in ranked]
        by_index = {row["index"]: row["score"] for row in ranked}
        answers = np.array(
            [[row[0]["score"] for row in rows], [by_index[index] for index in range(len(TEXTS))]]
        )
        if is_raw:
            answers = 1 / (1 + np.exp(-answers))
        np.testing.assert_allclose(answers, [expected, expected], atol=ATOL)
    outputs = infer(http, "reranker", {"query": queries, "document": TEXTS})
    np.testing.assert_allclose(outputs["value"], expected, atol=ATOL)


def test_entities(http: httpx.Client, load_model: LoadModel) -> None:
    expected = load_model("tagger").predict(TEXTS)["entities"]
    served = post(http, "/predict", {"inputs": [[text] for text in TEXTS], "model": "tagger"})
    outputs = infer(http, "tagger", {"text": TEXTS})["entities"]
    for rows in (served, [json.loads(row) for row in outputs]):
        for row, known in zip(rows, expected, strict=True):
            for entity, other in zip(row, known, strict=True):
                assert entity.pop("score") == pytest.approx(other["score"], abs=ATOL)
                assert entity == {key: value for key, value in other.items() if key != "score"}
