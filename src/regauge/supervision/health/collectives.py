"""Checks that need several processes: collectives, and the hosts' clocks and versions.

A collective has exact results, the same bits on all processes, and a bounded latency.
"""

from __future__ import annotations

import re
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge.accelerators import wait_for_all
from regauge.supervision.health.findings import Bandwidth, Finding
from regauge.system.errors import first_line

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from regauge.system.hooks import Inject
    from regauge.system.processes import World

NUM_ELEMENTS = 1 << 10
QUICK_BYTES = (1 << 10, 1 << 16, 1 << 20)
FULL_BYTES = (*QUICK_BYTES, 1 << 23, 1 << 26)
REPETITIONS = 5
MAX_LATENCY_SECONDS = 0.25
"""Even between two continents, a message of a few KiB takes less time."""
TOLERANCE = 1e-5
FAULT_POINT = "preflight:collective"
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""The name since torch 2.13, or else the older one."""


@dataclass(frozen=True)
class CheckGroup:
    """This process within a group checked together."""

    rank: int
    size: int
    device: torch.device
    location: str
    """This process and its host."""
    global_ranks: tuple[int, ...]
    """Rank of each process in the run."""

    @classmethod
    def from_world(cls, world: World, device: torch.device) -> CheckGroup:
        location = f"process {world.rank} on {socket.gethostname()}"
        return cls(world.rank, world.size, device, location, tuple(range(world.size)))


def check_collectives(group: CheckGroup, inject: Inject) -> Generator[Finding | str]:
    """Yield the name of each check before it begins, then the finding."""
    for name, check in (
        ("all-gather", _check_all_gather),
        ("all-reduce", _check_all_reduce),
        ("reduce-scatter", _check_reduce_scatter),
        ("all-to-all", _check_all_to_all),
        ("latency", _check_latency),
    ):
        yield name
        try:
            problem, value = check(group, inject)
        except RuntimeError as error:
            problem, value = _shorten_error(error), ""
        yield Finding(name, group.location, value, problem, ok=not problem)


def measure_bandwidths(group: CheckGroup, sizes: tuple[int, ...]) -> list[Bandwidth]:
    """Return the speed of each collective at each size; the slowest process counts."""
    return [_measure_bandwidth(group, op, size) for op in BUS_FACTORS for size in sizes]


BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "all_gather": lambda size: (size - 1) / size,
    "reduce_scatter": lambda size: (size - 1) / size,
    "all_to_all": lambda size: (size - 1) / size,
}
"""Collective -> link bytes per message byte, by process count (nccl-tests, PERFORMANCE.md)."""


def _shorten_error(error: RuntimeError) -> str:
    """Return a backend's message without source location and advice."""
    line = re.sub(r"^\[[^\]]*\] *", "", first_line(error))
    return line.partition(". ")[0]


def _build_message(group: CheckGroup, inject: Inject) -> Tensor:
    """Return integers [NUM_ELEMENTS], unique to this process, with exact sums."""
    message = _integers(group.rank)
    if "corrupt" in inject(FAULT_POINT):
        message[NUM_ELEMENTS // 2] += 1
    return message.to(group.device)


def _integers(rank: int) -> Tensor:
    return torch.arange(NUM_ELEMENTS, dtype=torch.int32) + 1000 * rank


def _check_all_gather(group: CheckGroup, inject: Inject) -> tuple[str, str]:
    messages = [
        torch.zeros(NUM_ELEMENTS, dtype=torch.int32, device=group.device) for _ in range(group.size)
    ]
    dist.all_gather(messages, _build_message(group, inject))
    for rank, message in enumerate(messages):
        if not torch.equal(message.cpu(), _integers(rank)):
            return _describe_corruption(group, rank), ""
    return "", "exact"


def _describe_corruption(group: CheckGroup, rank: int) -> str:
    return f"data of process {group.global_ranks[rank]} arrived changed"


def _check_all_reduce(group: CheckGroup, inject: Inject) -> tuple[str, str]:
    total = _build_message(group, inject)
    dist.all_reduce(total)
    if not torch.equal(total.cpu(), _integer_sum(group)):
        return "a sum of integers is wrong", ""
    values = [_random_floats(rank) for rank in range(group.size)]
    exact = torch.stack(values).double().sum(0)
    result = values[group.rank].to(group.device)
    dist.all_reduce(result)
    error = float((result.cpu().double() - exact).abs().max() / exact.abs().max())
    if not error <= TOLERANCE:
        return f"a sum is off by {error:.1e}", ""
    bit_sum = result.view(torch.int32).sum(dtype=torch.int64)
    maximum, minimum = bit_sum.clone(), bit_sum.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    dist.all_reduce(minimum, dist.ReduceOp.MIN)
    if int(maximum) != int(minimum):
        return "processes have different bits of the same sum", ""
    return "", f"exact, floats off by {error:.0e}"


def _random_floats(rank: int) -> Tensor:
    return torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(rank))


def _integer_sum(group: CheckGroup) -> Tensor:
    values = torch.stack([_integers(rank) for rank in range(group.size)])
    return values.sum(0, dtype=torch.int32)


def _check_reduce_scatter(group: CheckGroup, inject: Inject) -> tuple[str, str]:
    count = NUM_ELEMENTS // group.size
    result = torch.zeros(count, dtype=torch.int32, device=group.device)
    _reduce_scatter(result, _build_message(group, inject)[: count * group.size])
    local = slice(group.rank * count, (group.rank + 1) * count)
    is_exact = torch.equal(result.cpu(), _integer_sum(group)[local])
    return ("", "exact") if is_exact else ("wrong sums", "")


def _check_all_to_all(group: CheckGroup, inject: Inject) -> tuple[str, str]:
    count = NUM_ELEMENTS // group.size
    result = torch.zeros(count * group.size, dtype=torch.int32, device=group.device)
    dist.all_to_all_single(result, _build_message(group, inject)[: count * group.size])
    local = slice(group.rank * count, (group.rank + 1) * count)
    for rank, message in enumerate(result.cpu().split(count)):
        if not torch.equal(message, _integers(rank)[local]):
            return _describe_corruption(group, rank), ""
    return "", "exact"


def _check_latency(group: CheckGroup, inject: Inject) -> tuple[str, str]:
    durations = []
    for _ in range(REPETITIONS):
        value = _build_message(group, inject)
        began = time.perf_counter()
        dist.all_reduce(value)
        value.cpu()
        durations.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(durations)).to(group.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = float(slowest)
    problem = f"a sum of 4 KiB takes {seconds:.2f} s" if seconds > MAX_LATENCY_SECONDS else ""
    return problem, f"{seconds * 1e6:,.0f} us"


def _measure_bandwidth(group: CheckGroup, op: str, size: int) -> Bandwidth:
    count = max(group.size, size // 4 // group.size * group.size)
    ones = torch.ones(count, device=group.device)
    shard = torch.zeros(count // group.size, device=group.device)
    whole = torch.zeros(count, device=group.device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole.copy_(ones)),
        "all_gather": lambda: _all_gather(whole, ones[: len(shard)]),
        "reduce_scatter": lambda: _reduce_scatter(shard, ones),
        "all_to_all": lambda: dist.all_to_all_single(whole, ones),
    }
    durations = []
    for _ in range(REPETITIONS + 1):
        wait_for_all()
        began = time.perf_counter()
        calls[op]()
        float(whole[0] + shard[0])
        durations.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(durations[1:])).to(group.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    result = shard if op == "reduce_scatter" else whole
    expected = group.size if op in ("all_reduce", "reduce_scatter") else 1
    num_wrong = int((result != expected).sum())
    seconds, num_bytes = float(slowest), 4 * count
    algorithm_rate = num_bytes / seconds / 1e9
    bus_rate = algorithm_rate * BUS_FACTORS[op](group.size)
    return Bandwidth(
        op,
        num_bytes,
        count,
        "float",
        round(seconds * 1e6, 1),
        algorithm_rate,
        bus_rate,
        num_wrong,
    )


MAX_SKEW_SECONDS = 1.0
PACKAGES = ("regauge", "torch", "transformers")


def check_hosts(size: int) -> list[Finding]:
    """Return findings about all hosts, the same on every process."""
    wait_for_all()
    local = {
        "host": socket.gethostname(),
        "time": time.time(),
        "versions": {name: version(name) for name in PACKAGES},
    }
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, local)
    return [_check_clocks(hosts), _check_versions(hosts)]


def _check_clocks(hosts: list[dict[str, Any]]) -> Finding:
    earliest = min(hosts, key=lambda host: host["time"])
    latest = max(hosts, key=lambda host: host["time"])
    skew = latest["time"] - earliest["time"]
    value = f"{skew:.3f} s apart"
    if skew > MAX_SKEW_SECONDS:
        return Finding.bad("clocks", latest["host"], f"ahead of {earliest['host']}", value)
    return Finding("clocks", "all hosts", value, numbers={"skew_seconds": skew})


def _check_versions(hosts: list[dict[str, Any]]) -> Finding:
    first = hosts[0]
    for host in hosts:
        if host["versions"] != first["versions"]:
            problem = f"{host['versions']}, but {first['host']} has {first['versions']}"
            return Finding.bad("versions", host["host"], problem)
    value = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    return Finding("versions", "all hosts", value)
