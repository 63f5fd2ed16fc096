"""The server's ASGI application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from regauge.serving.http_protocol import build_error_response
from regauge.serving.openapi import build_document_routes
from regauge.serving.request_errors import NotFoundError, RequestError
from regauge.serving.routes.health import build_health_routes
from regauge.serving.routes.kserve import build_kserve_routes
from regauge.serving.routes.openai import build_openai_routes, format_openai_error
from regauge.serving.routes.openai_text import build_text_routes
from regauge.serving.routes.sagemaker import build_sagemaker_routes
from regauge.serving.routes.search import build_search_routes
from regauge.serving.routes.tei import build_tei_routes

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from regauge.serving.search.search_service import SearchService
    from regauge.serving.server_context import ServerContext


class MethodError(RequestError):
    """The route needs another method."""

    status = 405


def build_app(context: ServerContext, search: SearchService | None) -> Starlette:
    """Build the application with the routes of all protocols, and of the search page."""
    routes = [
        *build_openai_routes(context),
        *build_text_routes(context),
        *build_tei_routes(context),
        *build_kserve_routes(context),
        *build_sagemaker_routes(context),
        *build_health_routes(context),
        *build_document_routes(context),
        *(build_search_routes(context, search) if search else ()),
    ]
    refuse = _build_refusal(context)
    app = Starlette(routes=routes, exception_handlers={404: refuse, 405: refuse})
    app.router.redirect_slashes = False
    return app


def _build_refusal(context: ServerContext) -> Callable[[Request, Exception], Response]:
    """Return a handler for requests without a matching route, which counts them."""

    def refuse(request: Request, error: Exception) -> Response:
        failure: RequestError = NotFoundError("no such path")
        if isinstance(error, HTTPException) and error.status_code == MethodError.status:
            failure = MethodError(f"this path does not accept {request.method}")
        context.metrics.count_unknown_route(failure.status)
        return build_error_response(failure, format_openai_error)

    return refuse
