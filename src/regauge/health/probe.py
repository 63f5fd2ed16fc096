"""One process of an examination: `python -m regauge.health.probe <scratch>`.

    <scratch>/request.json             what is examined, and how
    <scratch>/found-<rank>.jsonl       each check before it begins, and what it has found
    <scratch>/pairs-<rank>.jsonl       each pair that this process was in

What a process has written stays where it hangs and is killed.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from regauge import choices, jsonl, processes
from regauge.accelerators import join, take
from regauge.faults import Chaos
from regauge.health import collectives
from regauge.health.collectives import Place, check_collectives
from regauge.health.device import bandwidth, check_device
from regauge.health.examination import REQUEST, found_by, pairs_of
from regauge.health.findings import Finding
from regauge.health.hosts import check_hosts

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from regauge.accelerators import Accelerator
    from regauge.processes import World

PAIR_SECONDS = 5.0
MEETING_SECONDS = 60


@dataclass(frozen=True)
class Request:
    """What the processes of an examination do."""

    accelerator: dict[str, Any]
    what: Literal["everything", "pairs"]
    quick: bool
    chaos: str | None
    """File of a fault plan."""
    record: str | None
    """Where a fault is written down before it strikes."""


def main() -> None:
    """Do what the request says."""
    scratch = Path(sys.argv[1])
    request = Request(**json.loads((scratch / REQUEST).read_text()))
    probe = Probe(scratch, request, processes.world())
    if request.what == "pairs":
        probe.meet_each_alone()
    else:
        probe.check_everything()


class Probe:
    """One process, and its device."""

    def __init__(self, scratch: Path, request: Request, world: World) -> None:
        self._scratch = scratch
        self._request = request
        self._world = world
        own = dict(request.accelerator)
        self._accelerator: Accelerator = choices.load("accelerators", own.pop("kind"))(**own)
        self._chaos = Chaos.of(request.chaos, Path(request.record or os.devnull), world.rank, 1)
        device = take(self._accelerator, world.device, processes.share_of_cores(world))
        self._place = Place.of(world, device)

    def check_everything(self) -> None:
        """Check the device, and then what all processes do together; stop at what is bad."""
        place, accelerator = self._place, self._accelerator
        file = found_by(self._scratch, place.rank)
        precisions = accelerator.precisions()
        own = check_device(accelerator, place.device, precisions, place.where, self._chaos)
        speed = bandwidth(accelerator, place.device, place.where)
        well = _written(file, chain(own, speed), together=False)
        if well and place.size > 1:
            well = _written(file, self._together(), together=True)
            if well:
                self._measure(file)
            dist.destroy_process_group()
        if not well:
            sys.exit(1)
        jsonl.append(file, {"done": True})

    def _together(self) -> Generator[Finding | str]:
        place = self._place
        yield "meeting"
        join(self._accelerator, self._world, MEETING_SECONDS)
        yield Finding("meeting", place.where, f"{place.size} processes over {dist.get_backend()}")
        yield from check_collectives(place, self._chaos)
        yield "hosts"
        found = check_hosts(place.size)
        yield from found if self._world.first else ()

    def _measure(self, file: Path) -> None:
        quick = self._request.quick
        sizes = collectives.QUICK_BYTES if quick else collectives.FULL_BYTES
        for row in collectives.measure(self._place, sizes):
            if self._world.first:
                jsonl.append(file, {"bandwidth": asdict(row)})

    def meet_each_alone(self) -> None:
        """Meet every other process alone, in rounds in which each has one partner at most."""
        rank, size = self._place.rank, self._place.size
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = dt.timedelta(seconds=MEETING_SECONDS)
        store = TCPStore(address, port, size, is_master=rank == 0, timeout=wait)
        file = pairs_of(self._scratch, rank)
        jsonl.append(file, {"started": True})
        for number, partner in enumerate(partners(rank, size)):
            if partner is not None:
                jsonl.append(file, {"partner": partner})
                jsonl.append(file, {"partner": partner, "problem": self._with(partner, store)})
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
            found = check_collectives(two, self._chaos)
            bad = (one.problem for one in found if isinstance(one, Finding) and not one.ok)
            return next(bad, "")
        finally:
            dist.destroy_process_group()


def _written(file: Path, checks: Iterable[Finding | str], *, together: bool) -> bool:
    """Write each check down as it begins, and what it has found; return whether all is well."""
    for found in checks:
        if isinstance(found, str):
            jsonl.append(file, {"begins": found, "together": together})
            continue
        jsonl.append(file, {"finding": asdict(found)})
        if not found.ok:
            return False
    return True


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
