"""The server's OpenAPI document, and a page to show it."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse

from regauge import __version__
from regauge.serving.http_protocol import (
    OPEN_PATHS,
    Call,
    EmptyBody,
    RouteSpec,
    build_json_response,
    build_route,
)
from regauge.serving.routes.health import list_health_routes
from regauge.serving.routes.kserve import list_kserve_routes
from regauge.serving.routes.openai import format_openai_error, list_openai_routes
from regauge.serving.routes.openai_text import list_text_routes
from regauge.serving.routes.sagemaker import list_sagemaker_routes
from regauge.serving.routes.tei import list_tei_routes

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.routing import Route

    from regauge.serving.server_context import ServerContext

STATUSES = {
    200: "The answer.",
    401: "No valid API key.",
    404: "No such model.",
    408: "The request did not arrive in time.",
    413: "A text, the body or the number of records is over a limit.",
    415: "The content type is not supported.",
    422: "The request has a wrong form.",
    424: "The model failed to compute a record.",
    429: "The queue is full; Retry-After has the seconds to wait.",
    503: "The server is starting, draining, or without a worker.",
    504: "The request was not answered in time.",
}
"""Status -> meaning."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = (
    "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1em .3em}td{padding:.2rem 1rem .2rem 0;vertical-align:top}"
    ":root{color-scheme:light dark}"
)


def build_document_routes(context: ServerContext) -> list[Route]:
    """Return the routes for the document and the page."""
    return [build_route(context, spec, format_openai_error) for spec in _list_document_routes()]


def _list_document_routes() -> list[RouteSpec[Any]]:
    return [
        RouteSpec("GET", "/openapi.json", _show_document, EmptyBody, "Return this document."),
        RouteSpec("GET", "/docs", _show_page, EmptyBody, "Show this document as a page."),
    ]


def list_routes() -> list[RouteSpec[Any]]:
    """Return the specifications of all documented routes."""
    return [
        *list_openai_routes(),
        *list_text_routes(),
        *list_tei_routes(),
        *list_kserve_routes(),
        *list_sagemaker_routes(),
        *list_health_routes(),
    ]


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
    names = re.findall(r"{(\w+)", spec.path)
    if names:
        schema = {"type": "string"}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": schema} for name in names
        ]
    if spec.path not in OPEN_PATHS:
        operation["security"] = [{"key": []}, {}]
    if spec.body is not EmptyBody:
        template = "#/components/schemas/{model}"
        schema = spec.body.model_json_schema(ref_template=template)
        schemas.update(schema.pop("$defs", {}))
        schemas[spec.body.__name__] = schema
        reference = {"$ref": template.format(model=spec.body.__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    return operation


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
