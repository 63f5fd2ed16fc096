"""The server's routes (`PROTOCOLS`), their OpenAPI document, and a page to show it."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse

from regauge import __version__
from regauge.serving.http_protocol import (
    OPEN_PATHS,
    PRIORITIES,
    Call,
    EmptyBody,
    RouteSpec,
    build_json_response,
)
from regauge.serving.routes import health, kserve, openai, openai_text, sagemaker, tei
from regauge.serving.routes.kserve import format_kserve_error
from regauge.serving.routes.openai import format_openai_error
from regauge.serving.routes.tei import format_tei_error

if TYPE_CHECKING:
    from starlette.responses import Response

    from regauge.serving.http_protocol import FormatError
    from regauge.serving.request_body import RequestBody

STATUSES = {
    200: "The answer.",
    400: "On OpenAI's routes, the request has a wrong form, or a text or the body is over a limit.",
    401: "No valid API key.",
    403: "A web page from another origin sent the request.",
    404: "No such model.",
    408: "The request did not arrive in time.",
    413: "A text, the body or the number of records is over a limit.",
    415: "The content type or encoding is not supported.",
    422: "The request has a wrong form.",
    424: "The model failed to compute a record.",
    429: "The queue is full; Retry-After has the seconds to wait.",
    503: "The server is starting, draining, or without a worker.",
    504: "The request was not answered in time.",
}
"""Status -> meaning."""
HEADERS: dict[str, dict[str, Any]] = {
    "Regauge-Timeout-Ms": {"type": "number", "exclusiveMinimum": 0},
    "Regauge-Priority": {"enum": list(PRIORITIES)},
    "X-Request-Id": {"type": "string"},
}
"""Request header for routes with a body -> schema."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = (
    "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1em .3em}td{padding:.2rem 1rem .2rem 0;vertical-align:top}"
    ":root{color-scheme:light dark}"
)


PROTOCOLS = (
    (openai.ROUTES, format_openai_error),
    (openai_text.ROUTES, format_openai_error),
    (tei.ROUTES, format_tei_error),
    (kserve.ROUTES, format_kserve_error),
    (sagemaker.ROUTES, format_tei_error),
    (health.ROUTES, format_openai_error),
)
"""Documented routes of each protocol, and how it formats errors."""


def choose_format(path: str) -> FormatError:
    """Return how the protocol of a path without a route formats errors; OpenAI's by default."""
    start = path.split("/")[1]
    for specs, format_error in PROTOCOLS:
        if any(spec.path.split("/")[1] == start for spec in specs):
            return format_error
    return format_openai_error


def list_routes() -> list[RouteSpec[Any]]:
    """Return the specifications of all documented routes."""
    return [spec for routes, _ in PROTOCOLS for spec in routes]


def build_document() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for spec in list_routes():
        path = re.sub(r":path}", "}", spec.path)
        paths.setdefault(path, {})[spec.method.lower()] = _build_operation(spec, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Regauge server", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _build_operation(spec: RouteSpec[Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a route's operation; the body schema is added to `schemas`."""
    operation: dict[str, Any] = {
        "summary": spec.summary,
        "operationId": spec.method.lower() + re.sub(r"\W+", "_", spec.path).rstrip("_"),
        "responses": {str(status): {"description": text} for status, text in STATUSES.items()},
    }
    text = {"type": "string"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in re.findall(r"{(\w+)", spec.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": text} for name in spec.query]
    if spec.method == "POST":
        parameters += [
            {"name": name, "in": "header", "schema": schema} for name, schema in HEADERS.items()
        ]
    if parameters:
        operation["parameters"] = parameters
    if spec.path not in OPEN_PATHS:
        operation["security"] = [{"key": []}, {}]
    if spec.body is not EmptyBody:
        forms = [_refer_to(body, schemas) for body in spec.body.forms or (spec.body,)]
        schema = {"anyOf": forms} if spec.body.forms else forms[0]
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _refer_to(body: type[RequestBody], schemas: dict[str, Any]) -> dict[str, str]:
    """Return a reference to a body's schema, which is added to `schemas`."""
    template = "#/components/schemas/{model}"
    schema = body.model_json_schema(ref_template=template)
    schemas.update(schema.pop("$defs", {}))
    schemas[body.__name__] = schema
    return {"$ref": template.format(model=body.__name__)}


async def _show_document(call: Call[EmptyBody]) -> Response:
    del call
    return build_json_response(build_document())


async def _show_page(call: Call[EmptyBody]) -> Response:
    del call
    rows = "".join(
        f"<tr><td><code>{spec.method} {html.escape(spec.path)}</code>"
        f"<td>{html.escape(spec.summary)}"
        for spec in list_routes()
    )
    statuses = "".join(
        f"<tr><td>{status}<td>{html.escape(text)}" for status, text in STATUSES.items()
    )
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Regauge server</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>"
        f"<h1>Regauge server</h1><p>The schemas are in <a href=openapi.json>openapi.json</a>."
        f"<h2>Routes</h2><table>{rows}</table><h2>Statuses</h2><table>{statuses}</table>"
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})


DOCUMENT_ROUTES: tuple[RouteSpec[Any], ...] = (
    RouteSpec("GET", "/openapi.json", _show_document, EmptyBody, "Return this document."),
    RouteSpec("GET", "/docs", _show_page, EmptyBody, "Show this document as a page."),
)
