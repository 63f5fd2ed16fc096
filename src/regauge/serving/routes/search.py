"""The search page: `GET /` is the page, `GET /search?q=…&k=10` returns results as JSON.

A result without a web address links to `GET /documents/{id}`, a page with the kept fields.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import Response

from regauge.serving.http_protocol import Call, EmptyBody, RouteSpec, build_json_response
from regauge.serving.request_errors import InvalidRequestError, NotFoundError
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from regauge.serving.search.search_service import SearchService, VersionSearch
    from regauge.serving.search.search_settings import SearchSettings

PAGE_FOLDER = Path(__file__).parent.parent / "search" / "search_page"
DEFAULT_RESULTS = 10
CACHED_QUERIES = 256
"""How many query results are cached; a user who deletes letters repeats queries."""
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Page headers: the page loads its own files only, and document text cannot run as code."""
RESULT_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
QUERY = {"/": ("q",), "/search": ("q", "k")}
"""Path -> query parameters; the page reads its own."""
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


def list_routes(service: SearchService) -> list[RouteSpec[EmptyBody]]:
    """Return the routes for search and page."""
    searcher = _Searcher(service)
    endpoints = {
        "/": _serve_file("search.html"),
        "/search.css": _serve_file("search.css"),
        "/search.js": _serve_file("search.js"),
        "/search": searcher.search,
        "/documents/{number:int}": searcher.show_document,
    }
    return [
        RouteSpec("GET", path, endpoint, EmptyBody, "", query=QUERY.get(path, ()))
        for path, endpoint in endpoints.items()
    ]


class _Searcher:
    def __init__(self, service: SearchService) -> None:
        self._service = service
        self._results: OrderedDict[tuple[str, str, int], list[dict[str, Any]]] = OrderedDict()
        """(version, query, count) -> results of the last queries, most recent last."""

    async def search(self, call: Call[EmptyBody]) -> Response:
        """Return a query's results as JSON, or why the query is invalid."""
        start = time.perf_counter()
        try:
            query, count = parse_query(call.request.query_params, self._service.settings)
        except DataError as error:
            raise InvalidRequestError(str(error)) from None
        async with self._service.use() as version:
            results = await self._find_results(version, query, count)
        milliseconds = round(1000 * (time.perf_counter() - start), 3)
        document = {
            "query": query,
            "results": results,
            "milliseconds": milliseconds,
            "documents": len(version.index),
            "exact": version.index.is_exact,
        }
        return build_json_response(document, headers=RESULT_HEADERS)

    async def _find_results(
        self, version: VersionSearch, query: str, count: int
    ) -> list[dict[str, Any]]:
        key = version.content_sha256, query, count
        if key not in self._results:
            vector = await version.embed(query)
            results = await asyncio.to_thread(version.index.search, vector, count)
            self._results[key] = results
        self._results.move_to_end(key)
        results = self._results[key]
        while len(self._results) > CACHED_QUERIES:
            self._results.popitem(last=False)
        return results

    async def show_document(self, call: Call[EmptyBody]) -> Response:
        """Return a page with all kept fields of a row; raises NotFoundError."""
        number = call.request.path_params["number"]
        try:
            row = await asyncio.to_thread(self._service.index.read_row, number)
        except IndexError:
            raise NotFoundError(f"there is no document {number}") from None
        page = _load_templates().get_template("document.html.j2").render(row)
        return Response(page, headers=PAGE_HEADERS, media_type="text/html")


def parse_query(parameters: Mapping[str, str], settings: SearchSettings) -> tuple[str, int]:
    """Return query and number of results; raises DataError."""
    query = " ".join(parameters.get("q", "").split())
    if not query:
        raise DataError("q is missing or empty", "set it to the text to search for")
    if len(query) > settings.max_query_characters:
        problem = f"q has {len(query)} characters"
        raise DataError(problem, f"send at most {settings.max_query_characters}")
    text = parameters.get("k", str(min(DEFAULT_RESULTS, settings.max_results)))
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(settings.max_results))
    if not is_number or not 1 <= int(text) <= settings.max_results:
        problem = f"k is '{text[:20]}'"
        raise DataError(problem, f"set a whole number from 1 to {settings.max_results}")
    return query, int(text)


def _serve_file(name: str) -> Callable[[Call[EmptyBody]], Awaitable[Response]]:
    content = (PAGE_FOLDER / name).read_bytes()
    media_type = MEDIA_TYPES[Path(name).suffix]

    async def respond(_: Call[EmptyBody]) -> Response:
        return Response(content, headers=PAGE_HEADERS, media_type=media_type)

    return respond


@cache
def _load_templates() -> Environment:
    """Return the page templates; every value is escaped."""
    return Environment(
        loader=FileSystemLoader(PAGE_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
