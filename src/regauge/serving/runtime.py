"""A server's models and ASGI application, from start to stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from regauge.serving.http_protocol import (
    ID_HEADER,
    MODEL_KEY,
    TRUNCATED_HEADER,
    ServerContext,
    build_error_response,
    build_route,
    log_request,
    read_request_id,
)
from regauge.serving.model_set import ModelSet
from regauge.serving.openapi import DOCUMENT_ROUTES, PROTOCOLS, choose_format
from regauge.serving.request_errors import NotFoundError, RequestError
from regauge.serving.routes import search
from regauge.serving.routes.openai import format_openai_error
from regauge.serving.routes.tei import format_tei_error
from regauge.serving.search.search_service import SearchService
from regauge.serving.server_metrics import ServerMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send

    from regauge.serving.api_keys import ApiKeys
    from regauge.serving.settings import Serve

TOKENIZER_THREADS = 2
"""Threads that tokenize long texts."""


class MethodError(RequestError):
    """The route needs another method."""

    status = 405


class ServingRuntime:
    """Loads and stops an ASGI application's models; the caller serves it over HTTP."""

    def __init__(self, settings: Serve, keys: ApiKeys, executor: Executor) -> None:
        metrics = ServerMetrics()
        self._models = ModelSet(settings, metrics, executor)
        self.context = ServerContext(settings, self._models, metrics, keys, executor)
        metrics.watch(self._models.slots, lambda: self.context.state == "draining")
        self._search = SearchService(self.context, settings.search) if settings.search else None
        self.app = route_prefixes(self._models.slots, _build_app(self.context, self._search))
        """The application; it refuses requests until the models are loaded."""

    async def start(self) -> None:
        """Load the models, then the rows to search in; raises their errors."""
        await self._models.start()
        if self._search is not None:
            await self._search.open()
        self.context.state = "ready"

    async def watch(self) -> None:
        """Check for new model versions and API keys until cancelled."""
        await asyncio.gather(self._models.watch(), self.context.api_keys.watch())

    def drain(self) -> None:
        """Announce the end to clients; accepted requests are still completed."""
        self.context.state = "draining"

    async def stop(self) -> None:
        """Stop the models and the search."""
        await self._models.stop()
        if self._search is not None:
            self._search.close()


def _build_app(context: ServerContext, service: SearchService | None) -> Starlette:
    protocols = [*PROTOCOLS, (DOCUMENT_ROUTES, format_openai_error)]
    if service is not None:
        protocols.append((tuple(search.list_routes(service)), format_tei_error))
    routes = [
        build_route(context, spec, format_error)
        for specs, format_error in protocols
        for spec in specs
    ]
    refuse = _build_refusal(context, routes)
    app = Starlette(routes=routes, exception_handlers={404: refuse, 405: refuse})
    app.router.redirect_slashes = False
    if origins := context.settings.http.allowed_origins:
        names, methods = [TRUNCATED_HEADER, ID_HEADER, "Retry-After"], ["GET", "POST"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=methods,
            allow_headers=["*"],
            expose_headers=names,
        )
    return app


def route_prefixes(names: Iterable[str], app: ASGIApp) -> ASGIApp:
    """Wrap an application so that `/models/NAME/...` is its route for one model."""
    longest_first = sorted(names, key=len, reverse=True)  # a name may begin with another one
    prefixes = {f"/models/{name}": name for name in longest_first}

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        for prefix, name in prefixes.items():
            if path == prefix or path.startswith(f"{prefix}/"):
                scope = {**scope, "path": path[len(prefix) :] or "/", MODEL_KEY: name}
                break
        await app(scope, receive, send)

    return run


def _build_refusal(context: ServerContext, routes: Sequence[Route]) -> Callable[..., Response]:
    """Return a handler for requests without a matching route, which counts them."""

    def refuse(request: Request, error: Exception) -> Response:
        failure: RequestError = NotFoundError("this path does not exist")
        path, headers = request.scope["path"], {}
        if isinstance(error, HTTPException) and error.status_code == MethodError.status:
            failure = MethodError(f"this path does not accept {request.method}")
            matching = [route for route in routes if route.path_regex.match(path)]
            methods = {method for route in matching for method in route.methods or ()}
            headers["Allow"] = ", ".join(sorted(methods))
        context.metrics.count_unknown_route(failure.status)
        log_request(context, request, failure.status, 0.0)
        response = build_error_response(failure, choose_format(path))
        response.headers.update({**headers, ID_HEADER: read_request_id(request)})
        return response

    return refuse
