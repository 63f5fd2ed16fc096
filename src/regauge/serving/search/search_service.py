"""Connects the search page with the server's first model that embeds texts."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.config.output_files import JOB, RESULT
from regauge.serving.dispatcher import RequestOptions
from regauge.serving.model_version import Inputs
from regauge.serving.request_errors import UnavailableError
from regauge.serving.search.search_index import SearchIndex, check_vectors
from regauge.system.errors import RegaugeError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import numpy as np

    from regauge.models.io_spec import OutputKind
    from regauge.serving.http_protocol import ServerContext
    from regauge.serving.model_version import ModelVersion
    from regauge.serving.search.search_settings import SearchSettings

QUERY_PROMPT = "query"
"""Prompt for queries, if the model has one by this name."""
VECTORS: tuple[OutputKind, ...] = ("vectors",)
CLIENT = "search"
"""All visitors of the page share the processors as one client."""


RETRY_SECONDS = 10
"""When a client should repeat a search if the vectors of the model are missing."""


@dataclass(frozen=True)
class VersionSearch:
    """How to search with one model version."""

    content_sha256: str
    """Hash of the version."""
    index: SearchIndex
    """The version's vectors."""
    embed: Callable[[str], Awaitable[np.ndarray]]
    """Returns a query's vector, [width] fp32."""


class SearchService:
    """The rows to search in, and the model that embeds queries."""

    def __init__(self, context: ServerContext, settings: SearchSettings) -> None:
        self.settings = settings
        """Query limits."""
        self._context = context
        self._indexes: dict[str, SearchIndex] = {}
        """Version hash -> index. A canary has vectors of its own; the newest index is last."""

    async def open(self) -> None:
        """Open the index for the model; raises the errors of `SearchIndex.open`.

        A new model version then waits for its vectors.
        """
        models, folder = self._context.models, Path(self.settings.vectors)
        async with models.use_for_records(None, VECTORS) as model:
            await self._open_index(model)
        check = partial(check_vectors, self.settings)
        models.find(None, VECTORS).require(check, (folder / JOB, folder / RESULT))

    def close(self) -> None:
        for index in self._indexes.values():
            index.close()

    @property
    def index(self) -> SearchIndex:
        """The newest index."""
        return next(reversed(self._indexes.values()))

    @asynccontextmanager
    async def use(self) -> AsyncIterator[VersionSearch]:
        """Keep a model version and its index open within the block.

        Raises UnavailableError if the version's vectors are missing.
        """
        async with self._context.models.use_for_records(None, VECTORS) as model:
            try:
                index = await self._open_index(model)
            except RegaugeError as error:
                problem = f"search needs the vectors of the new model version: {error}"
                raise UnavailableError(problem, retry_after=RETRY_SECONDS) from None
            yield VersionSearch(model.content_sha256, index, partial(self._embed, model))

    async def _open_index(self, model: ModelVersion) -> SearchIndex:
        key = model.content_sha256
        if key not in self._indexes:
            index = await self._context.run_in_thread(
                SearchIndex.open, self.settings, model.artifact
            )
            slot = self._context.models.find(None, VECTORS)
            loaded = {version.content_sha256 for version in (slot.current, slot.canary) if version}
            kept = {name: index for name, index in self._indexes.items() if name in loaded}
            self._indexes = {**kept, key: index}
        return self._indexes[key]

    async def _embed(self, model: ModelVersion, text: str) -> np.ndarray:
        """Return a query's vector, [width] fp32; raises the errors of an overloaded server.

        Queries too long for the model are truncated.
        """
        timeout = self._context.settings.queue.timeout_seconds
        options = RequestOptions(CLIENT, "interactive", timeout)
        tokenization = model.program.tokenization
        prompts = tokenization.prompts if tokenization else {}
        prompt = QUERY_PROMPT if QUERY_PROMPT in prompts else None
        outputs = await model.compute(Inputs([[text]], prompt=prompt, truncate=True), options)
        outputs.check_failures()
        vector: np.ndarray = outputs.values[0]
        return vector
