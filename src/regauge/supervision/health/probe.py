"""Worker process of an examination, started by `worker.run_worker`.

It writes a line for each check before it begins, for each finding, and for each pair it was in. The
lines remain readable if the process hangs and is killed.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from regauge.accelerators import claim_device, init_process_group
from regauge.supervision.health import collectives
from regauge.supervision.health.collectives import CheckGroup, check_collectives, check_hosts
from regauge.supervision.health.device import check_bandwidth, check_device
from regauge.supervision.health.findings import Finding
from regauge.system import choices, processes
from regauge.system.hooks import Inject, inject_nothing
from regauge.system.wording import format_count
from regauge.system.worker import receive_job

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from regauge.accelerators import Accelerator
    from regauge.system.processes import World
    from regauge.system.worker import WorkerJob

PAIR_SECONDS = 5.0
RENDEZVOUS_SECONDS = 60


def main() -> None:
    job = receive_job()
    probe = Probe(job, processes.detect_world())
    if job.request["scope"] == "pairs":
        probe.check_pairs()
    else:
        probe.check_all()


class Probe:
    """Runs the checks for one process and its device."""

    def __init__(self, job: WorkerJob, world: World) -> None:
        self._job = job
        self._world = world
        options = dict(job.request["accelerator"])
        kind = options.pop("kind")
        self._accelerator: Accelerator = choices.load("accelerators", kind)(**options)
        self._inject = _build_inject(job.request, world)
        threads = processes.cores_per_process(world)
        device = claim_device(self._accelerator, world.device_index, threads)
        self._group = CheckGroup.from_world(world, device)

    def check_all(self) -> None:
        """Check the device, then the collectives; exits with code 1 after a bad finding."""
        group, accelerator = self._group, self._accelerator
        precisions = accelerator.precisions()
        device_checks = check_device(
            accelerator, group.device, precisions, group.location, self._inject
        )
        bandwidth = check_bandwidth(accelerator, group.device, group.location)
        is_good = self._write_checks(chain(device_checks, bandwidth), is_collective=False)
        if is_good and group.size > 1:
            is_good = self._write_checks(self._check_group(), is_collective=True)
            if is_good:
                self._measure_bandwidths()
            dist.destroy_process_group()
        if not is_good:
            sys.exit(1)
        self._job.write_line({"is_done": True})

    def _write_checks(self, checks: Iterable[Finding | str], *, is_collective: bool) -> bool:
        """Write each check as it begins, and its finding; return whether all findings are good."""
        for check in checks:
            if isinstance(check, str):
                self._job.write_line({"started_check": check, "is_collective": is_collective})
                continue
            self._job.write_line({"finding": asdict(check)})
            if not check.ok:
                return False
        return True

    def _check_group(self) -> Generator[Finding | str]:
        group = self._group
        yield "rendezvous"
        init_process_group(self._accelerator, self._world, RENDEZVOUS_SECONDS)
        value = f"{format_count(group.size, 'process')} over {dist.get_backend()}"
        yield Finding("rendezvous", group.location, value)
        yield from check_collectives(group, self._inject)
        yield "hosts"
        findings = check_hosts(group.size)
        yield from findings if self._world.is_main_process else ()

    def _measure_bandwidths(self) -> None:
        is_quick = self._job.request["quick"]
        sizes = collectives.QUICK_BYTES if is_quick else collectives.FULL_BYTES
        for row in collectives.measure_bandwidths(self._group, sizes):
            if self._world.is_main_process:
                self._job.write_line({"bandwidth": asdict(row)})

    def check_pairs(self) -> None:
        """Check collectives with each other process, in rounds with at most one partner."""
        rank, size = self._group.rank, self._group.size
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = dt.timedelta(seconds=RENDEZVOUS_SECONDS)
        store = TCPStore(address, port, size, is_master=rank == 0, timeout=wait)
        self._job.write_line({"is_started": True})
        for number, partner in enumerate(schedule_partners(rank, size)):
            if partner is not None:
                self._job.write_line({"partner": partner})
                problem = self._check_pair(partner, store)
                self._job.write_line({"partner": partner, "problem": problem})
            store.set(f"round-{number}-{rank}", "")
            store.wait([f"round-{number}-{other}" for other in range(size)], wait)

    def _check_pair(self, partner: int, store: TCPStore) -> str:
        """Return the problem with a partner's collectives, or ""."""
        group = self._group
        ranks = tuple(sorted((group.rank, partner)))
        pair = CheckGroup(ranks.index(group.rank), len(ranks), group.device, group.location, ranks)
        dist.init_process_group(
            self._accelerator.distributed_backend(),
            store=PrefixStore(f"pair-{ranks[0]}-{ranks[1]}", store),
            rank=pair.rank,
            world_size=pair.size,
            timeout=dt.timedelta(seconds=PAIR_SECONDS),
        )
        try:
            checks = check_collectives(pair, self._inject)
            problems = (
                check.problem for check in checks if isinstance(check, Finding) and not check.ok
            )
            return next(problems, "")
        finally:
            dist.destroy_process_group()


def _build_inject(request: dict[str, Any], world: World) -> Inject:
    if request["fault_plan"] is None:
        return inject_nothing
    from regauge.supervision.faults.faults import FaultInjector

    record = Path(request["record"]) if request["record"] else None
    return FaultInjector.read(request["fault_plan"], record, world.rank).inject


def schedule_partners(rank: int, size: int) -> list[int | None]:
    """Return a process's partner in each round, so that each pair meets once.

    This is the circle method for round-robin tournaments. With an odd number of processes, one
    process per round goes without a partner: None.
    """
    num_rounds = size - 1 + size % 2
    partners: list[int | None] = []
    for number in range(num_rounds):
        if rank == num_rounds:  # the fixed process meets the one that would meet itself
            partner = next(other for other in range(num_rounds) if 2 * other % num_rounds == number)
        else:
            partner = (number - rank) % num_rounds
            partner = num_rounds if partner == rank else partner
        partners.append(partner if partner < size else None)
    return partners


if __name__ == "__main__":
    main()
