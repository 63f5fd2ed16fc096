"""When texts are generated, and which answers are late, on a simulated clock."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from regauge.serving.request_errors import DeadlineError
from regauge.serving.text_generation.settings import TextServing
from regauge.serving.text_generation.text_client import TokenStream
from regauge.serving.text_generation.text_requests import EngineLimits, TokenEvent
from serve.simulation import simulate

TIMES = TextServing(first_token_seconds=40.0, token_seconds=5.0)


def open_stream(timeout_seconds: float = math.inf, *, has_streams: bool = True) -> TokenStream:
    """Return the stream of a worker without a process."""
    limits = EngineLimits(None, 100, 8, has_streams=has_streams)
    worker: Any = SimpleNamespace(limits=limits, forget=lambda _: None)
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    return TokenStream(worker, "0", TIMES, deadline)


async def put_tokens(stream: TokenStream, pauses: list[float]) -> None:
    for pause in pauses:
        await asyncio.sleep(pause)
        stream.put(TokenEvent("0", 7))


async def read_until_late(stream: TokenStream, pauses: list[float]) -> tuple[int, float, str]:
    """Return the number of tokens, the seconds until the answer is late, and the message."""
    loop = asyncio.get_running_loop()
    start, num_tokens = loop.time(), 0
    writer = asyncio.create_task(put_tokens(stream, pauses))
    try:
        while events := await stream.read():
            num_tokens += len(events)
    except DeadlineError as error:
        return num_tokens, loop.time() - start, error.message
    finally:
        writer.cancel()
    raise AssertionError("the answer was complete")


@simulate
async def test_a_token_is_late_and_not_a_long_answer() -> None:
    tokens = [39.0, *[4.9] * 1000]
    num_tokens, seconds, message = await read_until_late(open_stream(), tokens)
    assert num_tokens == len(tokens)
    assert seconds == pytest.approx(sum(tokens) + 5)
    assert message == "the next token was not generated in time; try again later"


@simulate
async def test_a_first_token_may_take_longer_than_the_next() -> None:
    num_tokens, seconds, _ = await read_until_late(open_stream(), [41.0])
    assert (num_tokens, seconds) == (0, pytest.approx(40))


@simulate
async def test_the_deadline_of_a_client_limits_the_whole_answer() -> None:
    num_tokens, seconds, message = await read_until_late(open_stream(10.0), [1.0] * 100)
    assert (num_tokens, seconds) == (pytest.approx(10, abs=1), pytest.approx(10))
    assert "the answer was not complete in time" in message


@simulate
async def test_the_tokens_of_a_slow_reader_are_not_late() -> None:
    stream = open_stream()
    await put_tokens(stream, [1.0] * 3)
    await asyncio.sleep(100)
    assert len(await stream.read()) == 3


@simulate
async def test_an_engine_that_reports_whole_answers_has_no_limits_for_tokens() -> None:
    stream = open_stream(has_streams=False)
    writer = asyncio.create_task(put_tokens(stream, [1000.0]))
    assert len(await stream.read()) == 1
    await writer
