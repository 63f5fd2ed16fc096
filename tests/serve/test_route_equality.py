"""Routes, files and Python return one output for a record, whatever the options."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from end_to_end.predicting import read_table
from regauge.cli import main
from regauge.inference.export.model import LoadedModel
from regauge.system.errors import DataError, SettingsError
from serve.live_server import LABELS, LIMIT, PROMPTS

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
LONG = [" ".join(["anna lives in oslo"] * 40), "oslo " * 300]
"""Texts of more tokens than the models read."""
ATOL = 1e-5
Predict = Callable[..., pa.Table]
"""Returns the table that `predict` writes for an artifact, columns of records and options."""


@pytest.fixture
def predict(tiny_artifacts: Mapping[str, Path], tmp_path: Path) -> Predict:
    def write(name: str, columns: dict[str, list[Any]], *options: str) -> pa.Table:
        folder, source = tmp_path / name, tmp_path / f"{name}.jsonl"
        records = [
            {key: value for key, value in zip(columns, row, strict=True) if value is not None}
            for row in zip(*columns.values(), strict=True)
        ]
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        paths = ["--source", str(source), "--to", str(folder)]
        given = ["execution.executor=inline", "predict.batch_invariant=false", *options]
        assert main(["predict", str(tiny_artifacts[name]), *paths, *given]) == 0
        return read_table(folder)

    return write


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """Return an answer, which `/invocations` repeats if it has the route."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not path.startswith("/v2"):
        assert http.post("/invocations", json=body).json() == answer.json()
    return answer.json()


def infer(
    http: httpx.Client, model: str, columns: dict[str, list[Any]], **parameters: Any
) -> dict[str, np.ndarray]:
    """Return the outputs of the Open Inference Protocol, [records, ...]."""
    inputs = [
        {
            "name": name,
            "datatype": "FP32" if isinstance(cells[0], float) else "BYTES",
            "shape": [len(cells)],
            "data": cells,
        }
        for name, cells in columns.items()
    ]
    body = {"inputs": inputs, "parameters": parameters}
    outputs = post(http, f"/v2/models/{model}/infer", body)["outputs"]
    return {item["name"]: np.reshape(item["data"], item["shape"]) for item in outputs}


def read_vectors(table: pa.Table) -> np.ndarray:
    return np.array(table["embedding"].to_pylist())


def test_vectors(http: httpx.Client, load_model: LoadModel, predict: Predict) -> None:
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
        read_vectors(predict("encoder", {"text": TEXTS}, "output.dtype=float32")),
    ]
    encoded = post(http, "/v1/embeddings", {"input": ids, "encoding_format": "base64"})["data"]
    answers.append([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in encoded])
    for answer in answers:
        np.testing.assert_allclose(answer, expected, atol=ATOL)
    cosines = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
    answer = post(http, "/similarity", cosines)
    np.testing.assert_allclose(answer, expected @ expected[0], atol=ATOL)


def test_prompts(http: httpx.Client, load_model: LoadModel, predict: Predict) -> None:
    """A named prompt precedes the text; a name that the model does not have is refused."""
    model, prompt = load_model("encoder"), {"prompt_name": "query"}
    expected = model.encode([PROMPTS["query"] + text for text in TEXTS])
    options = ["output.dtype=float32", "predict.prompt_name=query"]
    body = {"input": TEXTS, **prompt}
    for answer in (
        model.encode(TEXTS, prompt="query"),
        model.predict(TEXTS, prompt="query")["embedding"],
        post(http, "/embed", {"inputs": TEXTS, **prompt}),
        [item["embedding"] for item in post(http, "/v1/embeddings", body)["data"]],
        infer(http, "encoder", {"text": TEXTS}, **prompt)["embedding"],
        read_vectors(predict("encoder", {"text": TEXTS}, *options)),
    ):
        np.testing.assert_allclose(answer, expected, atol=ATOL)
    cosines = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}, "parameters": prompt}
    answer = post(http, "/similarity", cosines)
    np.testing.assert_allclose(answer, expected @ expected[0], atol=ATOL)


UNKNOWN = {"prompt_name": "surprising"}
PREDICTED = {"inputs": "a", "model": "classifier"}
INPUT = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/embed", {"inputs": "a", **UNKNOWN}, 422),
        ("/embed_all", {"inputs": "a", **UNKNOWN}, 422),
        ("/predict", {**PREDICTED, **UNKNOWN}, 422),
        ("/rerank", {"query": "a", "texts": ["b"], "model": "reranker", **UNKNOWN}, 422),
        ("/rerank", {"query": "a", "texts": ["b"], "model": "ranker", **UNKNOWN}, 422),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": UNKNOWN},
            422,
        ),
        ("/tokenize", {"inputs": "a", **UNKNOWN}, 422),
        ("/v1/embeddings", {"input": "a", **UNKNOWN}, 400),
        ("/v2/models/encoder/infer", {"inputs": [INPUT], "parameters": UNKNOWN}, 422),
    ],
)
def test_unknown_prompts_are_refused(
    http: httpx.Client, path: str, body: dict[str, Any], status: int
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, "surprising" in answer.text) == (status, True), answer.text


def test_unknown_prompts_are_refused_in_python_and_by_predict(
    load_model: LoadModel, tiny_artifacts: Mapping[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="surprising"):
        load_model("encoder").encode("a", prompt="surprising")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    paths = ["--source", str(tmp_path / "texts.jsonl"), "--to", str(tmp_path / "out")]
    command = ["predict", str(tiny_artifacts["encoder"]), *paths]
    assert main([*command, "predict.prompt_name=surprising"]) == 2


def test_truncated_texts(http: httpx.Client, load_model: LoadModel, predict: Predict) -> None:
    """Files and Python truncate; a route does only if the request says so."""
    model, cut = load_model("encoder"), {"truncate": True}
    expected = model.encode(LONG)
    inputs = [{**INPUT, "shape": [2], "data": LONG}]
    for path, body, status in (
        ("/embed", {"inputs": LONG}, 413),
        ("/predict", {"inputs": [[LONG[0]]], "model": "classifier"}, 413),
        ("/v1/embeddings", {"input": LONG}, 400),
        ("/v2/models/encoder/infer", {"inputs": inputs}, 413),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, "tokens" in answer.text) == (status, True), answer.text
    for answer in (
        post(http, "/embed", {"inputs": LONG, **cut}),
        infer(http, "encoder", {"text": LONG}, **cut)["embedding"],
        read_vectors(predict("encoder", {"text": LONG}, "output.dtype=float32")),
    ):
        np.testing.assert_allclose(answer, expected, atol=ATOL)
    tokens = [
        [token["id"] for token in row if not token["special"]]
        for row in http.post("/tokenize", json={"inputs": LONG}).json()
    ]
    room = LIMIT - 2
    for side, ids in (
        ("Left", [row[-room:] for row in tokens]),
        ("right", [row[:room] for row in tokens]),
    ):
        answer = post(http, "/embed", {"inputs": LONG, **cut, "truncation_direction": side})
        np.testing.assert_allclose(answer, post(http, "/embed", {"inputs": ids}), atol=ATOL)


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


def test_classes(http: httpx.Client, load_model: LoadModel, predict: Predict) -> None:
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
    table = predict("classifier", {"text": TEXTS})
    for shares in (outputs["probabilities"], table["probabilities"].to_pylist()):
        np.testing.assert_allclose(shares, expected, atol=ATOL)
    labels = np.asarray(columns["predicted_label"]).tolist()
    assert (
        outputs["predicted_label"].tolist()
        == labels
        == table["predicted_label"].to_pylist()
        == [row[0]["label"] for row in post(http, "/predict", body)]
    )


def test_scores_of_pairs(http: httpx.Client, load_model: LoadModel, predict: Predict) -> None:
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
    columns = {"query": queries, "document": TEXTS}
    outputs = infer(http, "reranker", columns)["value"]
    for scores in (outputs, predict("reranker", columns)["value"].to_numpy()):
        np.testing.assert_allclose(scores, expected, atol=ATOL)


FEATURES: dict[str, list[Any]] = {"price": [0.5, 1.0, -2.0], "brand": ["b1", "b2", ""]}


@pytest.mark.parametrize("names", [(), ("price",), ("brand",), ("price", "brand")])
def test_scores_of_a_ranker(
    http: httpx.Client, load_model: LoadModel, predict: Predict, names: tuple[str, ...]
) -> None:
    """Features that a record lacks are missing values on each way to the model."""
    columns = {"query": [QUERY] * 3, "document": ["w5 w6", "w7", "w8 w9"]}
    values = {name: FEATURES[name] for name in names}
    model = load_model("ranker")
    expected = model.predict(*columns.values(), values=values)["score"]
    absent = {name: [None] * 3 for name in FEATURES if name not in names}
    answers = [
        model.predict(*columns.values(), values={**values, **absent})["score"],
        infer(http, "ranker", {**columns, **values})["score"],
        predict("ranker", {**columns, **values})["score"].to_numpy(),
    ]
    if not names:
        pairs = {"inputs": list(zip(*columns.values(), strict=True)), "model": "ranker"}
        answers.append([row[0]["score"] for row in post(http, "/predict", pairs)])
        body = {"query": QUERY, "texts": columns["document"], "model": "ranker"}
        ranked = {row["index"]: row["score"] for row in post(http, "/rerank", body)}
        answers.append([ranked[index] for index in range(3)])
    for answer in answers:
        np.testing.assert_allclose(answer, expected, atol=ATOL)
    without = model.predict(*columns.values())["score"]
    assert np.allclose(expected, without, atol=1e-3) == (not names)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"prise": [1.0]}, "does not read the feature 'prise'"),
        ({"price": [1.0, 2.0]}, "'price' has 2 values for 1 records"),
        ({"price": ["cheap"]}, "'price' has str cheap is not"),
    ],
)
def test_invalid_features_are_refused(
    http: httpx.Client, load_model: LoadModel, values: dict[str, list[Any]], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        load_model("ranker").predict("w5", "w6", values=values)
    body = {"query": "w5", "texts": ["w6"], "model": "ranker", **values}
    assert http.post("/rerank", json=body).status_code == 422


def test_entities(http: httpx.Client, load_model: LoadModel, predict: Predict) -> None:
    expected = load_model("tagger").predict(TEXTS)["entities"]
    served = post(http, "/predict", {"inputs": [[text] for text in TEXTS], "model": "tagger"})
    outputs = infer(http, "tagger", {"text": TEXTS})["entities"]
    written = predict("tagger", {"text": TEXTS})["entities"].to_pylist()
    for rows in (served, [json.loads(row) for row in outputs], written):
        for row, known in zip(rows, expected, strict=True):
            for entity, other in zip(row, known, strict=True):
                assert entity.pop("score") == pytest.approx(other["score"], abs=ATOL)
                assert entity == {key: value for key, value in other.items() if key != "score"}
