"""One process of an examination, started by `worker.run_worker`.

It writes a line for each check before it begins, for what it has found, and for each pair that it
was in. These lines stay if it hangs and is killed.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from regauge import choices, processes
from regauge.accelerators import join, take
from regauge.health import collectives
from regauge.health.collectives import Place, check_collectives
from regauge.health.device import bandwidth, check_device
from regauge.health.findings import Finding
from regauge.health.hosts import check_hosts
from regauge.hooks import Inject, inject_nothing
from regauge.worker import receive_job

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from regauge.accelerators import Accelerator
    from regauge.processes import World
    from regauge.worker import WorkerJob

PAIR_SECONDS = 5.0
MEETING_SECONDS = 60


@dataclass(frozen=True)
class Request:
    """What the processes of an examination do."""

    accelerator: dict[str, Any]
    what: Literal["everything", "pairs"]
    quick: bool
    fault_plan: str | None
    """File of a fault plan."""
    record: str | None
    """Where a fault is written down before it strikes."""


def main() -> None:
    """Do what the request says."""
    job = receive_job()
    request = Request(**job.request)
    probe = Probe(job, request, processes.world())
    if request.what == "pairs":
        probe.meet_each_alone()
    else:
        probe.check_everything()


class Probe:
    """One process, and its device."""

    def __init__(self, job: WorkerJob, request: Request, world: World) -> None:
        self._job = job
        self._request = request
        self._world = world
        own = dict(request.accelerator)
        self._accelerator: Accelerator = choices.load("accelerators", own.pop("kind"))(**own)
        self._inject = _inject(request, world)
        device = take(self._accelerator, world.device, processes.share_of_cores(world))
        self._place = Place.of(world, device)

    def check_everything(self) -> None:
        """Check the device, and then what all processes do together; stop at what is bad."""
        place, accelerator = self._place, self._accelerator
        precisions = accelerator.precisions()
        own = check_device(accelerator, place.device, precisions, place.where, self._inject)
        speed = bandwidth(accelerator, place.device, place.where)
        well = self._write_checks(chain(own, speed), together=False)
        if well and place.size > 1:
            well = self._write_checks(self._together(), together=True)
            if well:
                self._measure()
            dist.destroy_process_group()
        if not well:
            sys.exit(1)
        self._job.write_line({"done": True})

    def _write_checks(self, checks: Iterable[Finding | str], *, together: bool) -> bool:
        """Write each check down as it begins, and what it has found; return whether all is well."""
        for check in checks:
            if isinstance(check, str):
                self._job.write_line({"begins": check, "together": together})
                continue
            self._job.write_line({"finding": asdict(check)})
            if not check.ok:
                return False
        return True

    def _together(self) -> Generator[Finding | str]:
        place = self._place
        yield "meeting"
        join(self._accelerator, self._world, MEETING_SECONDS)
        yield Finding("meeting", place.where, f"{place.size} processes over {dist.get_backend()}")
        yield from check_collectives(place, self._inject)
        yield "hosts"
        found = check_hosts(place.size)
        yield from found if self._world.first else ()

    def _measure(self) -> None:
        quick = self._request.quick
        sizes = collectives.QUICK_BYTES if quick else collectives.FULL_BYTES
        for row in collectives.measure(self._place, sizes):
            if self._world.first:
                self._job.write_line({"bandwidth": asdict(row)})

    def meet_each_alone(self) -> None:
        """Meet every other process alone, in rounds in which each has one partner at most."""
        rank, size = self._place.rank, self._place.size
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = dt.timedelta(seconds=MEETING_SECONDS)
        store = TCPStore(address, port, size, is_master=rank == 0, timeout=wait)
        self._job.write_line({"started": True})
        for number, partner in enumerate(partners(rank, size)):
            if partner is not None:
                self._job.write_line({"partner": partner})
                problem = self._with(partner, store)
                self._job.write_line({"partner": partner, "problem": problem})
            store.set(f"round-{number}-{rank}", "")
            store.wait([f"round-{number}-{one}" for one in range(size)], wait)

    def _with(self, partner: int, store: TCPStore) -> str:
        """Check the collectives of two processes; return what is wrong, or nothing."""
        place = self._place
        pair = tuple(sorted((place.rank, partner)))
        two = Place(pair.index(place.rank), len(pair), place.device, place.where, pair)
        dist.init_process_group(
            self._accelerator.collectives(),
            store=PrefixStore(f"pair-{pair[0]}-{pair[1]}", store),
            rank=two.rank,
            world_size=two.size,
            timeout=dt.timedelta(seconds=PAIR_SECONDS),
        )
        try:
            found = check_collectives(two, self._inject)
            bad = (one.problem for one in found if isinstance(one, Finding) and not one.ok)
            return next(bad, "")
        finally:
            dist.destroy_process_group()


def _inject(request: Request, world: World) -> Inject:
    if request.fault_plan is None:
        return inject_nothing
    from regauge.testing.faults import FaultInjector

    record = Path(request.record or os.devnull)
    return FaultInjector.read(request.fault_plan, record, world.rank).inject


def partners(rank: int, size: int) -> list[int | None]:
    """Return whom a process meets in each round, so that all pairs meet once (circle method).

    None where the number of processes is odd and one of them has nobody to meet.
    """
    rounds = size - 1 + size % 2
    found: list[int | None] = []
    for number in range(rounds):
        if rank == rounds:  # sits still, and meets who would meet himself
            partner = next(one for one in range(rounds) if 2 * one % rounds == number)
        else:
            partner = (number - rank) % rounds
            partner = rounds if partner == rank else partner
        found.append(partner if partner < size else None)
    return found


if __name__ == "__main__":
    main()
