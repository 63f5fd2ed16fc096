"""A run over as many attempts as it takes to end it.

The supervisor computes nothing, and imports no torch where there is one machine. Every attempt has
new processes and a new meeting place. What ends one is written to `failures/`, and decides whether
the run starts again.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from regauge import accelerators
from regauge.config import read
from regauge.errors import ChildError, PreflightError
from regauge.health.examination import examine
from regauge.health.findings import require
from regauge.health.machine import check_machine
from regauge.log import logger
from regauge.planning.catalog import rate
from regauge.processes import Start, spawn
from regauge.scratch import scratch
from regauge.supervision.attempt import FAILURES, Attempt
from regauge.supervision.cost_meter import Meter, last_seen, paid
from regauge.supervision.failures import POLICIES, Failure
from regauge.supervision.forks import forks
from regauge.supervision.nodes.attempt_registry import OverError
from regauge.supervision.nodes.interface import ThisMachine
from regauge.supervision.nodes.topology import several
from regauge.supervision.signals import Signals
from regauge.supervision.spot_notices import heard
from regauge.testing.faults import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.supervision.forks import Forks
    from regauge.supervision.nodes.interface import Alone
    from regauge.supervision.nodes.rendezvous import Rendezvous
    from regauge.training.settings import Training

    Place = ThisMachine | Rendezvous

LONGEST_WAIT_SECONDS = 60.0
SUSPECT = ("device", "network", "hang", "preflight")
"""Kinds of failure after which devices and network are checked again."""


def supervise(settings: Training, size: int, fault_plan: str | None = None) -> None:
    """Run a run's processes until it ends, `size` of them on this machine.

    Raises ChildError where it ends by a failure.
    """
    folder = Path(settings.output.folder)
    place = _place(settings, folder)
    notices = settings.execution.supervision.notices
    with (
        place.open(),
        scratch() as own,
        Signals() as signals,
        heard(notices, signals),
        forks() as forked,
    ):
        run = Supervisor(settings, size, own, fault_plan, signals=signals, forked=forked)
        while True:
            require(check_machine(folder, settings.output.checkpoint.root))
            try:
                with place.attempt(len(run.devices), signals, preflight=run.checks) as peers:
                    failure = run.attempt(peers)
            except OverError as over:
                if over.code:
                    raise ChildError(over.code, over.line) from None
                return
            if failure is None:
                place.over(0, "")
                return
            try:
                run.wait()
            except ChildError as error:
                if not signals.told:
                    place.over(error.exit_code, str(error))
                raise


class Supervisor:
    """The attempts of a run so far, as one machine has seen them."""

    def __init__(
        self,
        settings: Training,
        size: int,
        own: Path,
        fault_plan: str | None,
        *,
        signals: Signals,
        forked: Forks,
    ) -> None:
        self._settings, self._own = settings, own
        self._start: Start = spawn
        self.devices = tuple(range(size))
        """Those of this machine that the run computes on, by their index."""
        self._fault_plan, self._signals = fault_plan, signals
        self._failures: list[Failure] = []
        self._unwritten: Attempt | None = None
        """The last attempt, where the node that should have noted its end is lost."""
        self._left_out = False
        """Whether devices were left out after the last attempt."""
        self._taken = time.time()
        self._rate = rate(settings.execution.price)
        remark = self._rate.remark(dt.datetime.now(tz=dt.UTC).date()) if self._rate else None
        if remark:
            logger.warning(remark)
        self._seen = last_seen(Path(settings.output.folder))
        accelerator = settings.accelerator or accelerators.foreseen()
        if accelerator is not None and accelerator.forkable and sys.platform == "linux":
            forked.begin()
            self._start = partial(forked.start, limit=float(settings.execution.timeout_seconds))

    @property
    def checks(self) -> bool:
        """Whether the processes of the next attempt check their devices and each other."""
        if self._settings.execution.supervision.preflight == "brief":
            return False
        return not self._failures or self._failures[-1].kind in SUSPECT

    def attempt(self, peers: Alone) -> Failure | None:
        """Make one attempt; return what ended it before the run's end."""
        if peers.leads and self._unwritten is not None:
            self._unwritten.note(self._failures[-1])
        self._unwritten = None
        one = Attempt(
            self._settings,
            self.devices,
            self._own,
            self._fault_plan,
            peers=peers,
            signals=self._signals,
            meter=self._meter(peers),
            start=self._start,
        )
        failure = one.run()
        if failure is not None and failure.kind == "preflight" and peers.nodes == 1:
            failure = self._examined(failure)
        if peers.leads:
            one.note(failure)
        elif failure is not None and failure.kind == "node" and failure.rank == 0:
            self._unwritten = one
        if failure is not None:
            self._failures.append(failure)
        return failure

    def _meter(self, peers: Alone) -> Meter:
        """Return what the run has paid, the time between its attempts included, and pays now."""
        known, since = paid(Path(self._settings.output.folder), self._taken, self._seen)
        usd = self._rate.usd_per_hour if self._rate else None
        meter = Meter(known, time.monotonic(), peers.nodes, peers.shared.seats.size, usd)
        return replace(meter, before=meter.after(time.time() - since))

    def wait(self) -> None:
        """Wait for the time of the next attempt; raises ChildError where there is none."""
        limit = self._settings.execution.supervision.attempts_at_a_step
        again = self._failures[-1].kind == "preflight" and self._left_out
        wait = 0.0 if again else _wait_before_next(self._failures, limit)
        if wait is None or self._signals.told:
            raise _last_word(self._failures, self._settings)
        when = f"in {wait:g} s" if wait else "now"
        logger.warning("%s; starting again %s", _told(self._failures[-1]), when)
        self._signals.sleep(wait)

    def _examined(self, failure: Failure) -> Failure:
        """Return a failed check with who is at fault, as an examination of all devices finds it.

        Where the run takes as many devices as are fit, those at fault are left out from now on.
        """
        record = Path(self._settings.output.folder) / RECORD
        accelerator = self._settings.accelerator or accelerators.choose()[0]
        found = examine(
            accelerator,
            len(self.devices),
            fault_plan=self._fault_plan,
            record=record,
            devices=self.devices,
        )
        bad = [finding for finding in found.findings if not finding.ok]
        if self._settings.execution.processes == "auto" and accelerator.indexed:
            self._leave_out(found.culprits)
        try:
            require(bad)
        except PreflightError as error:
            evidence = {**failure.evidence, "found": [finding.row() for finding in bad]}
            return replace(failure, problem=str(error), evidence=evidence)
        return failure

    def _leave_out(self, ranks: set[int]) -> None:
        kept = tuple(one for rank, one in enumerate(self.devices) if rank not in ranks)
        self._left_out = 0 < len(kept) < len(self.devices)
        if self._left_out:
            out = sorted(set(self.devices) - set(kept))
            self.devices = kept
            told = ", ".join(str(one) for one in out)
            logger.warning("device %s is left out, and the run has %d processes", told, len(kept))


def _place(settings: Training, folder: Path) -> Place:
    """Return what holds the attempts of a run, on one machine or on several."""
    found = several(settings.execution.nodes, folder)
    if found is None:
        return ThisMachine(folder)
    with _quiet():
        from regauge.supervision.nodes.rendezvous import Rendezvous

    return Rendezvous(found, settings, folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Import torch so that a node which is lost is told in one line, without stacks of C++."""
    own = "TORCH_CPP_LOG_LEVEL" not in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        yield
    finally:
        if own:
            del os.environ["TORCH_CPP_LOG_LEVEL"]


def _wait_before_next(failures: list[Failure], limit: int) -> float | None:
    """Return the seconds before the next attempt; None where there is none."""
    last = failures[-1]
    if not last.policy.retried:
        return None
    if last.policy.counted and _in_a_row(failures, last.same) >= (last.policy.most or limit):
        return None
    in_a_row = _in_a_row(failures, lambda failure: failure.kind == last.kind)
    return min(LONGEST_WAIT_SECONDS, math.ldexp(last.policy.wait_seconds, in_a_row - 1))


def _in_a_row(failures: list[Failure], alike: Callable[[Failure], bool]) -> int:
    """Return how many of the last failures are alike."""
    return sum(1 for _ in takewhile(alike, reversed(failures)))


def _last_word(failures: list[Failure], settings: Training) -> ChildError:
    error = ChildError(*_summary(failures, settings))
    if trace := failures[-1].evidence.get("traceback"):
        error.add_note("\n".join([f"In process {failures[-1].rank}:", *trace]))
    return error


def _summary(failures: list[Failure], settings: Training) -> tuple[int, str]:
    """Return the exit code and the line for failures that the run does not start again after."""
    last, folder = failures[-1], Path(settings.output.folder)
    policy, limit = last.policy, settings.execution.supervision.attempts_at_a_step
    if last.kind == "memory":
        remedy = f"{_smaller(settings, folder)}, or execution.activation_checkpointing"
        most = "".join(
            f", most of it {each['count']} x {each['tensors']}: {each['bytes'] / 1e6:,.0f} MB"
            for each in last.evidence.get("largest", [])[:1]
        )
        return policy.code, f"{last.problem} (process {last.rank}{most}); {remedy}"
    if not policy.retried or policy.most is not None:
        return policy.code, last.problem
    same = _in_a_row(failures, last.same)
    if policy.counted and same >= limit:
        line = f"{same} attempts failed at step {last.step} in the same way: {last.problem}"
        return POLICIES["progress"].code, f"{line}; see {folder / FAILURES}"
    return policy.code, f"{last.problem}; see {folder / FAILURES}"


def _smaller(settings: Training, folder: Path) -> str:
    """Return how a run without memory is given half of its microbatch, also of one it found."""
    rows = settings.batch.microbatch_rows
    if rows == "auto" and (folder / "run.json").is_file():
        rows = read(folder / "run.json")["batch"]["microbatch_rows"]
    return (
        "try a batch.microbatch_rows"
        if rows == "auto"
        else (f"try batch.microbatch_rows = {max(1, rows // 2)}")
    )


def _told(failure: Failure) -> str:
    who = f"process {failure.rank}"
    named = failure.problem if who in failure.problem else f"{who}: {failure.problem}"
    return f"{named}, after step {failure.step}"
