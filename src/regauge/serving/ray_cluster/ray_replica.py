"""A Ray Serve replica: the server's application, with models and workers of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regauge.config import build
from regauge.serving.api_keys import ApiKeys
from regauge.serving.routes.health import find_status
from regauge.serving.runtime import TOKENIZER_THREADS, ServingRuntime
from regauge.serving.settings import Serve
from regauge.system import log
from regauge.system.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

REPLICA_HEADER = b"regauge-replica"
"""Answer header with the replica identifier."""


class ModelReplica:
    """Loads the models when Ray starts it, and stops them when Ray has drained it.

    Ray Serve calls the methods. Requests reach only the application.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, tables: dict[str, Any], digests: Sequence[bytes]
    ) -> None:
        """Load the models; the first error ends the deployment.

        `tables` is the table `serve`, and `digests` holds the API key hashes.
        """
        log.configure()
        settings = build(Serve, tables)
        self._executor = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize")
        self._runtime = ServingRuntime(settings, ApiKeys.from_digests(digests), self._executor)
        try:
            await self._runtime.start()
        except BaseException:
            await self._runtime.stop()
            raise
        self._watch = asyncio.create_task(self._runtime.watch())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application; answers name this replica."""
        from ray.serve import get_replica_context

        name = get_replica_context().replica_id.unique_id
        return name_replica(self._runtime.app, name)

    async def check_health(self) -> None:
        """Raise an error if requests cannot be answered; Ray then replaces this replica."""
        if self._watch.done():
            self._watch.result()
        state, status = find_status(self._runtime.context)
        if status != 200:  # noqa: PLR2004 - the status of HTTP
            raise TransientError(f"the replica is not ready: {state}", "see the logs of Ray")

    async def __del__(self) -> None:
        """Stop the models; Ray calls it when all requests are answered."""
        self._runtime.drain()
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        await self._runtime.stop()
        self._executor.shutdown()


def name_replica(app: ASGIApp, name: str) -> ASGIApp:
    """Wrap an application so that answers have the header `Regauge-Replica`."""

    async def run_named(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_message(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (REPLICA_HEADER, name.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_message)

    return run_named
