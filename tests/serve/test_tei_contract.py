"""The documented examples of text-embeddings-inference, and the forms of its answers.

Source: its README and quick tour, and its OpenAPI document.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from regauge.inference.export.model import LoadedModel
from regauge.serving.openapi import list_routes
from serve.live_server import LABELS, LIMIT, LiveServer

QUESTION = "What is Deep Learning?"
PASSAGES = ["Deep Learning is not...", "Deep learning is..."]
LoadModel = Callable[[str], LoadedModel]


def post(http: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> Any:
    """Return the JSON of an answer with a status."""
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/embed", "/"])
def test_embed_returns_a_list_of_vectors(
    http: httpx.Client, load_model: LoadModel, path: str
) -> None:
    expected = load_model("encoder").encode([QUESTION, *PASSAGES])
    one = post(http, path, {"inputs": QUESTION})
    several = post(http, path, {"inputs": [QUESTION, *PASSAGES], "truncate": True})
    np.testing.assert_allclose(one, expected[:1], atol=1e-5)
    np.testing.assert_allclose(several, expected, atol=1e-5)
    assert post(http, path, {"inputs": QUESTION, "normalize": True}) == one


@pytest.mark.parametrize("path", ["/rerank", "/"])
def test_rerank_returns_the_best_text_first(
    http: httpx.Client, load_model: LoadModel, path: str
) -> None:
    body = {"query": QUESTION, "texts": PASSAGES, "raw_scores": False, "model": "reranker"}
    ranked = post(http, path, body)
    expected = load_model("reranker").predict([QUESTION] * 2, PASSAGES)["value"]
    assert [row["index"] for row in ranked] == list(np.argsort(-expected))
    for row in ranked:
        assert row.keys() == {"index", "score"}
        assert row["score"] == pytest.approx(expected[row["index"]], abs=1e-5)
    raw = post(http, path, {**body, "raw_scores": True, "return_text": True})
    assert [row["text"] for row in raw] == [PASSAGES[row["index"]] for row in raw]
    for row in raw:
        assert 1 / (1 + np.exp(-row["score"])) == pytest.approx(expected[row["index"]], abs=1e-5)


@pytest.mark.parametrize("path", ["/predict", "/"])
def test_predict_returns_the_best_class_first(
    http: httpx.Client, load_model: LoadModel, path: str
) -> None:
    texts = ["I like you.", "I hate pineapples"]
    expected = load_model("classifier").predict(texts)["probabilities"]
    single = post(http, path, {"inputs": texts[0], "model": "classifier"})
    batch = post(http, path, {"inputs": [[text] for text in texts], "model": "classifier"})
    assert [row["label"] for row in single] == [LABELS[index] for index in np.argsort(-expected[0])]
    assert batch[0][0].keys() == {"score", "label"}
    for row, probabilities in zip(batch, expected, strict=True):
        scores = {item["label"]: item["score"] for item in row}
        for index, label in LABELS.items():
            assert scores[label] == pytest.approx(probabilities[index], abs=1e-5)


def test_predict_reads_pairs(http: httpx.Client, load_model: LoadModel) -> None:
    pairs = [[QUESTION, passage] for passage in PASSAGES]
    expected = load_model("reranker").predict([QUESTION] * 2, PASSAGES)["value"]
    single = post(http, "/predict", {"inputs": pairs[0], "model": "reranker"})
    batch = post(http, "/predict", {"inputs": pairs, "model": "reranker"})
    assert single[0]["score"] == pytest.approx(expected[0], abs=1e-5)
    assert [row[0]["score"] for row in batch] == pytest.approx(list(expected), abs=1e-5)


@pytest.mark.parametrize("path", ["/similarity", "/"])
def test_similarity_is_a_cosine(http: httpx.Client, load_model: LoadModel, path: str) -> None:
    inputs = {"source_sentence": QUESTION, "sentences": PASSAGES}
    parameters = {"truncate": False}
    cosines = post(http, path, {"inputs": inputs, "parameters": parameters})
    vectors = load_model("encoder").encode([QUESTION, *PASSAGES])
    assert cosines == pytest.approx(list(vectors[1:] @ vectors[0]), abs=1e-5)


def test_tokenize_and_decode_are_inverse(http: httpx.Client) -> None:
    [row] = post(http, "/tokenize", {"inputs": "anna lives here"})
    assert row[0].keys() == {"id", "text", "special", "start", "stop"}
    assert (row[0]["special"], row[0]["start"]) == (True, None)
    assert (row[1]["text"], row[1]["start"], row[1]["stop"]) == ("a", 0, 1)
    ids = [token["id"] for token in row]
    assert post(http, "/decode", {"ids": ids}) == ["anna lives here"]
    assert post(http, "/decode", {"ids": [ids, ids[1:-1]]}) == ["anna lives here"] * 2
    [text] = post(http, "/decode", {"ids": ids, "skip_special_tokens": False})
    assert text == "[CLS] anna lives here [SEP]"
    plain = post(http, "/tokenize", {"inputs": ["anna lives here"], "add_special_tokens": False})
    assert [token["id"] for token in plain[0]] == ids[1:-1]


@pytest.mark.parametrize("texts", [["anna lives here"], ["a", "anna lives in oslo", ""]])
def test_token_vectors_pool_to_the_vector_of_the_text(http: httpx.Client, texts: list[str]) -> None:
    rows = post(http, "/embed_all", {"inputs": texts})
    tokens = post(http, "/tokenize", {"inputs": texts})
    assert [len(row) for row in rows] == [len(row) for row in tokens]
    means = np.array([np.mean(row, axis=0) for row in rows])
    vectors = means / np.linalg.norm(means, axis=1, keepdims=True)
    expected = post(http, "/embed", {"inputs": texts})
    np.testing.assert_allclose(vectors, expected, atol=1e-4)
    ids = [[token["id"] for token in row] for row in tokens]
    for first, second in zip(post(http, "/embed_all", {"inputs": ids}), rows, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)


def test_token_vectors_have_the_limits_of_texts(http: httpx.Client) -> None:
    long = "word " * 60
    assert "longer" in post(http, "/embed_all", {"inputs": long}, 413)["error"]
    [row] = post(http, "/embed_all", {"inputs": long, "truncate": True})
    assert len(row) == LIMIT
    many = {"inputs": ["1 " * 40] * 500}
    assert "tokens are over the limit" in post(http, "/embed_all", many, 413)["error"]
    post(http, "/embed_all", {"inputs": "a", "model": "classifier"}, 422)


def test_token_vectors_keep_the_deadline(http: httpx.Client) -> None:
    post(http, "/embed_all", {"inputs": "anna"})
    body = {"inputs": ["anna lives in oslo"] * 200}
    late = http.post("/embed_all", json=body, headers={"Regauge-Timeout-Ms": "5"})
    assert late.status_code in {413, 429, 504}
    refused = http.post("/embed_all", json=body, headers={"Regauge-Timeout-Ms": "0.001"})
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) >= 1
    assert len(post(http, "/embed_all", body)) == 200


def test_brackets_in_texts_are_not_lists(http: httpx.Client) -> None:
    body = {"inputs": ["[{" * 40_000, "a"], "truncate": True}
    assert len(post(http, "/embed", body)) == 2


def test_info_has_the_limits(http: httpx.Client) -> None:
    info = http.get("/info").json()
    assert info["model_id"] == "encoder"
    assert info["max_input_length"] == LIMIT
    assert info["max_client_batch_size"] == 2048
    assert {"model_sha", "model_dtype", "model_type", "auto_truncate", "version"} <= info.keys()


def test_without_a_name_the_first_fitting_model_answers(http: httpx.Client) -> None:
    """So clients that name no model reach each kind: the first model is the encoder."""
    ranked = {"query": QUESTION, "texts": PASSAGES}
    for path, body, model in [
        ("/rerank", ranked, "reranker"),
        ("/", ranked, "reranker"),
        ("/predict", {"inputs": QUESTION}, "classifier"),
        ("/embed", {"inputs": QUESTION}, "encoder"),
        ("/", {"inputs": QUESTION}, "encoder"),
    ]:
        assert post(http, path, body) == post(http, path, {**body, "model": model})


@pytest.mark.parametrize("model", ["classifier", "reranker", "tagger"])
def test_a_path_names_the_model(http: httpx.Client, model: str) -> None:
    body = {"inputs": [["anna lives here"] if model != "reranker" else [QUESTION, PASSAGES[0]]]}
    expected = post(http, "/predict", {**body, "model": model})
    for path in (f"/models/{model}/predict", f"/models/{model}/", f"/models/{model}"):
        assert post(http, path, body) == expected
    assert http.get(f"/models/{model}/info").json()["model_id"] == model
    assert [row["id"] for row in http.get(f"/models/{model}/v1/models").json()["data"]] == [model]


BODIES: dict[str, dict[str, Any]] = {
    "/": {"inputs": "a"},
    "/embed": {"inputs": "a"},
    "/embed_all": {"inputs": "a"},
    "/rerank": {"query": "a", "texts": ["b"], "model": "reranker"},
    "/predict": {"inputs": "a", "model": "classifier"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "/tokenize": {"inputs": "a"},
    "/decode": {"ids": [5]},
    "/invocations": {"inputs": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v2/models/{model:path}/infer": {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
    },
}
"""Route -> a body with all required keys."""


@pytest.mark.parametrize(
    "path",
    [spec.path for spec in list_routes() if spec.method == "POST" and "version" not in spec.path],
)
def test_a_key_is_honoured_or_refused(http: httpx.Client, path: str) -> None:
    body = BODIES[path]
    address = path.replace("{model:path}", "encoder")
    answer = http.post(address, json={**body, "surprising": 1})
    assert answer.status_code == (400 if path.startswith("/v1/") else 422)
    assert "surprising: extra inputs are not permitted" in answer.text
    if "completions" not in path:
        nulls = dict.fromkeys(["model", "parameters"] if path == "/similarity" else ["model"])
        assert http.post(address, json={**nulls, **body}).status_code == 200


@pytest.mark.parametrize(
    ("path", "changes", "problem"),
    [
        ("/tokenize", {"truncate": True}, "truncate"),
        ("/embed", {"truncation_direction": "Middle"}, "truncation_direction"),
        ("/embed", {"inputs": [5, 6], "prompt_name": "query"}, "prompt_name"),
        ("/predict", {"model": "tagger", "raw_scores": True}, "raw_scores|probabilities"),
        ("/similarity", {"parameters": {"top_k": 3}}, "parameters.top_k"),
        ("/v1/embeddings", {"input": [5, 6], "prompt_name": "query"}, "prompt_name"),
        ("/v1/chat/completions", {"logprobs": 0}, "logprobs is not supported"),
    ],
)
def test_an_option_without_an_effect_is_refused(
    http: httpx.Client, path: str, changes: dict[str, Any], problem: str
) -> None:
    answer = http.post(path, json={**BODIES[path], **changes})
    assert answer.status_code == (400 if path.startswith("/v1/") else 422)
    assert re.search(problem, answer.text)


def test_a_text_is_truncated_on_the_requested_side(http: httpx.Client) -> None:
    text = " ".join(f"anna {number}" for number in range(60))
    [tokens] = post(http, "/tokenize", {"inputs": text, "add_special_tokens": False})
    ids = [token["id"] for token in tokens]
    room = LIMIT - 2
    parts = {"Left": ids[-room:], "right": ids[:room], None: ids[:room]}
    for side, part in parts.items():
        body = {"inputs": text, "truncate": True, "truncation_direction": side}
        expected = post(http, "/embed", {"inputs": part})
        np.testing.assert_allclose(post(http, "/embed", body), expected, atol=1e-5)


def test_the_key_user_of_openai_is_accepted(http: httpx.Client) -> None:
    body = {"input": "a", "user": "someone", "model": "encoder"}
    assert len(post(http, "/v1/embeddings", body)["data"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        ("/embed", {"inputs": []}, 422, "inputs is empty"),
        ("/embed", {}, 422, "inputs: field required"),
        ("/embed", {"inputs": "word " * 60}, 413, "longer than the 48 tokens"),
        ("/embed", {"inputs": "w" * 4000}, 413, "longer than the 48 tokens"),
        ("/embed", {"inputs": ["a"] * 2049}, 413, "2049 records are over the limit"),
        ("/embed", {"inputs": [[1]] * 70_000}, 413, "more than 65536 lists, objects"),
        ("/", {"inputs": [{}] * 70_000}, 413, "more than 65536 lists, objects"),
        ("/invocations", {"input": [[1]] * 70_000}, 413, "more than 65536 lists, objects"),
        ("/tokenize", {"inputs": ["a " * 70] * 1000}, 413, "140000 characters are over"),
        ("/tokenize", {"inputs": "a " * 600_000}, 413, "over the limit of 1048576 bytes"),
        ("/decode", {"ids": [12345] * 200_000}, 413, "over the limit of 1048576 bytes"),
        ("/embed", {"inputs": "a", "model": "missing"}, 404, "no model is called 'missing'"),
        ("/embed", {"inputs": [4000]}, 422, "token 4000 is over"),
        ("/rerank", {"query": "a", "texts": ["b"], "model": "encoder"}, 422, "returns vectors"),
        ("/predict", {"inputs": "a", "model": "encoder"}, 422, "the model returns vectors"),
        ("/models/encoder/embed", {"inputs": "a", "model": "tagger"}, 404, "the path names"),
        ("/models/missing/embed", {"inputs": "a"}, 404, "this path does not exist"),
        ("/embed_sparse", {"inputs": "a"}, 404, "this path does not exist"),
    ],
)
def test_an_error_names_its_reason(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, problem: str
) -> None:
    document = post(http, path, body, status)
    text = document["error"] if isinstance(document["error"], str) else document["error"]["message"]
    assert problem in text


def test_unknown_paths_and_methods_share_one_label(http: httpx.Client) -> None:
    def count(status: int) -> float:
        name = f'regauge_serve_requests_total{{model="",route="unknown",status="{status}"}} '
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = [count(404), count(405)]
    assert http.get("/missing-a").status_code == 404
    assert http.get("/missing-b").status_code == 404
    assert http.get("/embed").status_code == 405
    assert [count(404), count(405)] == [before[0] + 2, before[1] + 1]
    assert "missing-" not in http.get("/metrics").text


def test_requests_are_counted_by_model(http: httpx.Client) -> None:
    """The model of a route is counted whether the request names it or not, and if it fails."""

    def count(model: str, status: int) -> float:
        labels = f'model="{model}",route="/predict",status="{status}"'
        name = f"regauge_serve_requests_total{{{labels}}} "
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    expected = {("classifier", 200): 2, ("tagger", 422): 1, ("", 404): 1, ("encoder", 422): 1}
    before = {key: count(*key) for key in expected}
    post(http, "/predict", {"inputs": "a"})
    post(http, "/models/classifier/predict", {"inputs": "a"})
    post(http, "/predict", {"inputs": "a", "model": "tagger", "raw_scores": True}, 422)
    post(http, "/predict", {"inputs": "a", "model": "missing"}, 404)
    post(http, "/predict", {"inputs": "a", "model": "encoder"}, 422)
    assert {key: count(*key) - before[key] for key in expected} == expected
    latency = 'regauge_serve_request_seconds_count{model="classifier",route="/predict"}'
    assert latency in http.get("/metrics").text


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/embed", {"POST"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("DELETE", "/", {"POST"}),
        ("PUT", "/v2/models/encoder/infer", {"GET", "HEAD", "POST"}),
    ],
)
def test_a_wrong_method_names_the_right_ones(
    http: httpx.Client, method: str, path: str, allowed: set[str]
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["Allow"].split(", ")) == allowed


@pytest.mark.parametrize("status", [404, 405])
def test_an_error_has_the_form_of_its_protocol(http: httpx.Client, status: int) -> None:
    paths = {404: ("/v1/unknown", "/v2/unknown"), 405: ("/v1/embeddings", "/v2/health/live")}
    openai_error, kserve_error = (
        http.request("PATCH" if status == 405 else "GET", path) for path in paths[status]
    )
    assert (openai_error.status_code, kserve_error.status_code) == (status, status)
    assert openai_error.json()["error"]["type"] == "invalid_request_error"
    assert isinstance(kserve_error.json()["error"], str)
    if status == 405:
        assert http.get("/embed").json()["error_type"] == "Validation"


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate"])
def test_a_compressed_body_is_read(http: httpx.Client, encoding: str) -> None:
    body = json.dumps({"inputs": QUESTION}).encode()
    content = zlib.compress(body) if encoding == "deflate" else gzip.compress(body)
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    answer = http.post("/embed", content=content, headers=headers)
    assert answer.json() == post(http, "/embed", {"inputs": QUESTION})
    for damaged in (content[:-9], b"{}"):
        assert http.post("/embed", content=damaged, headers=headers).status_code == 422
    bomb = gzip.compress(b" " * (17 << 20))
    assert http.post("/embed", content=bomb, headers=headers).status_code == 413
    unknown = http.post("/embed", content=body, headers={"Content-Encoding": "br"})
    assert (unknown.status_code, unknown.headers["Accept-Encoding"]) == (415, "gzip, deflate")


def test_health_and_metrics_are_open(http: httpx.Client, server: LiveServer) -> None:
    health = http.get("/health")
    assert health.status_code == 200
    assert health.json()["models"].keys() == server.artifacts.keys()
    assert http.get("/info").status_code == http.get("/v2/health/ready").status_code == 200
    metrics = http.get("/metrics").text
    counted = set(re.findall(r'regauge_serve_request_seconds_count\{route="(.+?)"', metrics))
    assert counted >= {"/info"}
    assert not counted & {"/health", "/metrics", "/v2/health/ready"}
