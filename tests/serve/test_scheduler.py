"""The scheduler and the dispatcher on a simulated clock: fairness, priorities and overload.

The workers are simulated; the admission, the queue, the batches and the deadlines are the real
ones. Simulated times are exact, so limits of waits and shares are checked.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np
import pytest

from regauge.serving.dispatcher import NON_FINITE, ComputedRequest
from regauge.serving.request_errors import (
    DeadlineError,
    OverloadedError,
    TooManyRecordsError,
    UnavailableError,
)
from regauge.serving.scheduler import (
    GUARD_MS,
    MAX_CLIENTS,
    SHARES,
    SLICED_SHARE,
    Priority,
    QueuedRequest,
    Scheduler,
)
from serve.simulation import AffineTimes, ClientRecord, Simulation, run_simulated, simulate

Figure = Callable[[str, float], None]
Send = Callable[[], Awaitable[ComputedRequest]]
BULK_LENGTHS = (128,) * 64


async def repeat(send: Send, record: ClientRecord, until: float) -> None:
    """Send a request whenever the last one is answered, until a time."""
    loop = asyncio.get_running_loop()
    while loop.time() < until:
        await measure(send, record)


async def measure(send: Send, record: ClientRecord) -> None:
    """Send a request and record its answer; after a refusal, wait as it says."""
    start = asyncio.get_running_loop().time()
    try:
        request = await send()
    except OverloadedError as error:
        record.num_refused += 1
        await asyncio.sleep(error.retry_after or math.nan)
    except DeadlineError:
        record.num_late += 1
    else:
        record.num_computed += len(request.outputs)
        record.latencies.append(asyncio.get_running_loop().time() - start)


def draw_lengths(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, 128, count).tolist()


@pytest.mark.parametrize("num_workers", [1, 3])
@simulate
async def test_clients_share_the_workers_equally(num_workers: int, figure: Figure) -> None:
    """One client sends large requests, one sends many small ones, and one sends long records."""
    simulation = Simulation(num_workers=num_workers, max_wait_seconds=math.inf)
    until = asyncio.get_running_loop().time() + 20
    shapes = {"large": (1, [32] * 1000), "small": (60, [32] * 16), "long": (2, [120] * 200)}
    tasks = [
        repeat(
            lambda lengths=lengths, client=client: simulation.send(
                lengths, client, timeout_seconds=math.inf
            ),
            ClientRecord(),
            until,
        )
        for client, (count, lengths) in shapes.items()
        for _ in range(count)
    ]
    half = asyncio.get_running_loop().time() + 16
    running = asyncio.gather(*tasks)
    await asyncio.sleep(half - asyncio.get_running_loop().time())
    used = [simulation.computed_ms[client] for client in shapes]
    await running
    figure("unfairness between clients", max(used) / min(used))
    assert max(used) / min(used) <= 1.1


@simulate
async def test_small_requests_of_many_clients_end_one_after_the_other() -> None:
    """If their records were served in turn, all of them would end late."""
    simulation = Simulation(max_wait_seconds=math.inf)
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def send(client: int) -> float:
        await simulation.send([32] * 8, client)
        return loop.time() - start

    ends = await asyncio.gather(*map(send, range(100)))
    assert ends == sorted(ends)
    assert np.mean(ends) <= 0.6 * ends[-1]


def test_clients_that_have_left_are_forgotten() -> None:
    """Each connection is a client, so a busy server sees any number of them."""
    scheduler = Simulation(max_wait_seconds=math.inf).scheduler
    for number in range(2 * MAX_CLIENTS):
        scheduler.add(QueuedRequest(number, "bulk", math.inf), [32], 0.0)
        while scheduler.num_waiting > 100:
            assert scheduler.take_batch(0.0) is not None
    assert scheduler.num_clients <= MAX_CLIENTS + 1


async def send_interactive(
    simulation: Simulation, seconds: float, num_bulk: int
) -> tuple[ClientRecord, float]:
    """Return what an interactive client sees next to bulk clients, and the share of the bulk."""
    loop = asyncio.get_running_loop()
    start, record = loop.time(), ClientRecord()
    bulk = [
        asyncio.create_task(
            repeat(
                lambda client=client: simulation.send(
                    BULK_LENGTHS, client, timeout_seconds=math.inf
                ),
                ClientRecord(),
                start + seconds,
            )
        )
        for client in range(num_bulk)
    ]

    async def send() -> ComputedRequest:
        return await simulation.send([16], "interactive", "interactive")

    await asyncio.sleep(0.1)
    while loop.time() < start + seconds:
        await measure(send, record)
        await asyncio.sleep(0.05)
    used = simulation.computed_ms
    share = sum(value for client, value in used.items() if client != "interactive") / seconds / 1e3
    await asyncio.gather(*bulk)
    return record, share


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_interactive_request_waits_for_one_guarded_batch(
    num_workers: int, figure: Figure
) -> None:
    async def run(num_bulk: int) -> tuple[ClientRecord, float]:
        simulation = Simulation(num_workers=num_workers, max_wait_seconds=math.inf)
        return await send_interactive(simulation, 15.0, num_bulk)

    alone, _ = run_simulated(run(0))
    beside, share = run_simulated(run(4))
    times = AffineTimes()
    guarded = max(GUARD_MS, 2 * times.milliseconds(128, 1)) / 1e3
    # The first request meets batches that were sent before any interactive request.
    slowest, slowest_alone = max(beside.latencies[1:]), max(alone.latencies)
    figure("seconds of an interactive request, alone", slowest_alone)
    figure("seconds of an interactive request, beside bulk", slowest)
    assert slowest <= 2 * slowest_alone + guarded
    assert share > 0.4 * num_workers  # short batches are less efficient


@simulate
async def test_the_first_interactive_request_waits_for_the_batches_on_the_worker() -> None:
    simulation = Simulation(max_wait_seconds=math.inf)
    bulk = asyncio.create_task(simulation.send([128] * 1000, "bulk", timeout_seconds=math.inf))
    await asyncio.sleep(0.5)
    start = asyncio.get_running_loop().time()
    await simulation.send([16], "interactive", "interactive")
    seconds = asyncio.get_running_loop().time() - start
    await bulk
    times = AffineTimes()
    full = times.milliseconds(128, 8)
    assert seconds <= (2 * full + 2 * times.milliseconds(16, 1)) / 1e3


@simulate
async def test_bulk_keeps_its_share_when_interactive_requests_never_end(figure: Figure) -> None:
    simulation = Simulation(max_wait_seconds=math.inf)
    loop = asyncio.get_running_loop()
    until = loop.time() + 20
    tasks = [
        repeat(
            lambda client=client: simulation.send(
                [32] * 16, client, "interactive", timeout_seconds=math.inf
            ),
            ClientRecord(),
            until,
        )
        for client in range(8)
    ]
    tasks.append(
        repeat(
            lambda: simulation.send(BULK_LENGTHS, "bulk", timeout_seconds=math.inf),
            ClientRecord(),
            until,
        )
    )
    running = asyncio.gather(*tasks)
    await asyncio.sleep(16)
    used = dict(simulation.computed_ms)
    await running
    bulk = used.pop("bulk")
    interactive = sum(used.values())
    share = bulk / (bulk + interactive)
    figure("share of bulk requests", share)
    # Its share is of the time of the batches, and its short batches are less efficient.
    assert 0.3 * SHARES["bulk"] <= share <= 1.5 * SHARES["bulk"]


@simulate
async def test_a_record_of_a_rare_length_is_not_overtaken_for_ever() -> None:
    """Full batches of short records would always be more efficient than the long record."""
    simulation = Simulation(
        times=AffineTimes(0.01, 0.1), max_wait_seconds=math.inf, mixes_lengths=False
    )
    loop = asyncio.get_running_loop()
    until = loop.time() + 20
    tasks = [
        repeat(
            lambda client=client: simulation.send([8] * 128, client, timeout_seconds=math.inf),
            ClientRecord(),
            until,
        )
        for client in range(4)
    ]
    running = asyncio.gather(*tasks)
    await asyncio.sleep(1)
    start = loop.time()
    await simulation.send([128], "rare", timeout_seconds=math.inf)
    seconds = loop.time() - start
    await running
    # The batches that were planned before it, and one for each record ahead of it.
    assert seconds <= 0.5


OVERLOADS = {
    "equal clients": [(40, 16, "bulk")] * 8,
    "one heavy client": [(250, 16, "bulk"), (20, 4, "bulk"), (20, 4, "bulk")],
    "interactive and bulk": [(200, 2, "interactive"), (30, 64, "bulk"), (10, 200, "bulk")],
    "many clients": [(4, 16, "bulk")] * 100,
}
"""Of each client: its requests per second before scaling, their records, and their priority."""


async def overload(
    simulation: Simulation,
    clients: Sequence[tuple[float, int, Priority]],
    seconds: float,
    timeouts: Sequence[float] = (1.0, 3.0, 30.0),
    load: float = 4.0,
) -> tuple[ClientRecord, float]:
    """Send a multiple of the sustainable load in an open loop; return all answers and the goodput.

    The goodput is the cost of the records that were answered in time, per millisecond.
    """
    draw = np.random.default_rng(0)
    loop = asyncio.get_running_loop()
    pool = draw_lengths(5000, 1)
    mean_cost = np.mean(
        [simulation.planner.cost(simulation.buckets.find_length(item)) for item in pool]
    )
    offered = sum(rate * count for rate, count, _ in clients) * mean_cost
    scale = load * simulation.capacity / offered
    total, useful = ClientRecord(), [0.0]
    tasks: set[asyncio.Task[None]] = set()
    start = loop.time()

    async def send(lengths: list[int], client: int, priority: Priority) -> None:
        begin = loop.time()
        timeout = float(draw.choice(timeouts))
        try:
            request = await simulation.send(lengths, client, priority, timeout)
        except OverloadedError as error:
            total.num_refused += 1 if error.retry_after else math.nan
        except DeadlineError:
            total.num_late += 1
        else:
            assert not request.failures
            total.latencies.append(loop.time() - begin)
            assert total.latencies[-1] <= timeout
            total.num_computed += len(lengths)
            if loop.time() <= start + seconds:
                useful[0] += sum(
                    simulation.planner.cost(simulation.buckets.find_length(item))
                    for item in lengths
                )

    async def arrive(client: int, rate: float, count: int, priority: Priority) -> None:
        while loop.time() < start + seconds:
            await asyncio.sleep(draw.exponential(1 / (rate * scale)))
            offset = int(draw.integers(0, len(pool) - count))
            task = asyncio.create_task(send(pool[offset : offset + count], client, priority))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    arrivals = [arrive(index, *client) for index, client in enumerate(clients)]
    await asyncio.gather(*arrivals)
    goodput = useful[0] / seconds / 1e3
    if math.isfinite(max(timeouts)):
        await asyncio.gather(*tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return total, goodput


@pytest.mark.parametrize("name", OVERLOADS)
def test_at_four_times_the_load_every_accepted_request_is_answered_in_time(
    name: str, figure: Figure
) -> None:
    record, goodput, sustainable = run_overload(OVERLOADS[name], num_workers=2)
    figure(f"simulated goodput, {name}", goodput / sustainable)
    assert record.num_late == 0
    assert record.num_refused > 0
    assert goodput >= 0.9 * sustainable


@pytest.mark.parametrize("load", [1, 2, 4])
@pytest.mark.parametrize("name", OVERLOADS)
def test_accepted_requests_keep_the_maximum_wait_at_every_load(
    name: str, load: int, figure: Figure
) -> None:
    record, goodput, sustainable = run_overload(OVERLOADS[name], timeouts=(30.0,), load=load)
    slowest = float(np.quantile(record.latencies, 0.99))
    figure(f"simulated p99 of accepted requests, {name} at {load} times the load", slowest)
    assert slowest <= 1.5 * 2.0
    assert goodput >= 0.7 * sustainable


def run_overload(
    clients: Sequence[tuple[float, int, Priority]],
    *,
    num_workers: int = 1,
    slowness: float = 1.0,
    timeouts: Sequence[float] = (1.0, 3.0, 30.0),
    load: float = 4.0,
) -> tuple[ClientRecord, float, float]:
    """Return the answers, the goodput, and the rate of the same load without any deadline."""

    async def run(max_wait_seconds: float, *timeouts: float) -> tuple[ClientRecord, float]:
        simulation = Simulation(
            num_workers=num_workers,
            slowness=slowness,
            times=AffineTimes(10, 0.05),
            max_wait_seconds=max_wait_seconds,
        )
        for _ in range(10):
            await simulation.send([128], timeout_seconds=math.inf)
        answers = await overload(simulation, clients, 12.0, timeouts, load)
        assert simulation.scheduler.num_waiting == 0
        return answers

    _, sustainable = run_simulated(run(math.inf, math.inf))
    record, goodput = run_simulated(run(2.0, *timeouts))
    return record, goodput, sustainable


def test_an_overload_of_workers_that_are_slower_than_measured_is_refused_in_time(
    figure: Figure,
) -> None:
    """The artifact was measured on a faster machine: batches take three times as long."""
    clients = OVERLOADS["equal clients"]
    record, goodput, sustainable = run_overload(clients, slowness=3.0)
    figure("simulated goodput, slow workers", goodput / sustainable)
    assert record.num_late == 0
    assert goodput >= 0.9 * sustainable


@simulate
async def test_a_small_model_on_a_busy_machine_refuses_nothing_that_it_answers_soon() -> None:
    """A batch waits 30 ms for a processor: 100 times its expected time if it is small."""
    simulation = Simulation(times=AffineTimes(0.1, 0.05), worker_times=AffineTimes(30.0, 0.05))
    until = asyncio.get_running_loop().time() + 20
    records = [ClientRecord() for _ in range(64)]
    tasks = []
    for number, record in enumerate(records):
        lengths = draw_lengths(1 + number % 12, number)
        send = partial(simulation.send, [min(length, 16) for length in lengths], number)
        tasks.append(repeat(send, record, until))
    await asyncio.gather(*tasks)
    assert sum(record.num_refused for record in records) == 0
    assert max(max(record.latencies) for record in records) <= 2.0


@simulate
async def test_requests_that_wait_for_little_work_are_not_refused_for_a_largest_batch() -> None:
    """After small batches, a largest batch is expected to take over 1.5 s; the queue has less."""
    simulation = Simulation(times=AffineTimes(0.1, 0.05), worker_times=AffineTimes(30.0, 0.05))
    for _ in range(100):
        await simulation.send([16])
    scheduler = simulation.scheduler
    assert scheduler.time_ratio * simulation.planner.max_milliseconds > 1500
    answers = await asyncio.gather(*(simulation.send([8] * 4, client) for client in range(12)))
    assert [len(answer.outputs) for answer in answers] == [4] * 12


@simulate
async def test_a_request_whose_wait_is_too_long_is_refused_at_once() -> None:
    simulation = Simulation(max_wait_seconds=2.0)
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(simulation.send([128] * 1000, timeout_seconds=30))
    await asyncio.sleep(0.01)
    start = loop.time()
    with pytest.raises(OverloadedError) as failure:
        await simulation.send([128] * 1200, "other", timeout_seconds=30)
    seconds = loop.time() - start
    short = await simulation.send([128], "other", timeout_seconds=30)
    assert short.num_open == 0
    await first
    error = failure.value
    assert error.status == 429
    assert error.retry_after is not None
    assert error.retry_after >= 1
    assert seconds == 0.0


SLOW = AffineTimes(10, 0.1)
"""2,048 records of 128 tokens take 29 s, more than a request may."""


@pytest.mark.parametrize("num_workers", [1, 3])
@simulate
async def test_an_idle_server_answers_the_number_that_it_names(num_workers: int) -> None:
    simulation = Simulation(num_workers=num_workers, times=SLOW)
    simulation.dispatcher.fill_workers()
    loop = asyncio.get_running_loop()
    for seed in range(2):
        lengths = [128] * 9000 if seed else draw_lengths(9000, seed)
        with pytest.raises(TooManyRecordsError) as failure:
            await simulation.send(lengths, timeout_seconds=30.0)
        assert failure.value.status == 413
        count = failure.value.num_records
        assert f"send at most {count} of these records" in failure.value.message
        start = loop.time()
        request = await simulation.send(lengths[:count], timeout_seconds=30.0)
        assert not request.failures
        assert loop.time() - start == pytest.approx(SLICED_SHARE * 30.0, rel=0.15)
        assert simulation.scheduler.num_waiting == 0
    assert simulation.scheduler.count_fitting(128, 30.0) <= count


@simulate
async def test_clients_keep_their_shares_beside_a_sliced_request(figure: Figure) -> None:
    """Another client of its own address, and clients of others, send small requests."""
    simulation = Simulation(times=SLOW)
    loop = asyncio.get_running_loop()
    large = asyncio.create_task(simulation.send([128] * 1000, "large", timeout_seconds=30.0))
    until = loop.time() + 12
    records = {name: ClientRecord() for name in ("large", "other", "interactive")}
    others = [
        repeat(lambda: simulation.send([128] * 4, "large"), records["large"], until),
        repeat(
            lambda: simulation.send([16], "interactive", "interactive"),
            records["interactive"],
            until,
        ),
    ]
    others += [
        repeat(lambda: simulation.send([128] * 8, "other"), records["other"], until)
        for _ in range(4)
    ]
    await asyncio.gather(*others)
    used = dict(simulation.computed_ms)
    assert (await large).num_open == 0
    for name, record in records.items():
        figure(f"simulated seconds beside a sliced request, {name}", max(record.latencies))
        assert (record.num_refused, record.num_late) == (0, 0)
        assert max(record.latencies) <= 2.0
    assert used["other"] >= 0.8 * used["large"]


@simulate
async def test_a_second_sliced_request_is_accepted_after_the_time_it_is_told() -> None:
    simulation = Simulation(times=SLOW)
    first = asyncio.create_task(simulation.send([128] * 1000, "first", timeout_seconds=30.0))
    await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError) as failure:
        await simulation.send([128] * 1000, "second", timeout_seconds=30.0)
    await asyncio.sleep(failure.value.retry_after or math.nan)
    assert (await simulation.send([128] * 1000, "second", timeout_seconds=30.0)).num_open == 0
    assert (await first).num_open == 0


@simulate
async def test_a_sliced_request_survives_a_lost_worker_and_leaves_with_its_client() -> None:
    simulation = Simulation(num_workers=2, times=SLOW)
    simulation.workers[0].lethal = frozenset({13})
    lengths = draw_lengths(2000, 1)
    tokens = [13, *range(100, 2099)]
    request = await simulation.send(lengths, timeout_seconds=60.0, first_tokens=tokens)
    assert request.outputs[1:, 0].tolist() == tokens[1:]
    leaves = asyncio.create_task(simulation.send([128] * 1000, timeout_seconds=30.0))
    await asyncio.sleep(0.5)
    assert simulation.scheduler.num_waiting > 500
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert simulation.scheduler.num_waiting == 0
    assert simulation.scheduler.estimate_wait("bulk") < 2.0
    assert (await simulation.send([128] * 1000, timeout_seconds=30.0)).num_open == 0


@simulate
async def test_a_deadline_that_the_wait_exceeds_is_refused() -> None:
    simulation = Simulation(max_wait_seconds=2.0)
    first = asyncio.create_task(simulation.send([128] * 800, timeout_seconds=30))
    await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError):
        await simulation.send([128] * 8, "other", timeout_seconds=0.5)
    await first


@simulate
async def test_a_late_request_gets_504_and_leaves_the_queue() -> None:
    simulation = Simulation(slowness=50.0)
    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(DeadlineError):
        await simulation.send([128] * 400, timeout_seconds=1.0)
    seconds = loop.time() - start
    assert simulation.scheduler.num_waiting == 0
    assert seconds == pytest.approx(1.0)


@simulate
async def test_a_client_that_leaves_frees_its_records() -> None:
    simulation = Simulation(max_wait_seconds=math.inf)
    stays = asyncio.create_task(simulation.send([32] * 100, "stays"))
    leaves = asyncio.create_task(simulation.send([128] * 2000, "leaves", timeout_seconds=math.inf))
    await asyncio.sleep(0.05)
    assert simulation.scheduler.num_waiting > 1500
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert simulation.scheduler.num_waiting <= 100
    assert simulation.scheduler.estimate_wait("bulk") < 0.2
    assert (await stays).num_open == 0
    assert simulation.scheduler.num_waiting == 0
    assert simulation.scheduler.estimate_wait("bulk") == 0


@simulate
async def test_outputs_belong_to_their_records() -> None:
    """Records of several requests and lengths are mixed in batches."""

    async def send(simulation: Simulation, seed: int) -> None:
        lengths = draw_lengths(50, seed)
        tokens = list(range(100 * seed, 100 * seed + 50))
        priority: Priority = "interactive" if seed % 2 else "bulk"
        request = await simulation.send(lengths, seed, priority, 300.0, tokens)
        assert request.outputs[:, 0].tolist() == tokens

    simulation = Simulation(num_workers=2, max_wait_seconds=math.inf)
    await asyncio.gather(*(send(simulation, seed) for seed in range(1, 20)))
    batches = [tokens for worker in simulation.workers for _, tokens in worker.batches]
    assert sum(map(len, batches)) == 19 * 50
    assert any(len({token // 100 for token in tokens}) > 1 for tokens in batches)


@simulate
async def test_the_records_of_a_client_are_computed_in_order() -> None:
    simulation = Simulation(max_wait_seconds=math.inf)
    sends = [
        simulation.send([32] * 50, "client", "bulk", 300.0, [number] * 50) for number in range(5)
    ]
    await asyncio.gather(*sends)
    order = [token for _, tokens in simulation.workers[0].batches for token in tokens]
    assert order == sorted(order)


@simulate
async def test_a_poisoned_record_fails_alone() -> None:
    simulation = Simulation(num_workers=2)
    for worker in simulation.workers:
        worker.poison = frozenset({13})
    good = [simulation.send([32] * 8, name, first_tokens=[5] * 8) for name in range(4)]
    bad = simulation.send([32] * 8, "bad", first_tokens=[5] * 7 + [13])
    *answers, poisoned = await asyncio.gather(*good, bad)
    assert all(not request.failures for request in answers)
    assert all((request.outputs == 5).all() for request in answers)
    assert poisoned.failures == {7: "poison"}
    assert (poisoned.outputs[:7] == 5).all()


@simulate
async def test_a_record_that_ends_workers_fails_after_two() -> None:
    simulation = Simulation(num_workers=2)
    for worker in simulation.workers:
        worker.lethal = frozenset({13})
    good = [simulation.send([32] * 8, name, first_tokens=[5] * 8) for name in range(4)]
    bad = simulation.send([32] * 8, "bad", first_tokens=[5] * 7 + [13])
    *answers, poisoned = await asyncio.gather(*good, bad)
    assert all(not request.failures for request in answers)
    assert list(poisoned.failures) == [7]
    assert simulation.pool.num_replaced == 2


@simulate
async def test_batches_behind_a_lost_worker_are_not_blamed() -> None:
    """The records of a batch that was not started are computed again, in a batch."""
    simulation = Simulation(max_wait_seconds=math.inf)
    simulation.workers[0].lethal = frozenset({13})
    bad = asyncio.create_task(simulation.send([128] * 8, "bad", first_tokens=[13] + [5] * 7))
    good = asyncio.create_task(simulation.send([128] * 8, "good", first_tokens=[6] * 8))
    assert list((await bad).failures) == [0]
    assert not (await good).failures
    assert (128, [6] * 8) in simulation.workers[0].batches


@simulate
async def test_without_a_worker_requests_get_503() -> None:
    simulation = Simulation()
    simulation.pool.ready.clear()
    with pytest.raises(UnavailableError) as failure:
        await simulation.send([8])
    error = failure.value
    assert (error.status, error.retry_after) == (503, 1)


@simulate
async def test_outputs_that_are_not_finite_fail_their_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation()
    original = np.array

    def damage(rows: list[list[float]], dtype: type) -> np.ndarray:
        outputs = original(rows, dtype)
        outputs[outputs == 13] = np.nan
        return outputs

    monkeypatch.setattr("serve.simulation.np.array", damage)
    request = await simulation.send([8] * 3, first_tokens=[5, 13, 6])
    assert request.failures == {1: NON_FINITE}
    assert request.outputs[0].tolist() == [5, 5]


@simulate
async def test_the_padding_of_a_record_depends_on_its_length_alone() -> None:
    simulation = Simulation(mixes_lengths=False, max_wait_seconds=math.inf)
    await asyncio.gather(*(simulation.send(draw_lengths(40, seed), seed) for seed in range(10)))
    lengths = {length for length, _ in simulation.workers[0].batches}
    assert lengths == {8, 16, 32, 64, 128}


def test_a_scheduler_without_records_has_no_batch() -> None:
    simulation = Simulation()
    scheduler: Scheduler = simulation.scheduler
    assert scheduler.take_batch(0.0) is None
    request = QueuedRequest("client", "bulk", 10.0)
    scheduler.add(request, [8, 8], 0.0)
    scheduler.cancel(request)
    assert (scheduler.num_waiting, request.num_waiting) == (0, 0)
    assert scheduler.take_batch(0.0) is None
