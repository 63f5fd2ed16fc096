"""Health and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from regauge.serving.http_protocol import Call, EmptyBody, RouteSpec, build_json_response

if TYPE_CHECKING:
    from regauge.serving.http_protocol import ServerContext


def find_status(context: ServerContext) -> tuple[str, int]:
    """Return the server's state and HTTP status: 200 if it accepts requests."""
    if context.state != "ready":
        return context.state, 503
    if any(not version.worker_pids for version in context.models.loaded_versions):
        return "no worker is ready", 503
    return ("overloaded", 200) if context.has_refused else ("ready", 200)


async def show_health(call: Call[EmptyBody]) -> Response:
    """Answer `/health`: the state of the server and the models."""
    state, status = find_status(call.context)
    models = {}
    for name, slot in call.context.models.slots.items():
        version = slot.current
        models[name] = {
            "loaded": version is not None,
            "workers": len(version.worker_pids) if version else 0,
            "replaced_workers": version.pool.num_replaced if version else 0,
            "waiting_records": version.num_waiting if version else 0,
        }
    return build_json_response({"status": state, "models": models}, status=status)


async def _show_metrics(call: Call[EmptyBody]) -> Response:
    return Response(call.context.metrics.render(), media_type=CONTENT_TYPE_LATEST)


ROUTES: tuple[RouteSpec[Any], ...] = (
    RouteSpec("GET", "/health", show_health, EmptyBody, "Return the state of the server."),
    RouteSpec("GET", "/metrics", _show_metrics, EmptyBody, "Return the Prometheus metrics."),
)
