"""Client requests: retries within a timeout, and a limited number in flight."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import random
import time
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from regauge.serving.client.in_flight import InFlight, compute_wait
from regauge.system.errors import DataError, RegaugeError, SettingsError, TransientError

try:
    import aiohttp
except ImportError as error:
    raise SettingsError(str(error), "pip install 'regauge[client]'") from None

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

T = TypeVar("T")
Part = TypeVar("Part")
MIN_TIMEOUT_SECONDS = 0.001
RETRIED = frozenset((429, 502, 503, 504))
"""Statuses worth retrying."""
MAX_MESSAGE = 300
"""Maximum characters of a server's message in an error."""


class _Answer(NamedTuple):
    """An answer with status 200, or a failed attempt."""

    content: bytes = b""
    failure: RegaugeError | None = None
    retry_after: float | None = None
    """Seconds from the Retry-After header."""
    seconds: float = 0.0
    """Latency."""


class HttpSession:
    """Connections to one server, with headers and a timeout for each request."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_seconds: float) -> None:
        self.in_flight: InFlight | None = None
        """In-flight limit, which learns from each answer; None until it is known."""
        self._url = url
        self._headers = headers
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None
        self._has_answered = False
        self._num_open = 0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, num_texts: int = 0
    ) -> Any:
        """Return an answer's JSON; retry within the timeout.

        Raises the error from `build_status_error`, TransientError without an answer, and DataError
        if the answer is not JSON.
        """
        self._num_open += 1
        try:
            answer = await self._repeat(method, path, body)
            if self.in_flight is not None and self._num_open >= self.in_flight.limit and num_texts:
                self.in_flight.record_answer(num_texts, answer.seconds)
        finally:
            self._num_open -= 1
        return self._parse(path, answer.content)

    async def _repeat(self, method: str, path: str, body: dict[str, Any] | None) -> _Answer:
        deadline = time.monotonic() + self._timeout_seconds
        attempt = 0
        while True:
            answer = await self._attempt(method, path, body, deadline)
            if answer.failure is None:
                return answer
            wait = compute_wait(attempt, answer.retry_after, random.random)
            if time.monotonic() + wait >= deadline:
                raise answer.failure
            await asyncio.sleep(wait)
            attempt += 1

    async def _attempt(
        self, method: str, path: str, body: dict[str, Any] | None, deadline: float
    ) -> _Answer:
        """Return the answer or a retryable failure; raises any other failure."""
        started_at = time.monotonic()
        try:
            status, content, retry_after = await self._send(method, path, body, deadline)
        except TimeoutError:
            problem = f"{self._url}{path} did not answer within {self._timeout_seconds:g} s"
            raise TransientError(problem, "raise timeout_seconds, or see its log") from None
        except aiohttp.ClientError as error:
            failure = self._describe_connection(error)
            is_connected = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL)
            if is_connected or self._has_answered:
                return _Answer(failure=failure)
            raise failure from None
        self._has_answered = True
        if status == HTTPStatus.OK:
            return _Answer(content, seconds=time.monotonic() - started_at)
        failure = build_status_error(f"{self._url}{path}", status, content)
        if status not in RETRIED:
            raise failure
        if self.in_flight is not None:
            self.in_flight.record_refusal(started_at, time.monotonic())
        return _Answer(failure=failure, retry_after=retry_after)

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None, deadline: float
    ) -> tuple[int, bytes, float | None]:
        session = self._open()
        seconds = max(deadline - time.monotonic(), MIN_TIMEOUT_SECONDS)
        headers = {"Regauge-Timeout-Ms": str(max(1, round(1e3 * seconds)))}
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with session.request(
            method, self._url + path, json=body, headers=headers, timeout=timeout
        ) as answer:
            content = await answer.read()
            header = answer.headers.get("Retry-After")
            return answer.status, content, parse_retry_after(header, dt.datetime.now(dt.UTC))

    def _open(self) -> aiohttp.ClientSession:
        """Return the session; it does not limit connections, since `in_flight` limits requests."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0), trust_env=True
            )
        return self._session

    def _describe_connection(self, error: aiohttp.ClientError) -> RegaugeError:
        if isinstance(error, aiohttp.InvalidURL):
            return SettingsError(f"invalid url '{self._url}'", "write it as http://host:port")
        reason = str(error) or type(error).__name__
        problem = f"{self._url} is unreachable: {reason}"
        return TransientError(problem, "start the server, or correct the url")

    def _parse(self, path: str, content: bytes) -> Any:
        try:
            return json.loads(content)
        except ValueError:
            problem = f"{self._url}{path} does not answer with JSON: {content[:40]!r}"
            raise DataError(problem, "correct the url") from None


async def send_all(
    send: Callable[[Part], Awaitable[T]], parts: Sequence[Part], in_flight: InFlight
) -> list[T]:
    """Return all results in the order of the parts; after an error, cancel the others."""
    results: dict[int, T] = {}
    running: dict[asyncio.Future[T], int] = {}
    try:
        for index, part in enumerate(parts):
            while len(running) >= in_flight.limit:
                await _collect(running, results)
            running[asyncio.ensure_future(send(part))] = index
        while running:
            await _collect(running, results)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return [results[index] for index in range(len(parts))]


async def _collect(running: dict[asyncio.Future[T], int], results: dict[int, T]) -> None:
    """Wait for requests and collect their results; raises the error of a failed one."""
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        results[running[task]] = task.result()
    for task in done:
        del running[task]


def build_status_error(url: str, status: int, body: bytes) -> RegaugeError:
    """Return the exception for an error status, with the server's message."""
    message = f"{url} answers {status}: {read_message(status, body)}"
    if status in {401, 403}:
        return SettingsError(message, "set api_key to a key of this server")
    if status in {404, 405}:
        return SettingsError(message, "correct the url or the model")
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return DataError(message, "lower texts_per_request, or shorten the texts")
    if status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        return TransientError(message, "lower in_flight, raise timeout_seconds or try again later")
    if status in RETRIED or status == HTTPStatus.FAILED_DEPENDENCY or status >= 500:  # noqa: PLR2004
        return TransientError(message, "see the log of the server")
    return DataError(message, "correct the request")


def read_message(status: int, body: bytes) -> str:
    """Extract an error message in OpenAI's form, TEI's form, or plain text."""
    text = body.decode(errors="replace").strip()
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if isinstance(document, dict):
        error = document.get("error") or document.get("detail") or document.get("message")
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error or text)
    if words := " ".join(text.split())[:MAX_MESSAGE]:
        return words
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no message"


def parse_retry_after(header: str | None, now: dt.datetime) -> float | None:
    """Return the seconds in a Retry-After header, a number or a date; None if unusable."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=dt.UTC)
    return max(0.0, (date - now).total_seconds())
