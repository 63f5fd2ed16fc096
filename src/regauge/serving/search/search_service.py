"""Connects the search page with the server's default model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.serving.dispatcher import RequestOptions
from regauge.serving.model_version import Inputs
from regauge.serving.search.search_index import SearchIndex

if TYPE_CHECKING:
    import numpy as np

    from regauge.serving.http_protocol import ServerContext
    from regauge.serving.search.search_settings import SearchSettings

QUERY_PROMPT = "query"
"""Prompt for queries, if the model has one by this name."""
CLIENT = "search"
"""All visitors of the page share the processors as one client."""


class SearchService:
    """The rows to search in, and the model that embeds queries."""

    def __init__(self, context: ServerContext, settings: SearchSettings) -> None:
        self.settings = settings
        """Query limits."""
        self._context = context
        self._index: SearchIndex | None = None

    async def open(self) -> None:
        """Open the index for the default model; raises the errors of `SearchIndex.open`."""
        async with self._context.models.use_for_records(None) as model:
            artifact = model.artifact
        self._index = await self._context.run_in_thread(SearchIndex.open, self.settings, artifact)

    def close(self) -> None:
        if self._index is not None:
            self._index.close()

    @property
    def index(self) -> SearchIndex:
        if self._index is None:
            raise RuntimeError("the index is not open")
        return self._index

    async def embed_query(self, text: str) -> np.ndarray:
        """Return a query's vector, [width] fp32; raises the errors of an overloaded server.

        Queries too long for the model are truncated.
        """
        timeout = self._context.settings.queue.timeout_seconds
        options = RequestOptions(CLIENT, "interactive", timeout)
        async with self._context.models.use_for_records(None) as model:
            tokenization = model.program.tokenization
            prompts = tokenization.prompts if tokenization else {}
            prompt = QUERY_PROMPT if QUERY_PROMPT in prompts else None
            outputs = await model.compute(Inputs([[text]], prompt=prompt, truncate=True), options)
        outputs.check_failures()
        vector: np.ndarray = outputs.values[0]
        return vector
