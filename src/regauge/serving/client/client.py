"""Clients for a model server: many texts become requests, with the right number in flight.

`AsyncClient` sends the requests. `Client` runs it in a thread, for programs without an event loop.
Both speak OpenAI's and text-embeddings-inference's protocols.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np

from regauge.serving.client.http_session import HttpSession, send_all
from regauge.serving.client.in_flight import InFlight
from regauge.system.errors import DataError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from types import TracebackType

RECORDS_HINT = "recommended_records_in_flight"
"""Key in the answer from `/info`."""
T = TypeVar("T")
Priority = Literal["interactive", "bulk"]
PRIORITIES = ("interactive", "bulk")
ClassScore = dict[str, Any]
"""A text's class: `label` and `score`."""


class AsyncClient:
    """Client for a model server, for programs with an event loop.

    `url` is the server's address, without `/v1`. `model` is needed if the server has several.
    `in_flight` is the number of requests in flight; by default it adapts to the server.
    `timeout_seconds` limits one request, retries included. `priority` is "interactive" or "bulk",
    for Regauge servers.

    A request that is refused (429, 502, 503, 504) or loses its connection is retried within the
    timeout, no sooner than its Retry-After header says.

    All methods raise SettingsError for a wrong address, key or model, DataError for texts refused
    by the server, and TransientError without an answer within the timeout.

    For example:

        >>> async with regauge.AsyncClient("http://127.0.0.1:8080") as client:
        ...     vectors = await client.encode(["Open a file."])
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        in_flight: int | None = None,
        texts_per_request: int = 8,
        timeout_seconds: float = 60.0,
        priority: Priority | None = None,
    ) -> None:
        _check_options(url, in_flight, texts_per_request, timeout_seconds, priority)
        headers: dict[str, str] = {"Regauge-Priority": priority} if priority else {}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._texts_per_request = texts_per_request
        self._http = HttpSession(self.url, headers, timeout_seconds)
        if in_flight is not None:
            self._http.in_flight = InFlight(in_flight, is_fixed=True)
        self._start = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    @property
    def in_flight(self) -> int | None:
        """Number of requests that may be in flight now; None before the first request."""
        return None if self._http.in_flight is None else self._http.in_flight.limit

    async def encode(self, texts: str | Sequence[str]) -> np.ndarray:
        """Return text vectors, [texts, width] fp32, or [width] for a single text."""
        batch = _list_texts(texts)
        model = await self._find_model() if batch else ""

        def build_body(part: list[str]) -> dict[str, Any]:
            return {"model": model, "input": part, "encoding_format": "base64"}

        parts = await self._send_parts("/v1/embeddings", batch, build_body, _read_vectors)
        vectors = np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)
        result: np.ndarray = vectors[0] if isinstance(texts, str) else vectors
        return result

    async def rerank(self, query: str, texts: Sequence[str]) -> np.ndarray:
        """Return each text's relevance to a query, [texts] fp32, in text order."""
        batch = _list_texts(texts)
        _list_texts(query)

        def build_body(part: list[str]) -> dict[str, Any]:
            return {"query": query, "texts": part, **self._named_model()}

        parts = await self._send_parts("/rerank", batch, build_body, _read_scores)
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    async def predict(self, texts: str | Sequence[str]) -> list[list[ClassScore]]:
        """Return each text's classes, most probable first.

        A class is a dictionary with `label` and `score`.
        """
        batch = _list_texts(texts)

        def build_body(part: list[str]) -> dict[str, Any]:
            return {"inputs": [[text] for text in part], **self._named_model()}

        parts = await self._send_parts("/predict", batch, build_body, _read_classes)
        return [classes for part in parts for classes in part]

    def _named_model(self) -> dict[str, str]:
        return {} if self._model is None else {"model": self._model}

    async def _send_parts(
        self,
        path: str,
        texts: list[str],
        build_body: Callable[[list[str]], dict[str, Any]],
        read_answer: Callable[[Any, int], T],
    ) -> list[T]:
        """Send texts in requests of `texts_per_request`; return the answers in text order."""
        in_flight = await self._prepare()
        size = self._texts_per_request
        parts = [texts[start : start + size] for start in range(0, len(texts), size)]

        async def send(part: list[str]) -> T:
            document = await self._http.request("POST", path, build_body(part), len(part))
            try:
                return read_answer(document, len(part))
            except (KeyError, TypeError, ValueError, IndexError) as error:
                problem = f"{self.url}{path} answers in an unknown form: {error!r}"
                raise DataError(problem, "correct the url, or name another model") from None

        return await send_all(send, parts, in_flight)

    async def _prepare(self) -> InFlight:
        """Return the in-flight limit; read the server's hint before the first request."""
        async with self._start:
            if self._http.in_flight is None:
                hint = await self._find_hint()
                self._http.in_flight = InFlight() if hint is None else InFlight(hint)
            return self._http.in_flight

    async def _find_hint(self) -> int | None:
        """Return the number of requests in flight recommended by the server, if any.

        A Regauge server recommends a number of records.
        """
        try:
            document = await self._http.request("GET", "/info")
        except (DataError, SettingsError):
            return None  # no route /info: the server is not ours
        records = document.get(RECORDS_HINT) if isinstance(document, dict) else None
        if not isinstance(records, int) or records < 1:
            return None
        return -(-records // self._texts_per_request)

    async def _find_model(self) -> str:
        """Return the model name; raises SettingsError if the server has several."""
        if self._model is None:
            document = await self._http.request("GET", "/v1/models")
            rows = document.get("data") if isinstance(document, dict) else None
            names = [str(row.get("id")) for row in rows or () if isinstance(row, dict)]
            if len(names) != 1:
                problem = f"{self.url} has {len(names)} models: {', '.join(names)}"
                raise SettingsError(problem, "set model to one of them")
            self._model = names[0]
        return self._model


class Client:
    """Client for a model server, for programs without an event loop.

    Arguments and errors are those of `AsyncClient`. Requests run in a thread, until `close` or the
    end of a `with` statement.

    For example:

        >>> with regauge.Client("http://127.0.0.1:8080") as client:
        ...     vectors = client.encode(["Open a file."])
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        in_flight: int | None = None,
        texts_per_request: int = 8,
        timeout_seconds: float = 60.0,
        priority: Priority | None = None,
    ) -> None:
        self._client = AsyncClient(
            url,
            model=model,
            api_key=api_key,
            in_flight=in_flight,
            texts_per_request=texts_per_request,
            timeout_seconds=timeout_seconds,
            priority=priority,
        )
        self._thread = _LoopThread()
        self._finalizer = weakref.finalize(self, _close, self._client, self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; the client cannot be used afterwards."""
        self._finalizer()

    @property
    def in_flight(self) -> int | None:
        """Number of requests that may be in flight now; None before the first request."""
        return self._client.in_flight

    def encode(self, texts: str | Sequence[str]) -> np.ndarray:
        """Return text vectors, [texts, width] fp32, or [width] for a single text."""
        return self._thread.run(self._client.encode(texts))

    def rerank(self, query: str, texts: Sequence[str]) -> np.ndarray:
        """Return each text's relevance to a query, [texts] fp32, in text order."""
        return self._thread.run(self._client.rerank(query, texts))

    def predict(self, texts: str | Sequence[str]) -> list[list[ClassScore]]:
        """Return each text's classes, most probable first.

        A class is a dictionary with `label` and `score`.
        """
        return self._thread.run(self._client.predict(texts))


class _LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="regauge client", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result; an interrupt cancels it."""
        if self._loop.is_closed():
            work.close()
            raise SettingsError("the client is closed", "create another one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _close(client: AsyncClient, thread: _LoopThread) -> None:
    thread.run(client.close())
    thread.stop()


def _check_options(
    url: str,
    in_flight: int | None,
    texts_per_request: int,
    timeout_seconds: float,
    priority: str | None,
) -> None:
    if not str(url).startswith(("http://", "https://")):
        raise SettingsError(f"invalid url '{url}'", "write it as http://host:port")
    for name, value in (("in_flight", in_flight), ("texts_per_request", texts_per_request)):
        if value is not None and value < 1:
            raise SettingsError(f"{name} is {value}", "set a number of 1 or more")
    if timeout_seconds <= 0:
        raise SettingsError(f"timeout_seconds is {timeout_seconds}", "set a positive number")
    if priority is not None and priority not in PRIORITIES:
        raise SettingsError(f"unknown priority '{priority}'", f"set {' or '.join(PRIORITIES)}")


def _list_texts(texts: str | Sequence[str]) -> list[str]:
    """Return texts as a list; raises DataError if an element is not a text."""
    batch: list[Any] = [texts] if isinstance(texts, str) else list(texts)
    for index, text in enumerate(batch):
        if not isinstance(text, str):
            problem = f"text {index} is of type {type(text).__name__}"
            raise DataError(problem, "pass a list of strings")
        try:
            text.encode()
        except UnicodeEncodeError:
            problem = f"text {index} is not valid Unicode (lone surrogate)"
            raise DataError(problem, "decode it again as UTF-8") from None
    return batch


def _read_vectors(document: Any, count: int) -> np.ndarray:
    """Return an answer's vectors, [count, width] fp32; raises ValueError if some are missing."""
    vectors = {row["index"]: _decode_vector(row["embedding"]) for row in document["data"]}
    _check_indices(vectors, count)
    return np.stack([vectors[index] for index in range(count)])


def _decode_vector(embedding: str | list[float]) -> np.ndarray:
    """Decode a base64 or plain vector; some servers ignore the requested encoding."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4")
    return np.asarray(embedding, dtype=np.float32)


def _read_scores(document: Any, count: int) -> np.ndarray:
    """Return an answer's scores, [count] fp32, which the server sorts by score."""
    rows = document["results"] if isinstance(document, dict) else document
    scores = {row["index"]: row.get("score", row.get("relevance_score")) for row in rows}
    _check_indices(scores, count)
    return np.array([scores[index] for index in range(count)], dtype=np.float32)


def _check_indices(rows: dict[int, Any], count: int) -> None:
    if rows.keys() != set(range(count)):
        raise ValueError(f"{len(rows)} rows for {count} texts")


def _read_classes(document: Any, count: int) -> list[list[ClassScore]]:
    if len(document) != count:
        raise ValueError(f"{len(document)} rows for {count} texts")
    return [
        sorted(
            ({"label": str(row["label"]), "score": float(row["score"])} for row in rows),
            key=lambda row: -float(row["score"]),
        )
        for rows in document
    ]
