"""What processes tell each other: exact, alike on all of them, and how fast."""

from __future__ import annotations

import re
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge.errors import plain
from regauge.health.findings import Bandwidth, Finding

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from regauge.hooks import Inject
    from regauge.processes import World

ELEMENTS = 1 << 10
QUICK_BYTES = (1 << 10, 1 << 16, 1 << 20)
FULL_BYTES = (*QUICK_BYTES, 1 << 23, 1 << 26)
REPETITIONS = 5
SLOWEST_SECONDS = 0.25
"""A message of some kilobytes takes less between two continents."""
TOLERANCE = 1e-5
MOMENT = "preflight:collective"
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""The names of torch 2.13, and those before it."""


@dataclass(frozen=True)
class Place:
    """This process among those that are checked together."""

    rank: int
    size: int
    device: torch.device
    where: str
    names: tuple[int, ...]
    """What each of them is called, by its rank here."""

    @classmethod
    def of(cls, world: World, device: torch.device) -> Place:
        """Return the place of this process in its world."""
        where = f"process {world.rank} on {socket.gethostname()}"
        return cls(world.rank, world.size, device, where, tuple(range(world.size)))


def check_collectives(place: Place, inject: Inject) -> Generator[Finding | str]:
    """Yield the name of each check before it begins, and then what it has found."""
    for name, check in (
        ("all-gather", _gathered),
        ("all-reduce", _reduced),
        ("reduce-scatter", _scattered),
        ("all-to-all", _exchanged),
        ("latency", _latency),
    ):
        yield name
        try:
            problem, value = check(place, inject)
        except RuntimeError as error:
            problem, value = _told(error), ""
        yield Finding(name, place.where, value, problem, ok=not problem)


def measure(place: Place, sizes: tuple[int, ...]) -> list[Bandwidth]:
    """Return how long each collective takes at each size; the slowest process counts."""
    return [_measured(place, op, size) for op in FACTORS for size in sizes]


FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "all_gather": lambda size: (size - 1) / size,
    "reduce_scatter": lambda size: (size - 1) / size,
    "all_to_all": lambda size: (size - 1) / size,
}
"""What the links carry of each byte, for a number of processes (nccl-tests, PERFORMANCE.md)."""


def _told(error: RuntimeError) -> str:
    """Return what a backend says, without where in its source it says so, and its advice."""
    line = re.sub(r"^\[[^\]]*\] *", "", plain(error))
    return line.partition(". ")[0]


def _own(place: Place, inject: Inject) -> Tensor:
    """Return numbers that are this process's alone, and exact in any sum."""
    value = _numbers(place.rank)
    if "corrupt" in inject(MOMENT):
        value[ELEMENTS // 2] += 1
    return value.to(place.device)


def _numbers(rank: int) -> Tensor:
    return torch.arange(ELEMENTS, dtype=torch.int32) + 1000 * rank


def _gathered(place: Place, inject: Inject) -> tuple[str, str]:
    everyone = [
        torch.zeros(ELEMENTS, dtype=torch.int32, device=place.device) for _ in range(place.size)
    ]
    dist.all_gather(everyone, _own(place, inject))
    for rank, found in enumerate(everyone):
        if not torch.equal(found.cpu(), _numbers(rank)):
            return f"what process {place.names[rank]} sent is not what came", ""
    return "", "exact"


def _reduced(place: Place, inject: Inject) -> tuple[str, str]:
    total = _own(place, inject)
    dist.all_reduce(total)
    if not torch.equal(total.cpu(), _total(place)):
        return "a sum of integers is wrong", ""
    parts = [_noise(rank) for rank in range(place.size)]
    exact = torch.stack(parts).double().sum(0)
    found = parts[place.rank].to(place.device)
    dist.all_reduce(found)
    error = float((found.cpu().double() - exact).abs().max() / exact.abs().max())
    if not error <= TOLERANCE:
        return f"a sum is off by {error:.1e}", ""
    digest = found.view(torch.int32).sum(dtype=torch.int64)
    most, least = digest.clone(), digest.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    if int(most) != int(least):
        return "processes have other bits of the same sum", ""
    return "", f"exact, floats off by {error:.0e}"


def _noise(rank: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))


def _total(place: Place) -> Tensor:
    return torch.stack([_numbers(rank) for rank in range(place.size)]).sum(0, dtype=torch.int32)


def _scattered(place: Place, inject: Inject) -> tuple[str, str]:
    part = ELEMENTS // place.size
    found = torch.zeros(part, dtype=torch.int32, device=place.device)
    _reduce_scatter(found, _own(place, inject)[: part * place.size])
    mine = slice(place.rank * part, (place.rank + 1) * part)
    return ("", "exact") if torch.equal(found.cpu(), _total(place)[mine]) else ("wrong sums", "")


def _exchanged(place: Place, inject: Inject) -> tuple[str, str]:
    part = ELEMENTS // place.size
    found = torch.zeros(part * place.size, dtype=torch.int32, device=place.device)
    dist.all_to_all_single(found, _own(place, inject)[: part * place.size])
    mine = slice(place.rank * part, (place.rank + 1) * part)
    for rank, came in enumerate(found.cpu().split(part)):
        if not torch.equal(came, _numbers(rank)[mine]):
            return f"what process {place.names[rank]} sent is not what came", ""
    return "", "exact"


def _latency(place: Place, inject: Inject) -> tuple[str, str]:
    took = []
    for _ in range(REPETITIONS):
        value = _own(place, inject)
        began = time.perf_counter()
        dist.all_reduce(value)
        value.cpu()
        took.append(time.perf_counter() - began)
    seconds = torch.tensor(statistics.median(took)).to(place.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    told = f"{float(seconds) * 1e6:,.0f} us"
    slow = float(seconds) > SLOWEST_SECONDS
    return (f"a sum of 4 KiB takes {float(seconds):.2f} s" if slow else ""), told


def _measured(place: Place, op: str, size: int) -> Bandwidth:
    count = max(place.size, size // 4 // place.size * place.size)
    value = torch.ones(count, device=place.device)
    part = torch.zeros(count // place.size, device=place.device)
    whole = torch.zeros(count, device=place.device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole.copy_(value)),
        "all_gather": lambda: _all_gather(whole, value[: len(part)]),
        "reduce_scatter": lambda: _reduce_scatter(part, value),
        "all_to_all": lambda: dist.all_to_all_single(whole, value),
    }
    took = []
    for _ in range(REPETITIONS + 1):
        dist.barrier()
        began = time.perf_counter()
        calls[op]()
        float(whole[0] + part[0])
        took.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(took[1:])).to(place.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found, due = (part, place.size) if op == "reduce_scatter" else (whole, 1)
    wrong = int((found != (place.size if op == "all_reduce" else due)).sum())
    seconds, held = float(slowest), 4 * count
    rate = held / seconds / 1e9
    bus = rate * FACTORS[op](place.size)
    return Bandwidth(op, held, count, "float", round(seconds * 1e6, 1), rate, bus, wrong)
