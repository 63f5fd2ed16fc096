"""An invalid request body is described by its first error and its location."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest

from regauge.serving import request_body, request_errors
from regauge.serving.request_body import RequestBody
from regauge.serving.request_errors import InvalidRequestError
from regauge.serving.routes.kserve import InferBody
from regauge.serving.routes.tei import EmbedBody, PredictBody, RerankBody


@pytest.mark.parametrize(
    ("schema", "body", "problem"),
    [
        (RerankBody, b'{"texts": 5, "query": 6}', "texts: input should be a valid array"),
        (RerankBody, b'{"query": 6, "texts": 5}', "query: input should be a valid string"),
        (RerankBody, b'{"raw_scores": "x"}', "raw_scores: input should be a valid boolean"),
        (RerankBody, b"", "query: field required"),
        (RerankBody, b"[]", "input should be an object"),
        (RerankBody, b"{", "invalid JSON"),
        (EmbedBody, b'{"inputs": 5}', "inputs: input should be a valid string"),
        (EmbedBody, b'{"inputs": ["a", 5]}', "inputs.1: input should be a valid string"),
        (EmbedBody, b'{"inputs": [5, "a"]}', "inputs.1: input should be a valid integer"),
        (PredictBody, b'{"inputs": [["a"], [5]]}', "inputs.1.0: input should be a valid string"),
        (InferBody, b'{"inputs": [{"shape": 5, "name": 6}]}', "inputs.0.shape: input should be"),
    ],
)
def test_the_first_error_is_described(schema: type[RequestBody], body: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        schema.parse(body, {})
    assert caught.value.message.startswith(problem)


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": ["a", 1] * 50_000},
        {"inputs": [1.5] * 50_000},
        {"inputs": "a", **{f"k{number}": 1 for number in range(50_000)}},
    ],
    ids=["items of two types", "numbers", "unknown keys"],
)
def test_the_work_for_a_wrong_body_is_limited(body: dict[str, Any]) -> None:
    """The event loop parses bodies, so that a wrong one must not occupy it."""
    with (
        patch.object(request_body, "_find_body", wraps=request_body._find_body) as find,
        patch.object(request_errors, "_locate", wraps=request_errors._locate) as locate,
        pytest.raises(InvalidRequestError),
    ):
        EmbedBody.parse(json.dumps(body).encode(), {})
    assert find.call_count < 100
    assert locate.call_count <= request_errors.MAX_LOCATED_ERRORS
