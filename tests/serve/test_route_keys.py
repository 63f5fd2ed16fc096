"""Every key that the server documents is honoured, and any other one is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from regauge.serving.openapi import build_document

SCHEMAS = build_document()["components"]["schemas"]
INFER = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
BODIES: dict[str, dict[str, Any]] = {
    "EmbedBody": {"inputs": "a"},
    "EmbedAllBody": {"inputs": "a"},
    "RerankBody": {"query": "a", "texts": ["b"], "model": "reranker"},
    "PredictBody": {"inputs": "a", "model": "classifier"},
    "SimilarityBody": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "TokenizeBody": {"inputs": "a"},
    "DecodeBody": {"ids": [5]},
    "EmbeddingsBody": {"input": "a"},
    "CompletionRequest": {"prompt": "a"},
    "ChatRequest": {"messages": [{"role": "user", "content": "a"}]},
    "InferBody": {**INFER, "outputs": [{"name": "embedding"}]},
}
"""Schema -> a body with all required keys, and one of each nested object."""
OPAQUE = {"messages", "tools", "functions", "documents", "chat_template_kwargs", "data"}
"""Keys whose content the model's template or data type decides."""
UNKNOWN = "surprising"
CALLS = [
    (method, path)
    for path, operations in build_document()["paths"].items()
    for method in operations
]


def list_forms(operation: dict[str, Any]) -> list[str]:
    """Return the names of the schemas of an operation's bodies."""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return [form["$ref"].rpartition("/")[2] for form in schema.get("anyOf", [schema])]


FORMS = [
    (path, name)
    for path, operations in build_document()["paths"].items()
    if "post" in operations and "version" not in path
    for name in list_forms(operations["post"])
]


def find_reference(schema: Any) -> str | None:
    """Return the name of the object in a key's schema, if any."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return str(schema["$ref"]).rpartition("/")[2]
        parts = [*schema.get("anyOf", ()), schema.get("items")]
        return next(filter(None, map(find_reference, parts)), None)
    return None


def list_objects(
    name: str, body: Any, embed: Callable[[Any], Any]
) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """Yield each object of a body: schema, content, and a function that replaces it."""
    if isinstance(body, list):
        yield from list_objects(name, body[0], lambda item: embed([item]))
        return
    yield name, body, embed
    for key, schema in SCHEMAS[name]["properties"].items():
        reference = find_reference(schema)
        if reference is not None:
            content = body.get(key, {})
            yield from list_objects(
                reference, content, lambda item, key=key: embed({**body, key: item})
            )


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, str]:
    answer = http.post(path.replace("{model}", "encoder"), json=body)
    return answer.status_code, answer.text


@pytest.mark.parametrize(("path", "name"), FORMS)
def test_documented_keys_are_honoured_and_others_refused(
    http: httpx.Client, path: str, name: str
) -> None:
    refused = 400 if path.startswith("/v1/") or "Request" in name else 422
    if path == "/invocations" and refused == 400:
        refused = 422
    base = post(http, path, BODIES[name])
    is_text = "Request" in name
    assert base[0] == (refused if is_text else 200), base
    for schema, content, embed in list_objects(name, BODIES[name], lambda item: item):
        status, text = post(http, path, embed({**content, UNKNOWN: 1}))
        assert (status, UNKNOWN in text) == (refused, True), (schema, text)
        required = SCHEMAS[schema].get("required", ())
        for key, described in SCHEMAS[schema]["properties"].items():
            nothing = post(http, path, embed({**content, key: None}))
            if key in required:
                assert nothing[0] == refused, (schema, key)
            elif key not in content:
                assert nothing == base, (schema, key)
            wrong = post(http, path, embed({**content, key: {UNKNOWN: [1]}}))
            if described.get("description") == "Has no effect.":
                assert wrong == base, (schema, key)
            elif key not in OPAQUE:
                assert wrong[0] == refused, (schema, key)
                assert key in wrong[1] or UNKNOWN in wrong[1], (schema, key, wrong)


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_query_parameters_are_read_or_refused(http: httpx.Client, method: str, path: str) -> None:
    address = path.replace("{model}", "encoder").replace("{version}", "1")
    answer = http.request(method, f"{address}?{UNKNOWN}=1", json={})
    is_openai = path.startswith("/v1/") or path in {"/health", "/metrics", "/openapi.json", "/docs"}
    assert answer.status_code == (400 if is_openai else 422)
    assert f"does not read the query parameter '{UNKNOWN}'" in answer.text
    for parameter in build_document()["paths"][path][method].get("parameters", ()):
        if parameter["in"] == "query":
            text = f"{parameter['name']}=encoder"
            assert http.request(method, f"{address}?{text}").status_code == 200
            assert http.request(method, f"{address}?{text}&{text}").status_code == 422


def test_a_prefix_and_a_path_name_one_model(http: httpx.Client) -> None:
    for path in ("v1/models/tagger", "v2/models/tagger", "v2/models/tagger/ready"):
        assert http.get(f"/models/encoder/{path}").status_code == 404
        assert http.get(f"/models/tagger/{path}").status_code == 200
