"""One launch of a run's processes: started, watched, and its end named.

What ends an attempt is the first process that failed, and not those that only noticed.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import jsonl, processes, timing
from regauge.config import FORMAT, dump
from regauge.files import write_json
from regauge.log import logger
from regauge.supervision.channel import PULSE, AttemptSpec, WorkerReports, text
from regauge.supervision.cost_meter import ATTEMPTS, Meter, say_seen
from regauge.supervision.failures import TOGETHER, Failure
from regauge.supervision.heartbeat import HeartbeatTable
from regauge.supervision.signals import POLL_SECONDS, Signals
from regauge.supervision.watchdog import PREFLIGHT, Watchdog, culprit, witnesses

if TYPE_CHECKING:
    from regauge.supervision.nodes.interface import Alone
    from regauge.training.settings import Training

FAILURES = "failures"
EVIDENCE_SECONDS = 1.0
"""How long the others may still say what they noticed, after the first has failed."""
LINGER_SECONDS = 30.0
"""How long a process may take to end once it has said that it is done."""
SAY_SECONDS = 1.0
STACK_LINES, LOG_LINES = 30, 5


class Attempt:
    """One launch of a run's processes on this machine."""

    def __init__(
        self,
        settings: Training,
        devices: tuple[int, ...],
        scratch: Path,
        fault_plan: str | None,
        *,
        peers: Alone,
        signals: Signals,
        meter: Meter,
        start: processes.Start,
    ) -> None:
        self._settings, self._start = settings, start
        self._folder = Path(settings.output.folder)
        self._size = len(devices)
        left_out = devices != tuple(range(self._size))
        seats = peers.shared.seats
        self._peers, self._seats = peers, replace(seats, devices=devices if left_out else ())
        self._signals = signals
        for leftover in scratch.iterdir():
            leftover.unlink()
        self._scratch = scratch
        self._orders = AttemptSpec(
            scratch,
            attempt=peers.shared.attempt,
            began=time.time(),
            clock=meter.clock,
            meter=meter,
            preflight=peers.shared.preflight,
            token=peers.shared.token,
            first=self._seats.first,
            fault_plan=fault_plan,
            devices=self._seats.devices,
        )
        self._answers = WorkerReports(scratch, self._size)
        self._ended_at = self._orders.began
        self._done_at: float | None = None
        self._said_at = meter.clock

    def run(self) -> Failure | None:
        """Start the processes and wait for their end; return what ended them before the run's.

        Where the run has several nodes, that is what they agree on.
        """
        self._orders.write()
        (self._scratch / "run.json").write_text(json.dumps(dump(self._settings)))
        with closing(HeartbeatTable(self._scratch / PULSE, self._size)) as pulses:
            self._peers.listen(pulses.total_beats)
            failure = self._ended(pulses)
            self._ended_at = time.time()
            settled = self._peers.settle(failure, told=self._signals.told)
            if settled is None or settled.step:
                return settled
            return replace(settled, step=max(pulses.read(n).step for n in range(self._size)))

    def _ended(self, pulses: HeartbeatTable) -> Failure | None:
        limits = self._settings.execution.supervision
        watchdog = Watchdog(
            pulses, limits.hang_seconds, float(self._settings.execution.timeout_seconds)
        )
        memory = _memory_kills()
        command = [sys.executable, "-m", "regauge", "train", str(self._scratch / "run.json")]
        own = {processes.SUPERVISED: str(self._scratch), **processes.RECORDER}
        with processes.started(
            command, self._size, self._folder / "ranks", own, seats=self._seats, start=self._start
        ) as children:
            self._signals.pids = [child.pid for child in children]
            if self._signals.told:
                self._signals.forward()
            try:
                failure = self._watched(children, watchdog)
            finally:
                self._signals.pids = []
        if failure is None:
            return None
        if failure.kind == "process" and _memory_kills() > memory:
            problem = f"{failure.problem}: no memory was left"
            failure = replace(failure, kind="memory", problem=problem)
        sign = pulses.read(failure.rank - self._seats.first)
        step = max(failure.step, sign.step)
        return replace(failure, step=step, phase=failure.phase or sign.phase)

    def note(self, failure: Failure | None) -> None:
        """Write what became of the attempt; nothing where it did not come to its first word.

        Of several nodes, one does so for all.
        """
        if not (self._folder / ATTEMPTS).exists():
            return
        document = {
            "attempt": self._orders.attempt,
            "began": round(self._orders.began, 3),
            "ended": round(self._ended_at, 3),
            **self._orders.meter.line,
            **self._orders.meter.after(self._ended_at - self._orders.began).document,
            "end": failure.kind if failure else "finished",
            "rank": failure.rank if failure else None,
            "step": failure.step if failure else None,
        }
        jsonl.append(self._folder / ATTEMPTS, document)
        if failure is not None and not failure.together:
            path = self._folder / FAILURES
            path.mkdir(exist_ok=True)
            write_json(
                path / f"attempt-{self._orders.attempt:04d}.json",
                {"format": FORMAT, "attempt": self._orders.attempt, **failure.document()},
            )

    def _watched(self, children: list[processes.Child], watchdog: Watchdog) -> Failure | None:
        """Wait until all processes have ended, or one of them failed or is silent.

        Where another node says that the attempt is over, nothing ended it here.
        """
        leaving = False
        while True:
            codes = [child.poll() for child in children]
            first = self._first_bad(codes)
            if first is not None:
                return self._named(children, first)
            if all(code is not None for code in codes) or self._lingers(codes):
                return self._agreed(codes)
            alarm = self._peers.alarm()
            why = watchdog.overdue(self._peers.quiet_seconds())
            if why or alarm == "hang":
                return self._hung(children, watchdog, why or "another node gives no sign")
            if alarm:
                return None
            if self._peers.leaving() and not leaving:
                leaving = True
                self._signals.forward()
            self._say_seen()
            time.sleep(POLL_SECONDS)

    def _say_seen(self) -> None:
        """Say once a second that the run is held."""
        now = time.monotonic()
        if self._peers.leads and now - self._said_at >= SAY_SECONDS:
            self._said_at = now
            say_seen(self._folder)

    def _lingers(self, codes: list[int | None]) -> bool:
        """Return whether processes that have done all their work do not end for too long."""
        alive = [number for number, code in enumerate(codes) if code is None]
        if not all(map(self._answers.is_done, range(self._size))):
            return False
        self._done_at = self._done_at or time.monotonic()
        if time.monotonic() - self._done_at < LINGER_SECONDS:
            return False
        for number in alive:
            rank = self._seats.first + number
            logger.warning("process %d finished, and then did not end: it is killed", rank)
        return True

    def _first_bad(self, codes: list[int | None]) -> int | None:
        """Return the first process that ended as none should."""
        for rank, code in enumerate(codes):
            ended_well = self._answers.is_done(rank) or (
                code in TOGETHER and self._answers.failure_of(rank)
            )
            told = code == -signal.SIGTERM and (self._signals.told or self._peers.leaving())
            if code is not None and not ended_well and not told:
                return rank
        return None

    def _agreed(self, codes: list[int | None]) -> Failure | None:
        """Return why all processes stopped together; None where the run is finished."""
        for rank, code in enumerate(codes):
            if code and self._answers.is_done(rank):
                named = self._seats.first + rank
                logger.warning("process %d finished, and then ended with code %d", named, code)
        said = self._answers.failures()
        if not said and -signal.SIGTERM in codes:
            return Failure("preempted", self._seats.first, 0, "told to stop before the run began")
        return said[0] if said else None

    def _named(self, children: list[processes.Child], first: int) -> Failure:
        """Return the failure that came first; what others noticed of it is left out."""
        offset = self._seats.first
        self._answers.ask()
        timing.wait_for(
            lambda: not any(map(self._silent, range(self._size), children)),
            EVIDENCE_SECONDS,
            poll_seconds=POLL_SECONDS,
        )
        code = children[first].poll() or 0
        found = self._answers.failures()
        silent = [
            Failure(
                "process",
                offset + rank,
                0,
                _ended(offset + rank, ended),
                evidence={"exit_code": ended, **self._last_words(rank)},
            )
            for rank, child in enumerate(children)
            if (ended := child.poll()) is not None
            and not self._answers.is_done(rank)
            and self._answers.failure_of(rank) is None
        ]
        own = [failure for failure in found if failure.kind != "network"]
        first_own = [failure for failure in own if failure.rank == offset + first]
        candidates = [*first_own, *silent, *own, *found]
        if candidates:
            return candidates[0]
        return Failure("process", offset + first, 0, _ended(offset + first, code))

    def _silent(self, number: int, child: processes.Child) -> bool:
        """Return whether a process may still say what it noticed."""
        return child.poll() is None and self._answers.failure_of(number) is None

    def _hung(self, children: list[processes.Child], watchdog: Watchdog, why: str) -> Failure:
        """Return which process the others wait for, with the stacks of all of them."""
        found = witnesses(watchdog.pulses, [child.pid for child in children], self._answers)
        one, offset = culprit(found), self._seats.first
        stopped = " (it is stopped)" if one.state in ("T", "t") else ""
        return Failure(
            "preflight" if one.sign.phase == PREFLIGHT else "hang",
            offset + one.rank,
            one.sign.step,
            f"process {offset + one.rank} hangs{stopped}: {why}",
            phase=one.sign.phase,
            evidence={
                "states": {str(offset + each.rank): each.state for each in found},
                "collectives": {str(offset + each.rank): each.collectives for each in found},
                "stacks": {str(offset + each.rank): each.stack[-STACK_LINES:] for each in found},
                "standing": one.standing,
            },
        )

    def _last_words(self, rank: int) -> dict[str, Any]:
        """Return what is left of a process that said nothing, and the others' collectives."""
        offset = self._seats.first
        log = text(self._folder / "ranks" / f"{offset + rank}.log").splitlines()
        others = {
            str(offset + other): self._answers.collectives(other)
            for other in range(self._size)
            if other != rank
        }
        return {
            "stack": self._answers.stack(rank)[:STACK_LINES],
            "log": log[-LOG_LINES:],
            "collectives": others,
        }


def _ended(rank: int, code: int) -> str:
    if code == 0:
        return f"process {rank} left before the end of the run"
    if code > 0:
        return f"process {rank} ended with code {code} and said nothing"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"process {rank} died by {name}"


def _memory_kills() -> int:
    """Return how often the kernel killed a process of this control group for its memory."""
    events = text(Path("/sys/fs/cgroup/memory.events")).splitlines()
    return next((int(line.split()[1]) for line in events if "oom_kill " in line), 0)
