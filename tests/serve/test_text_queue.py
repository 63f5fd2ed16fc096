"""When texts are generated, and which answers are late, on a simulated clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from regauge.models.settings import Generation
from regauge.serving.request_errors import DeadlineError, OverloadedError
from regauge.serving.text_generation.settings import TextServing
from regauge.serving.text_generation.text_queue import TextQueue, TokenStream
from regauge.serving.text_generation.text_requests import EngineLimits, TokenEvent
from serve.simulation import TextSimulation, run_simulated, simulate

TIMES = TextServing(first_token_seconds=40.0, token_seconds=5.0)


def open_stream(timeout_seconds: float = math.inf, *, has_streams: bool = True) -> TokenStream:
    """Return the stream of a worker that generates nothing by itself."""
    limits = EngineLimits(None, 100, 8, has_streams=has_streams)
    worker = SimpleNamespace(
        limits=limits, has_ended=False, num_requests=0, step_seconds=1.0, prompt_token_seconds=0.0,
        send=lambda _: None, forget=lambda _: None,
    )  # fmt: skip
    pool: Any = SimpleNamespace(ready=[worker])
    prompt = np.array([1], np.int32)
    return TextQueue(pool, TIMES).add(prompt, Generation(), timeout_seconds=timeout_seconds)


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


async def send_all(
    simulation: TextSimulation, count: int, tokens: int, client: str = "client", **options: Any
) -> tuple[list[float], list[OverloadedError]]:
    """Return the times to the first token of the accepted requests, and the refusals."""
    sends = [simulation.send(tokens, client, **options) for _ in range(count)]
    results: list[Any] = await asyncio.gather(*sends, return_exceptions=True)
    refusals = [item for item in results if isinstance(item, OverloadedError)]
    accepted = [item for item in results if isinstance(item, float)]
    assert len(accepted) + len(refusals) == count, results
    return accepted, refusals


@pytest.mark.parametrize("tokens", [20, 100, 400])
@pytest.mark.parametrize("ratio", [1, 4])
@simulate
async def test_of_a_burst_as_many_are_accepted_as_start_in_time(tokens: int, ratio: int) -> None:
    """With `ratio`, answers are shorter than their requests allow."""
    simulation = TextSimulation(first_token_seconds=10.0, max_queued_requests=1000)
    accepted, refusals = await send_all(simulation, 500, tokens // ratio, max_new_tokens=tokens)
    assert max(accepted) <= 10.0
    assert refusals
    assert all(1 <= (error.retry_after or 0) <= 60 for error in refusals)
    again, _ = await send_all(simulation, 500, tokens // ratio, max_new_tokens=tokens)
    assert max(again) <= 10.0
    assert len(again) >= len(accepted)
    # One client may fill half of the time, with a margin; 14 of 16 places are for it.
    assert len(again) >= 14 + 14 * int(0.35 * 10.0 / (0.05 * tokens / ratio))


@simulate
async def test_a_client_is_answered_at_once_beside_the_burst_of_another() -> None:
    simulation = TextSimulation(first_token_seconds=30.0)
    burst = asyncio.create_task(send_all(simulation, 300, 100, "heavy"))
    await asyncio.sleep(0.1)
    assert simulation.queue.num_waiting > 20
    assert await simulation.send(1, "light") <= 2 * 0.05
    beside = [simulation.send(20, f"light {number}") for number in range(8)]
    assert max(await asyncio.gather(*beside)) <= 6.0
    accepted, _ = await burst
    assert max(accepted) <= 30.0


@simulate
async def test_clients_share_the_places_equally_and_none_is_late() -> None:
    simulation = TextSimulation(first_token_seconds=20.0, max_queued_requests=1000)
    loop = asyncio.get_running_loop()
    start, starts = loop.time(), dict[str, list[float]]()

    async def run(client: str, count: int) -> None:
        while loop.time() < start + 120:
            accepted, _ = await send_all(simulation, count, 30, client)
            starts.setdefault(client, []).extend(accepted)
            await asyncio.sleep(0.5)

    await asyncio.gather(run("one", 200), run("two", 20), run("three", 20))
    assert max(max(seconds) for seconds in starts.values()) <= 20.0
    counts = [len(seconds) for seconds in starts.values()]
    assert min(counts) > 0.5 * max(counts)


TEXT_LOADS = {
    "short answers": (1, 20, 60.0),
    "long answers": (1, 200, 300.0),
    "long prompts": (1000, 50, 300.0),
    "mixed": (300, 100, 300.0),
}
"""Mean prompt and answer tokens, drawn from exponential distributions, and simulated seconds."""
OBJECTIVE_SECONDS = 10.0


async def overload(
    mean_prompt: int, mean_answer: int, seconds: float, load: float
) -> tuple[list[float], int, float]:
    """Send a multiple of the capacity in an open loop, by 8 clients.

    Returns the times to the first tokens of accepted requests, the number of late ones, and the
    share of the capacity that was used for answers in time.
    """
    step, places, rate = 0.05, 16, 0.002
    simulation = TextSimulation(
        places=places,
        step_seconds=step,
        prompt_token_seconds=rate,
        first_token_seconds=OBJECTIVE_SECONDS,
    )
    draw = np.random.default_rng(1)
    loop = asyncio.get_running_loop()
    start, first_tokens, late, useful = loop.time(), list[float](), list[float](), list[float]()
    tasks: set[asyncio.Task[None]] = set()

    async def send(prompt: int, answer: int, client: int) -> None:
        cost = prompt * rate + answer * step / places
        try:
            first = await simulation.send(answer, client, prompt_tokens=prompt)
        except OverloadedError:
            return
        except DeadlineError:
            late.append(loop.time())
            return
        first_tokens.append(first)
        if loop.time() <= start + seconds and first <= OBJECTIVE_SECONDS:
            useful.append(cost)

    mean_cost = mean_prompt * rate + mean_answer * step / places
    while loop.time() < start + seconds:
        await asyncio.sleep(draw.exponential(mean_cost / load))
        prompt, answer = (1 + int(draw.exponential(mean)) for mean in (mean_prompt, mean_answer))
        task = asyncio.create_task(send(prompt, answer, int(draw.integers(8))))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return first_tokens, len(late), sum(useful) / seconds


@pytest.mark.parametrize("load", [1, 2, 4])
@pytest.mark.parametrize("name", TEXT_LOADS)
def test_answers_begin_in_time_at_every_load(
    name: str, load: int, figure: Callable[[str, float], None]
) -> None:
    first_tokens, num_late, goodput = run_simulated(overload(*TEXT_LOADS[name], load))
    assert num_late <= 0.03 * len(first_tokens)
    waits = [*first_tokens, *[OBJECTIVE_SECONDS] * num_late]
    slowest = float(np.quantile(waits, 0.99))
    figure(f"simulated p99 of first tokens, {name} at {load} times the load", slowest)
    figure(f"simulated goodput, {name} at {load} times the load", goodput)
    assert slowest <= 1.5 * OBJECTIVE_SECONDS
    assert goodput >= (0.7 if load > 1 else 0.5)


@simulate
async def test_a_deadline_that_the_queue_exceeds_is_refused_at_once() -> None:
    simulation = TextSimulation()
    burst = asyncio.create_task(send_all(simulation, 40, 100))
    await asyncio.sleep(0.1)
    with pytest.raises(OverloadedError):
        await simulation.send(10, timeout_seconds=1.0)
    assert await simulation.send(10, "other", timeout_seconds=2.0) <= 0.1
    await burst


@simulate
async def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    simulation = TextSimulation(places=1)
    first = asyncio.create_task(simulation.send(100))
    waiting = asyncio.create_task(simulation.send(100))
    await asyncio.sleep(1)
    assert (simulation.queue.num_waiting, simulation.worker.num_requests) == (1, 1)
    waiting.cancel()
    first.cancel()
    await asyncio.sleep(0.1)
    assert (simulation.queue.num_waiting, simulation.worker.num_requests) == (0, 0)
    assert await simulation.send(2) <= 0.1
