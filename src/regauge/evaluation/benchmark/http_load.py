"""HTTP load on a server from one process: closed loops and scheduled arrivals.

In the open loop, request latency counts from the scheduled arrival, however late the request is
sent (no coordinated omission). Requests without a status 200 answer do not have a latency. The
latency of generated text is the time to the first token; answers are streamed. The module also
measures itself: its CPU time, and the delay between an arrival and its request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from regauge.system.errors import SettingsError

try:
    import aiohttp
except ImportError as error:
    raise SettingsError(str(error), "pip install 'regauge[client]'") from None

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterator, Sequence

OPENAI, TEI, TEXT = "openai", "tei", "completions"
ROUTES = {OPENAI: "/v1/embeddings", TEI: "/embed", TEXT: "/v1/completions"}
"""Protocol -> route."""
OK = str(int(HTTPStatus.OK))
TIMEOUT, CONNECTION, STREAM_ERROR = "timeout", "connection", "stream error"
"""Statuses of unanswered requests: too late, lost connection, or an error after the first event."""
DEFAULT_MODEL = "model"
"""Model name in requests to a server that lists none."""
MAX_BODIES = 512
"""Request bodies built before a measurement; additional requests repeat them."""
REFUSAL_PAUSE_SECONDS = 0.05
"""Pause of a closed-loop connection after a refusal without Retry-After."""
MAX_PAUSE_SECONDS = 1.0
EVENT, LAST_EVENT = b"data:", b"[DONE]"
"""Beginning of a server-sent event, before an optional space, and the data of the last one."""


@dataclass(frozen=True)
class HttpTarget:
    """A server and the request format."""

    url: str
    protocol: str
    """`openai`, `tei`, `completions`, or `auto` to detect it."""
    model: str | None = None
    """Model name in requests; None to detect it."""
    encoding_format: str = "float"
    api_key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 30.0
    max_tokens: int = 64
    """Maximum length of a generated text."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers for every request."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", **key}

    @property
    def generates_text(self) -> bool:
        return self.protocol == TEXT

    @property
    def address(self) -> str:
        return self.url + ROUTES[self.protocol]

    def build_body(self, texts: Sequence[str]) -> bytes:
        if self.protocol == TEI:
            return json.dumps({"inputs": list(texts), "truncate": True}).encode()
        document: dict[str, Any] = {"model": self.model or DEFAULT_MODEL}
        if self.generates_text:
            document |= {"prompt": list(texts), "max_tokens": self.max_tokens}
            document |= {"stream": True, "stream_options": {"include_usage": True}}
        else:
            document |= {"input": list(texts), "encoding_format": self.encoding_format}
        return json.dumps(document).encode()


class LoadResult(NamedTuple):
    latencies_ms: list[float | None]
    """Latency per request; None without a status 200 answer."""
    statuses: dict[str, int]
    """Status (`200`, `429`, ..., `timeout`, `connection`) -> request count."""
    seconds: float
    """Time from the start to the last answer, at least the load's duration."""
    send_delays_ms: list[float]
    """Delay from arrival to sending, per open-loop request."""
    processor_shares: list[float]
    """CPU seconds per second, for each sending process."""
    token_ms: Sequence[float] = ()
    """Time per token after the first, for each generated text."""
    num_tokens: int = 0
    """Number of generated tokens in status 200 answers."""


class RequestEnd(NamedTuple):
    """The end of a request."""

    status: str
    pause: float = 0.0
    """Seconds to pause after a refusal."""
    first_at: float | None = None
    """Time of the first token, for generated text."""
    num_tokens: int = 0


class _Recorder:
    """Collects latencies and statuses during one load."""

    def __init__(self) -> None:
        self.latencies_ms: list[float | None] = []
        self.send_delays_ms: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.token_ms: list[float] = []
        self.num_tokens = 0
        self.start = time.perf_counter()
        self.end = self.start
        self._processor_start = time.process_time()

    def record(self, end: RequestEnd, since: float) -> None:
        """Add a request whose latency counts from `since`."""
        self.end = time.perf_counter()
        self.statuses[end.status] += 1
        if end.status != OK:
            self.latencies_ms.append(None)
            return
        first_at = end.first_at or self.end
        self.latencies_ms.append(round(1e3 * (first_at - since), 4))
        self.num_tokens += end.num_tokens
        if end.num_tokens > 1:
            self.token_ms.append(round(1e3 * (self.end - first_at) / (end.num_tokens - 1), 4))

    def build_result(self, min_seconds: float) -> LoadResult:
        seconds = max(self.end - self.start, min_seconds)
        share = (time.process_time() - self._processor_start) / seconds
        return LoadResult(
            self.latencies_ms,
            dict(self.statuses),
            seconds,
            self.send_delays_ms,
            [share],
            self.token_ms,
            self.num_tokens,
        )


class HttpLoad:
    """Sends requests with given texts to a server; an async context manager."""

    def __init__(self, target: HttpTarget, texts: Sequence[str]) -> None:
        self._target = target
        self._texts = texts
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_seconds),
            headers=self._target.headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def run_closed(
        self, concurrency: int, texts_per_request: int, seconds: float
    ) -> LoadResult:
        """Send requests one after the other on `concurrency` connections for some seconds.

        Each connection sends at least one request, however late it starts on a busy machine.
        """
        bodies = self._iterate_bodies(texts_per_request)
        recorder = _Recorder()

        async def run_connection() -> None:
            is_last = False
            while not is_last:
                sent_at = time.perf_counter()
                end = await self._send(next(bodies))
                recorder.record(end, sent_at)
                if end.pause:
                    await asyncio.sleep(end.pause)
                is_last = time.perf_counter() - recorder.start >= seconds

        await asyncio.gather(*(run_connection() for _ in range(concurrency)))
        return recorder.build_result(0.0)

    async def run_open(
        self, arrivals: Sequence[float], texts_per_request: int, seconds: float
    ) -> LoadResult:
        """Send a request at each arrival time, in seconds from now; wait for all answers."""
        bodies = self._iterate_bodies(texts_per_request)
        recorder = _Recorder()

        async def run_request(body: bytes, arrival: float) -> None:
            recorder.send_delays_ms.append(round(1e3 * (time.perf_counter() - arrival), 4))
            recorder.record(await self._send(body), arrival)

        requests = []
        for arrival in arrivals:
            due = recorder.start + arrival
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            requests.append(asyncio.ensure_future(run_request(next(bodies), due)))
        await asyncio.gather(*requests)
        return recorder.build_result(seconds)

    async def _send(self, body: bytes) -> RequestEnd:
        try:
            async with self._session.post(self._target.address, data=body) as answer:
                if self._target.generates_text and answer.status == HTTPStatus.OK:
                    return await _read_stream(answer.content)
                await answer.read()
        except TimeoutError:
            return RequestEnd(TIMEOUT)
        except aiohttp.ClientError:
            return RequestEnd(CONNECTION, REFUSAL_PAUSE_SECONDS)
        if answer.status == HTTPStatus.OK:
            return RequestEnd(OK)
        return RequestEnd(str(answer.status), _find_pause(answer.headers.get("Retry-After")))

    def _iterate_bodies(self, texts_per_request: int) -> Iterator[bytes]:
        """Return an endless iterator over prebuilt bodies with consecutive texts."""
        texts, size = self._texts, texts_per_request
        count = min(MAX_BODIES, max(1, len(texts) // size))
        bodies = [
            self._target.build_body([texts[(index * size + i) % len(texts)] for i in range(size)])
            for index in range(count)
        ]
        return cycle(bodies)


async def _read_stream(lines: AsyncIterable[bytes]) -> RequestEnd:
    """Read the events of a generated text.

    The text of an event counts as one token or more: only the first event and the last one, which
    has the token count, are parsed.
    """
    first_at, num_tokens, is_complete = None, 0, False
    async for line in lines:
        if not line.startswith(EVENT):
            continue
        data = line.removeprefix(EVENT).strip()
        if data.startswith(b'{"error"'):
            return RequestEnd(STREAM_ERROR)
        is_complete = is_complete or data == LAST_EVENT
        if first_at is None and data != LAST_EVENT and _has_text(json.loads(data)):
            first_at = time.perf_counter()
        elif b'"completion_tokens"' in data:
            num_tokens = json.loads(data)["usage"]["completion_tokens"]
    return RequestEnd(OK if is_complete else CONNECTION, 0.0, first_at, num_tokens)


def _has_text(event: dict[str, Any]) -> bool:
    return any(choice.get("text") for choice in event.get("choices", ()))


def _find_pause(header: str | None) -> float:
    """Return the Retry-After seconds, at most MAX_PAUSE_SECONDS."""
    try:
        return min(float(header or REFUSAL_PAUSE_SECONDS), MAX_PAUSE_SECONDS)
    except ValueError:
        return MAX_PAUSE_SECONDS


def merge_results(results: Sequence[LoadResult]) -> LoadResult:
    """Merge measurements from processes sharing one load."""
    statuses: Counter[str] = Counter()
    for result in results:
        statuses.update(result.statuses)
    return LoadResult(
        [latency for result in results for latency in result.latencies_ms],
        dict(statuses),
        max(result.seconds for result in results),
        [delay for result in results for delay in result.send_delays_ms],
        [share for result in results for share in result.processor_shares],
        [value for result in results for value in result.token_ms],
        sum(result.num_tokens for result in results),
    )


async def detect_target(target: HttpTarget) -> HttpTarget:
    """Return the target with a protocol that the server answers, and its model name.

    Raises SettingsError with the server's answers if it answers no protocol.
    """
    timeout = aiohttp.ClientTimeout(total=target.timeout_seconds)
    async with aiohttp.ClientSession(timeout=timeout, headers=target.headers) as session:
        model = target.model or await _find_model(session, target.url)
        answers = []
        for protocol in ROUTES if target.protocol == "auto" else (target.protocol,):
            candidate = replace(target, protocol=protocol, model=model)
            status, text = await _probe(session, candidate)
            if status == HTTPStatus.OK:
                return candidate
            answers.append(f"{ROUTES[protocol]} {text}")
    problem = f"{target.url} does not answer requests for vectors or text: {'; '.join(answers)}"
    raise SettingsError(problem, "correct the address, or set server.protocol and server.model")


async def _probe(session: aiohttp.ClientSession, target: HttpTarget) -> tuple[int, str]:
    """Return the status of a request with one text, and a description of the answer."""
    try:
        async with session.post(target.address, data=target.build_body(["a text"])) as answer:
            text = " ".join((await answer.text()).split())
            return answer.status, f"{answer.status} {text[:80]}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return 0, str(error) or type(error).__name__


async def _find_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the first model listed by the server, or a placeholder."""
    try:
        async with session.get(url + "/v1/models") as answer:
            document: Any = await answer.json(content_type=None)
            return str(document["data"][0]["id"]) or DEFAULT_MODEL
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
        return DEFAULT_MODEL
