"""OpenAI's embeddings API: `/v1/embeddings` and `/v1/models`.

Schema source: https://platform.openai.com/docs/api-reference/embeddings.
"""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from regauge.serving.http_protocol import (
    Call,
    EmptyBody,
    RouteSpec,
    build_json_response,
    build_output_response,
)
from regauge.serving.model_version import Inputs, scale_to_length_1
from regauge.serving.request_body import RequestBody
from regauge.serving.request_errors import InvalidRequestError, RequestError
from regauge.serving.text_generation.openai_requests import IGNORED_KEYS

if TYPE_CHECKING:
    from starlette.responses import Response

    from regauge.serving.http_protocol import ServerContext
    from regauge.serving.model_version import Outputs

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
ERROR_TYPES = {
    401: "authentication_error",
    424: "server_error",
    429: "rate_limit_error",
}
"""Status -> OpenAI's error type; others are `invalid_request_error` or `server_error`."""
STATUSES = {413: 400, 415: 400, 422: 400}
"""Status -> OpenAI's status for a request that must be corrected."""


class EmbeddingsBody(RequestBody):
    """Body of `/v1/embeddings`."""

    ignored_keys = IGNORED_KEYS

    input: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True)]
    ) = Field(union_mode="left_to_right")
    """A text, several texts, the tokens of a text, or the tokens of several texts."""
    model: str | None = None
    """Model name; by default the first model for this route."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or the bytes of fp32 numbers in base64."""
    dimensions: int | None = Field(default=None, ge=1)
    """Vector width: the first numbers, normalized again."""
    prompt_name: str | None = None
    """Name of a prompt of the model to prepend."""


def format_openai_error(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Return the status from which OpenAI's clients choose an error class, and the document."""
    status = STATUSES.get(error.status, error.status)
    default = "server_error" if status >= 500 else "invalid_request_error"  # noqa: PLR2004
    kind = ERROR_TYPES.get(status, default)
    document = {"message": error.message, "type": kind, "param": error.field, "code": error.code}
    return status, {"error": document}


async def create_embeddings(call: Call[EmbeddingsBody]) -> Response:
    """Answer `/v1/embeddings`: an item with a vector per text."""
    body = call.body
    inputs = Inputs.from_field("input", body.input, body.prompt_name)
    options = call.build_options(inputs.num_records)
    async with call.use_model(body.model, ("vectors",)) as model:
        outputs = await model.compute(inputs, options)
    if not call.context.settings.item_errors:
        outputs.check_failures()
    vectors = shorten_vectors(outputs.values, body.dimensions)
    num_tokens = int(outputs.num_tokens.sum())
    document = {
        "object": "list",
        "data": _format_items(vectors, outputs, body.encoding_format),
        "model": model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return build_output_response(call.context, document, outputs)


def _format_items(
    vectors: np.ndarray, outputs: Outputs, encoding: Literal["float", "base64"]
) -> list[dict[str, Any]]:
    """Return an item per record: a vector, or an error."""
    if encoding == "base64":
        rows: Any = [base64.b64encode(row).decode() for row in vectors.astype("<f4", copy=False)]
    else:
        rows = list(np.ascontiguousarray(vectors))
    items = [
        {"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)
    ]
    for index, problem in outputs.failures.items():
        error = {"message": problem, "type": "invalid_request_error"}
        items[index] = {"object": "error", "index": index, "embedding": [], "error": error}
    return items


def shorten_vectors(
    vectors: np.ndarray, dimensions: int | None, *, normalizes: bool = True
) -> np.ndarray:
    """Return the first numbers of each vector, [records, dimensions], by default normalized again.

    Raises InvalidRequestError if the vectors have fewer numbers.
    """
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if dimensions > vectors.shape[1]:
        problem = f"dimensions is over the {vectors.shape[1]} numbers of a vector"
        raise InvalidRequestError(problem)
    vectors = vectors[:, :dimensions]
    return scale_to_length_1(vectors) if normalizes else vectors


async def _list_models(call: Call[EmptyBody]) -> Response:
    prefix = call.choose_name(None)
    names = [prefix] if prefix is not None else list(call.context.models.slots)
    document = {"object": "list", "data": [_describe_model(call.context, name) for name in names]}
    return build_json_response(document)


async def _show_model(call: Call[EmptyBody]) -> Response:
    slot = call.context.models.find(call.choose_name(call.request.path_params["model"]))
    return build_json_response(_describe_model(call.context, slot.name))


def _describe_model(context: ServerContext, name: str) -> dict[str, Any]:
    version = context.models.find(name).current
    created = int(version.loaded_at if version else time.time())
    return {"id": name, "object": "model", "created": created, "owned_by": "regauge"}


ROUTES: tuple[RouteSpec[Any], ...] = (
    RouteSpec(
        "POST", "/v1/embeddings", create_embeddings, EmbeddingsBody, "Return vectors of texts."
    ),
    RouteSpec("GET", "/v1/models", _list_models, EmptyBody, "Return the models."),
    RouteSpec("GET", "/v1/models/{model:path}", _show_model, EmptyBody, "Return a model."),
)
