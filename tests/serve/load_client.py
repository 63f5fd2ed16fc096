"""A client process that sends requests in a closed or an open loop, and prints their answers.

    python load_client.py < OPTIONS

OPTIONS is a JSON object with the fields of `LoadOptions`. The output is a list with one
`[status, seconds, sent_at, has_retry_after]` for each request; status 0 is a broken connection.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import aiohttp


@dataclass(frozen=True)
class LoadOptions:
    """What a client sends."""

    url: str
    bodies: list[dict[str, Any]]
    """Sent in turn."""
    seconds: float
    concurrency: int = 0
    """Requests in flight of a closed loop; 0 for an open loop."""
    rate: float = 0.0
    """Requests per second of an open loop."""
    pause_seconds: float = 0.0
    """Pause of a closed loop after an answer."""
    headers: dict[str, str] = field(default_factory=dict)


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    seconds: float
    sent_at: float
    has_retry_after: bool


class LoadClient:
    """A running client process."""

    def __init__(self, options: LoadOptions) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin
        self._process.stdin.write(json.dumps(asdict(options)))
        self._process.stdin.close()

    def finish(self) -> list[Answer]:
        """Return the answers of all requests."""
        assert self._process.stdout
        with self._process.stdout as output:
            answers = [Answer(*item) for item in json.load(output)]
        assert self._process.wait() == 0
        return answers


async def run(options: LoadOptions) -> list[Answer]:
    """Send requests for some seconds and return their answers."""
    answers: list[Answer] = []
    start = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=options.headers
    ) as session:

        async def send(index: int) -> None:
            sent_at = time.monotonic()
            body = options.bodies[index % len(options.bodies)]
            status, has_retry_after = 0, False
            try:
                async with session.post(options.url, json=body) as response:
                    await response.read()
                    status = response.status
                    has_retry_after = "Retry-After" in response.headers
            except aiohttp.ClientError:
                pass
            seconds = time.monotonic() - sent_at
            answers.append(Answer(status, seconds, sent_at - start, has_retry_after))

        async def repeat(number: int) -> None:
            while time.monotonic() < start + options.seconds:
                await send(number)
                await asyncio.sleep(options.pause_seconds)

        if options.concurrency:
            await asyncio.gather(*map(repeat, range(options.concurrency)))
            return answers
        async with asyncio.TaskGroup() as group:
            for index in range(round(options.rate * options.seconds)):
                await asyncio.sleep(start + index / options.rate - time.monotonic())
                group.create_task(send(index))
    return answers


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(run(LoadOptions(**json.load(sys.stdin))))))
