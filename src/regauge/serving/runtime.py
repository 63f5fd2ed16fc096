"""A server's models and application, from start to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.serving.app import build_app
from regauge.serving.model_set import ModelSet
from regauge.serving.search.search_service import SearchService
from regauge.serving.server_context import ServerContext
from regauge.serving.server_metrics import ServerMetrics

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from regauge.serving.api_keys import ApiKeys
    from regauge.serving.settings import Serve

TOKENIZER_THREADS = 2
"""Threads that tokenize long texts."""


class ServingRuntime:
    """Loads and stops an ASGI application's models; the caller serves it over HTTP."""

    def __init__(self, settings: Serve, keys: ApiKeys, executor: Executor) -> None:
        metrics = ServerMetrics()
        self._models = ModelSet(settings, metrics, executor)
        metrics.watch_models(self._models.slots)
        self.context = ServerContext(settings, self._models, metrics, keys, executor)
        metrics.watch_drain(lambda: self.context.state == "draining")
        self._search = SearchService(self.context, settings.search) if settings.search else None
        self.app = build_app(self.context, self._search)
        """The application; it refuses requests until the models are loaded."""

    async def start(self) -> None:
        """Load the models, then the rows to search in; raises their errors."""
        await self._models.start()
        if self._search is not None:
            await self._search.open()
        self.context.state = "ready"

    async def watch(self) -> None:
        """Check for new model versions until cancelled."""
        await self._models.watch()

    def drain(self) -> None:
        """Announce the end to clients; accepted requests are still completed."""
        self.context.state = "draining"

    async def stop(self) -> None:
        """Stop the models and the search."""
        await self._models.stop()
        if self._search is not None:
            self._search.close()
