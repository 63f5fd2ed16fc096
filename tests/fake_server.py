"""A server of models with constructed latencies, refusals and failures, on the loopback interface.

It runs starlette and uvicorn in a thread. A request takes `seconds`, and at most `capacity` of them
are computed at a time; the others wait, or are refused if more than `max_queue` wait.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from regauge.system.timing import wait_for

MAX_START_SECONDS = 10.0
WIDTH = 4
TEXT_EVENTS = (
    *(json.dumps({"choices": [{"text": text}]}) for text in ("", "a", "b", "c", "d")),
    json.dumps({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}}),
    "[DONE]",
)
"""Data of the events of a completion with four tokens."""


@dataclass
class FakeServer:
    """The behaviour of the server, and what it has received."""

    seconds: float = 0.0
    """Time of one request."""
    capacity: int = 1000
    """Requests that are computed together."""
    min_active: int = 0
    """Requests that must be open together before one of them is answered."""
    max_queue: int = 10**6
    """Requests that may wait; more are refused with 429."""
    retry_after: str | None = None
    """Header of a refusal."""
    failures: list[tuple[int, Any]] = field(default_factory=list)
    """(status, body) of the next answers; status 0 resets the connection."""
    texts: tuple[tuple[str, ...], ...] = ()
    """Data of the events of each generated text, in turn; an event comes after `seconds`."""
    event: str = "data: "
    """Beginning of an event."""
    info: dict[str, Any] | None = None
    """Answer of /info; None for 404."""
    models: tuple[str, ...] = ("model",)
    uses_base64: bool = True
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Path, headers and body of every request."""
    times: list[float] = field(default_factory=list)
    """Times of the requests, on the monotonic clock."""
    max_active: int = 0
    """Largest number of requests that were open together."""
    num_active: int = 0
    num_computing: int = 0
    free: asyncio.Condition = field(default_factory=asyncio.Condition)

    def build_app(self) -> Starlette:
        """Return the application with the routes of OpenAI and text-embeddings-inference."""
        return Starlette(
            routes=[
                Route("/health", self._answer_health),
                Route("/info", self._answer_info),
                Route("/metrics", self._answer_metrics),
                Route("/v1/models", self._answer_models),
                Route("/v1/embeddings", self._compute(build_embeddings), methods=["POST"]),
                Route("/v1/completions", self._answer_text, methods=["POST"]),
                Route("/embed", self._compute(build_tei_vectors), methods=["POST"]),
                Route("/rerank", self._compute(build_ranks), methods=["POST"]),
                Route("/predict", self._compute(build_classes), methods=["POST"]),
            ]
        )

    async def _answer_health(self, _: Request) -> Response:
        return PlainTextResponse("ok")

    async def _answer_info(self, _: Request) -> Response:
        return JSONResponse(self.info or {"error": "no route"}, 200 if self.info else 404)

    async def _answer_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _answer_metrics(self, _: Request) -> Response:
        seconds = len(self.requests)
        lines = [
            "# TYPE regauge_serve_phase_seconds counter",
            f'regauge_serve_phase_seconds_total{{phase="compute"}} {0.002 * seconds}',
            f'regauge_serve_phase_seconds_total{{phase="tokenize"}} {0.001 * seconds}',
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _answer_text(self, request: Request) -> Response:
        self.requests.append({"path": request.url.path, "body": await request.json()})
        if not self.texts:
            return JSONResponse({"error": "no route"}, 404)
        events = self.texts[(len(self.requests) - 1) % len(self.texts)]

        async def send_events() -> AsyncIterator[str]:
            for data in events:
                await asyncio.sleep(self.seconds)
                yield f"{self.event}{data}\n\n"

        return StreamingResponse(send_events(), media_type="text/event-stream")

    def _compute(self, build: Callable[[Any, bool], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            self.times.append(time.monotonic())
            body = await request.json()
            headers = dict(request.headers)
            self.requests.append({"path": request.url.path, "headers": headers, "body": body})
            self.num_active += 1
            self.max_active = max(self.max_active, self.num_active)
            try:
                return await self._admit(lambda: build(body, self.uses_base64))
            finally:
                self.num_active -= 1

        return answer

    async def _admit(self, build: Callable[[], Any]) -> Response:
        if self.failures:
            status, body = self.failures.pop(0)
            if status == 0:
                return BrokenResponse()
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return JSONResponse(body, status, headers)
        if self.num_active - self.capacity > self.max_queue:
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return JSONResponse({"error": "overloaded"}, 429, headers)
        async with self.free:
            self.free.notify_all()
            await self.free.wait_for(lambda: self.max_active >= self.min_active)
            await self.free.wait_for(lambda: self.num_computing < self.capacity)
            self.num_computing += 1
        await asyncio.sleep(self.seconds)
        async with self.free:
            self.num_computing -= 1
            self.free.notify_all()
        return JSONResponse(build())


def build_vector(text: str) -> np.ndarray:
    """Return the vector of a text, [width] fp32: its length and its first code points."""
    codes = [ord(character) for character in text[: WIDTH - 1]]
    return np.array([len(text), *codes, *[0] * (WIDTH - 1 - len(codes))], dtype=np.float32)


def build_embeddings(body: Any, uses_base64: bool) -> Any:  # noqa: FBT001
    """Return an answer of /v1/embeddings, with its rows in reverse order."""
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    rows = []
    for index, text in enumerate(texts):
        vector = build_vector(text)
        encoded = base64.b64encode(vector.tobytes()).decode()
        rows.append({"index": index, "embedding": encoded if uses_base64 else vector.tolist()})
    return {"object": "list", "data": rows[::-1], "model": body["model"]}


def build_tei_vectors(body: Any, _: bool) -> Any:  # noqa: FBT001
    """Return an answer of /embed."""
    texts = [body["inputs"]] if isinstance(body["inputs"], str) else body["inputs"]
    return [build_vector(text).tolist() for text in texts]


def build_ranks(body: Any, _: bool) -> Any:  # noqa: FBT001
    """Return an answer of /rerank: the score of a text is its length, the largest first."""
    rows = [{"index": index, "score": len(text)} for index, text in enumerate(body["texts"])]
    return sorted(rows, key=lambda row: -row["score"])


def build_classes(body: Any, _: bool) -> Any:  # noqa: FBT001
    """Return an answer of /predict for `inputs` of the form [[text], ...]."""
    return [
        [{"label": "short", "score": 1 / len(text)}, {"label": "long", "score": 1 - 1 / len(text)}]
        for [text] in body["inputs"]
    ]


class BrokenResponse(Response):
    """A response that ends before its body, so the server closes the connection."""

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"100")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


@contextmanager
def run_fake_server(**behaviour: Any) -> Iterator[FakeServer]:
    """Run a server in a thread for the duration of the block; yield it with its address."""
    fake = FakeServer(**behaviour)
    # A timer of uvloop may end up to 1 ms early; no answer may take less than `seconds`.
    options: dict[str, Any] = {"loop": "asyncio", "log_level": "critical", "lifespan": "off"}
    settings = uvicorn.Config(fake.build_app(), port=0, **options)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, name="fake server")
    thread.start()
    try:
        wait_for(lambda: server.started, MAX_START_SECONDS, poll_seconds=0.005)
        [listener] = server.servers
        fake.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield fake
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


if __name__ == "__main__":
    uvicorn.run(FakeServer().build_app(), port=int(sys.argv[1]), log_level="critical")
