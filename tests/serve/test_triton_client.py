"""The client of Triton reads models and computes their outputs, as JSON and as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from regauge.inference.export.model import LoadedModel
from serve.live_server import LABELS, LiveServer

TEXTS = ["anna lives in oslo", "a", "the café costs 7, or less", ""]
LoadModel = Callable[[str], LoadedModel]


@pytest.fixture
def triton(server: LiveServer) -> Iterator[InferenceServerClient]:
    client = InferenceServerClient(server.url.removeprefix("http://"), network_timeout=60)
    yield client
    client.close()


def build_texts(name: str, texts: list[str], *, is_binary: bool = True) -> InferInput:
    """Return an input with texts."""
    item = InferInput(name, [len(texts)], "BYTES")
    item.set_data_from_numpy(np.array([text.encode() for text in texts], object), is_binary)
    return item


def build_numbers(name: str, values: np.ndarray, *, is_binary: bool = True) -> InferInput:
    """Return an input with numbers."""
    names = {"float32": "FP32", "float64": "FP64", "int64": "INT64"}
    item = InferInput(name, list(values.shape), names[values.dtype.name])
    item.set_data_from_numpy(values, is_binary)
    return item


def test_the_server_and_its_models_are_ready(triton: InferenceServerClient) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("encoder")
    assert not triton.is_model_ready("missing")
    assert "binary_tensor_data" in triton.get_server_metadata()["extensions"]


def test_the_metadata_has_the_inputs_and_outputs(triton: InferenceServerClient) -> None:
    metadata = triton.get_model_metadata("ranker")
    assert metadata["inputs"] == [
        {"name": "query", "datatype": "BYTES", "shape": [-1]},
        {"name": "document", "datatype": "BYTES", "shape": [-1]},
        {"name": "price", "datatype": "FP32", "shape": [-1]},
        {"name": "brand", "datatype": "BYTES", "shape": [-1]},
    ]
    assert metadata["outputs"] == [{"name": "score", "datatype": "FP32", "shape": [-1]}]
    [version] = metadata["versions"]
    assert triton.get_model_metadata("ranker", version) == metadata
    config = triton.get_model_config("module", "")
    assert config["input"][0] == {"name": "image", "data_type": "TYPE_FP32", "dims": [-1, 2, 8, 8]}


@pytest.mark.parametrize("is_binary", [True, False])
def test_vectors_equal_those_of_embed(
    triton: InferenceServerClient, http: httpx.Client, *, is_binary: bool
) -> None:
    outputs = [InferRequestedOutput("embedding", binary_data=is_binary)]
    item = build_texts("text", TEXTS, is_binary=is_binary)
    result = triton.infer("encoder", [item], outputs=outputs, request_id="7")
    expected = http.post("/embed", json={"inputs": TEXTS}).json()
    np.testing.assert_allclose(result.as_numpy("embedding"), expected, atol=1e-6)
    assert result.get_response()["id"] == "7"


def test_several_outputs_are_returned(triton: InferenceServerClient, load_model: LoadModel) -> None:
    result = triton.infer("classifier", [build_texts("text", TEXTS)])
    expected = load_model("classifier").predict(TEXTS)
    labels = [label.decode() for label in result.as_numpy("predicted_label")]
    assert labels == expected["predicted_label"]
    assert set(labels) <= set(LABELS.values())
    np.testing.assert_allclose(
        result.as_numpy("probabilities"), expected["probabilities"], atol=1e-5
    )
    requested = [InferRequestedOutput("predicted_label", binary_data=False)]
    only = triton.infer("classifier", [build_texts("text", TEXTS)], outputs=requested)
    assert only.as_numpy("probabilities") is None
    assert [str(label) for label in only.as_numpy("predicted_label")] == labels


def test_entities_are_json(triton: InferenceServerClient, load_model: LoadModel) -> None:
    result = triton.infer("tagger", [build_texts("text", TEXTS[:2])])
    rows = [json.loads(row) for row in result.as_numpy("entities")]
    expected = load_model("tagger").predict(TEXTS[:2])["entities"]
    assert [[item["text"] for item in row] for row in rows] == [
        [item["text"] for item in row] for row in expected
    ]
    assert any(rows)


@pytest.mark.parametrize("is_binary", [True, False])
def test_a_ranker_reads_features(
    triton: InferenceServerClient, load_model: LoadModel, *, is_binary: bool
) -> None:
    prices = np.array([0.5, np.nan, -1.0, 2.0], np.float32)
    brands = ["1", "2", "3", "1"]
    inputs = [
        build_texts("query", TEXTS, is_binary=is_binary),
        build_texts("document", TEXTS[::-1], is_binary=is_binary),
        build_numbers("price", prices),
        build_texts("brand", brands, is_binary=is_binary),
    ]
    scores = triton.infer("ranker", inputs).as_numpy("score")
    numbers: list[Any] = [None if np.isnan(price) else float(price) for price in prices]
    values = {"price": numbers, "brand": brands}
    model = load_model("ranker")
    expected = model.predict(TEXTS, TEXTS[::-1], values=values)["score"]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    without = triton.infer("ranker", inputs[:2]).as_numpy("score")
    missing: dict[str, list[Any]] = {"price": [None] * 4, "brand": [None] * 4}
    expected = model.predict(TEXTS, TEXTS[::-1], values=missing)["score"]
    np.testing.assert_allclose(without, expected, atol=1e-4)
    assert np.abs(scores - without).max() > 1e-3


@pytest.mark.parametrize("is_binary", [True, False])
def test_a_module_reads_tensors(
    triton: InferenceServerClient, load_model: LoadModel, *, is_binary: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(5, 2, 8, 8, generator=generator)
    kinds = torch.tensor([0, 6, 3, 2, 1])
    inputs = [
        build_numbers("image", images.numpy(), is_binary=is_binary),
        build_numbers("kind", kinds.numpy(), is_binary=is_binary),
    ]
    output = triton.infer("module", inputs).as_numpy("output")
    np.testing.assert_allclose(output, load_model("module")(images, kinds).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "inputs", "status", "problem"),
    [
        ("missing", [build_texts("text", ["a"])], "404", "no model is called 'missing'"),
        ("encoder", [build_texts("texts", ["a"])], "422", "input 'text' is missing"),
        (
            "encoder",
            [build_numbers("text", np.ones(1, np.float32))],
            "422",
            "input 'text' is not of data type BYTES",
        ),
        (
            "reranker",
            [build_texts("query", ["a"]), build_texts("document", ["a", "b"])],
            "422",
            "input 'document' has 2 records, not 1",
        ),
        (
            "module",
            [
                build_numbers("image", np.ones((1, 2, 8, 8))),
                build_numbers("kind", np.ones(1, np.int64)),
            ],
            "422",
            "input 'image' is not of data type FP32",
        ),
        (
            "module",
            [
                build_numbers("image", np.ones((1, 2, 8, 9), np.float32)),
                build_numbers("kind", np.ones(1, np.int64)),
            ],
            "422",
            "input 'image' has shape [1, 2, 8, 9], not [-1, 2, 8, 8]",
        ),
        ("encoder", [build_texts("text", ["word " * 60])], "413", "longer than the 48 tokens"),
        (
            "ranker",
            [
                build_texts("query", ["a"]),
                build_texts("document", ["a"]),
                build_numbers("price", np.full(1, np.inf, np.float32)),
            ],
            "422",
            "input 'price' has a number that is not finite",
        ),
    ],
)
def test_an_error_names_its_reason(
    triton: InferenceServerClient, model: str, inputs: list[InferInput], status: str, problem: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        triton.infer(model, inputs)
    assert caught.value.status() == status
    assert problem in caught.value.message()


def test_an_unknown_output_or_version_is_an_error(triton: InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="unknown output 'score'; the"):
        triton.infer(
            "encoder", [build_texts("text", ["a"])], outputs=[InferRequestedOutput("score")]
        )
    with pytest.raises(InferenceServerException, match="does not have version '1'"):
        triton.infer("encoder", [build_texts("text", ["a"])], model_version="1")
    outputs = [InferRequestedOutput("probabilities", class_count=2)]
    with pytest.raises(InferenceServerException, match="classification is not supported"):
        triton.infer("classifier", [build_texts("text", ["a"])], outputs=outputs)


def test_a_timeout_in_microseconds_ends_a_request(triton: InferenceServerClient) -> None:
    texts = [build_texts("text", ["several words of a text"] * 512)]
    with pytest.raises(InferenceServerException) as caught:
        triton.infer("encoder", texts, timeout=200)
    assert caught.value.status() in {"429", "504"}
    assert len(triton.infer("encoder", texts, priority=2).as_numpy("embedding")) == 512


def test_options_of_texts_are_parameters(triton: InferenceServerClient) -> None:
    texts = [build_texts("text", ["word " * 60])]
    vectors = triton.infer("encoder", texts, parameters={"truncate": True}).as_numpy("embedding")
    assert vectors.shape == (1, 32)


@pytest.mark.parametrize(
    ("length", "body"),
    [("9999", b"{}"), ("x", b"{}"), ("2", b"{}"), ("-1", b"{}"), (None, b"{}\x00")],
)
def test_a_wrong_length_of_the_json_is_an_error(
    http: httpx.Client, length: str | None, body: bytes
) -> None:
    headers = {} if length is None else {"Inference-Header-Content-Length": length}
    answer = http.post("/v2/models/encoder/infer", content=body, headers=headers)
    assert answer.status_code == 422
    assert answer.json()["error"]
