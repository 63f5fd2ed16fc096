"""One attempt of a run on this node: starts the processes, watches them, names the failure.

An attempt ends because of the first process that failed, not because of those that merely lost
their connection to it.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import accelerators
from regauge.config import FORMAT, dump
from regauge.config.output_files import ATTEMPTS, FAILURES, RANKS, SAVED_RUN
from regauge.run_folders.cost_meter import CostMeter, read_time, write_last_seen
from regauge.run_folders.node_status import write_node_status
from regauge.supervision.channel import HEARTBEATS, AttemptSpec, WorkerReports, read_text
from regauge.supervision.failures import COMMON_EXIT_CODES, Failure
from regauge.supervision.heartbeat import HeartbeatTable
from regauge.supervision.signals import SupervisorSignals
from regauge.supervision.watchdog import PREFLIGHT, Watchdog, blamed_rank, take_snapshots
from regauge.system import jsonl, processes, timing
from regauge.system.children import Child, SpawnFunction, convert_return_code, start_processes
from regauge.system.errors import StopSignalError
from regauge.system.files import write_json
from regauge.system.line_tail import LineTail, read_last_lines
from regauge.system.log import is_embedded, logger
from regauge.system.stop_signals import defer_stop, is_repeated, is_stop_exit
from regauge.system.timing import POLL_SECONDS

if TYPE_CHECKING:
    from regauge.supervision.heartbeat import HeartbeatReader
    from regauge.supervision.nodes.interface import NodeGroup
    from regauge.supervision.run_events import RunEvents
    from regauge.supervision.run_metrics import RunMetrics
    from regauge.training.settings import TrainSettings

LEVELS = {"warning: ": logging.WARNING, "error: ": logging.ERROR}
"""Line prefix -> level; all other lines are INFO."""
READ_SECONDS = 0.2
"""Polling interval."""


class LogTail:
    """Lines appended to a log file; each is logged once."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path, from_end=True)
        self._read_at = 0.0

    def forward(self, *, is_end: bool = False) -> None:
        """Log new complete lines if the interval is over; at the end log all lines."""
        now = time.monotonic()
        if not is_end and now - self._read_at < READ_SECONDS:
            return
        self._read_at = now
        for line in self._lines.read(is_last=is_end):
            prefix = next(filter(line.startswith, LEVELS), "")
            logger.log(LEVELS.get(prefix, logging.INFO), "%s", line.removeprefix(prefix))


EVIDENCE_SECONDS = 1.0
"""Wait for reports from the other processes after one has failed."""
LINGER_SECONDS = 30.0
"""Maximum time from a process's done report to its exit, and maximum silence of a process after
another one was stopped."""
STOP_SECONDS = 7.0
"""Time limit after a stop signal for processes without a finished step."""
LAST_SEEN_SECONDS = 1.0
"""Interval for recording the run as alive."""
MAX_STACK_LINES, MAX_LOG_LINES = 30, 5


class Attempt:
    """One launch of a run's processes on this node."""

    def __init__(
        self,
        settings: TrainSettings,
        devices: tuple[int, ...],
        scratch: Path,
        fault_plan: str | None,
        *,
        group: NodeGroup,
        signals: SupervisorSignals,
        meter: CostMeter,
        spawn_function: SpawnFunction,
    ) -> None:
        self._settings, self._spawn_function = settings, spawn_function
        self._folder = Path(settings.output.folder)
        self._size = len(devices)
        has_excluded = devices != tuple(range(self._size))
        self._group = group
        self._layout = replace(group.plan.layout, devices=devices if has_excluded else ())
        self._signals = signals
        for leftover in scratch.iterdir():
            leftover.unlink()
        self._scratch = scratch
        self._spec = AttemptSpec(
            scratch,
            attempt=group.plan.attempt,
            started_at=read_time(),
            start_clock=meter.start_clock,
            meter=meter,
            needs_preflight=group.plan.needs_preflight,
            token=group.plan.token,
            first_rank=self._layout.first_rank,
            fault_plan=fault_plan,
            devices=self._layout.devices,
        )
        self._reports = WorkerReports(scratch, self._size)
        self._ended_at = self._spec.started_at
        self._done_at: float | None = None
        self._stop_began_at: float | None = None
        """When the processes were asked to stop, on time.monotonic()."""
        self._last_seen_clock = meter.start_clock
        self._resumed_at = -math.inf
        self._tail: LogTail | None = None
        """Logs rank 0's output if a Python program started the run."""

    def _launch_variables(self) -> dict[str, str]:
        """Return environment variables for the device's launcher (torch plugins only)."""
        accelerator = self._settings.accelerator
        if accelerator is None and accelerators.list_device_plugins():
            accelerator = accelerators.choose()[0]
        return accelerator.launch_variables(self._size) if accelerator else {}

    def run(self, events: RunEvents, metrics: RunMetrics | None = None) -> Failure | None:
        """Run to the end; return the failure that ended the attempt, or None on success.

        All nodes return the failure they agree on. `events` observes the progress, and `metrics`
        exports the state of the processes meanwhile.
        """
        self._events = events
        self._spec.write()
        (self._scratch / SAVED_RUN).write_text(json.dumps(dump(self._settings)), encoding="utf-8")
        with closing(HeartbeatTable(self._scratch / HEARTBEATS, self._size)) as heartbeats:
            self._group.publish_beats(heartbeats.total_beats)
            local_failure = self._run_processes(heartbeats, metrics)
            self._ended_at = self._find_end_time(heartbeats)
            self._events.observe(heartbeats, self._reports, is_end=True)
            with defer_stop(has_limit=False):  # other nodes may save
                failure = self._group.agree_on_failure(
                    local_failure, is_stop_requested=self._signals.is_stop_requested
                )
            if failure is None or failure.step:
                return failure
            return replace(failure, step=max(heartbeats.read(n).step for n in range(self._size)))

    def _find_end_time(self, heartbeats: HeartbeatReader) -> float:
        """Return when the processes ended, which may have been while this process was stopped.

        In seconds since the epoch.
        """
        last_beat_at = max(heartbeats.read(number).at for number in range(self._size))
        is_late = last_beat_at < self._resumed_at
        return read_time() - (time.monotonic() - last_beat_at if is_late else 0.0)

    def _run_processes(
        self, heartbeats: HeartbeatTable, metrics: RunMetrics | None
    ) -> Failure | None:
        """Run this node's processes; return the failure, or None."""
        supervision = self._settings.execution.supervision
        watchdog = Watchdog(
            heartbeats,
            supervision.hang_timeout_seconds,
            float(self._settings.execution.timeout_seconds),
        )
        num_oom_kills = _count_oom_kills()
        command = [sys.executable, "-m", "regauge", "train", str(self._scratch / SAVED_RUN)]
        variables = {
            processes.SUPERVISED_VARIABLE: str(self._scratch),
            **processes.FLIGHT_RECORDER_VARIABLES,
            **self._launch_variables(),
        }
        start = partial(
            start_processes,
            command,
            self._size,
            self._folder / RANKS,
            variables,
            quiet=is_embedded(),
            layout=self._layout,
            spawn_function=self._spawn_function,
        )
        self._tail = LogTail(self._folder / RANKS / "0.log") if is_embedded() else None
        try:
            with start() as children, defer_stop(has_limit=False):
                pids = self._signals.pids = [child.pid for child in children]
                watching = (
                    metrics.watch(watchdog, pids, self._layout.first_rank, self._spec.meter)
                    if metrics
                    else nullcontext()
                )
                with watching:
                    failure = self._watch(children, watchdog)
                self._write_status(children, heartbeats, is_final=True)
        except StopSignalError as error:  # not all processes were started
            return self._find_stop([error.exit_code])
        finally:
            self._signals.pids = []
            if self._tail:
                self._tail.forward(is_end=True)
        if failure is None:
            return None
        if failure.kind == "process" and _count_oom_kills() > num_oom_kills:
            problem = f"{failure.problem}: out of memory"
            failure = replace(failure, kind="memory", problem=problem)
        beat = heartbeats.read(failure.rank - self._layout.first_rank)
        step = max(failure.step, beat.step)
        return replace(failure, step=step, phase=failure.phase or beat.phase)

    def record(self, failure: Failure | None) -> None:
        """Record the end of the attempt, unless its start was never recorded.

        One node does so for all nodes.
        """
        if not (self._folder / ATTEMPTS).exists():
            return
        document = {
            "attempt": self._spec.attempt,
            "started_at": round(self._spec.started_at, 3),
            "ended_at": round(self._ended_at, 3),
            **self._spec.meter.start_fields,
            **self._spec.meter.cost_after(self._ended_at - self._spec.started_at).document,
            "outcome": failure.kind if failure else "finished",
            "rank": failure.rank if failure else None,
            "step": failure.step if failure else None,
        }
        jsonl.append_line(self._folder / ATTEMPTS, document)
        if failure is not None and not failure.ends_all_ranks:
            path = self._folder / FAILURES
            path.mkdir(exist_ok=True)
            write_json(
                path / f"attempt-{self._spec.attempt:04d}.json",
                {"format": FORMAT, "attempt": self._spec.attempt, **failure.document()},
            )

    def _watch(self, children: list[Child], watchdog: Watchdog) -> Failure | None:
        """Wait until all processes have ended, or one fails or hangs.

        After a stop signal all processes are stopped, because the signal may have reached only
        some. Returns None if another node ended the attempt and this node did not fail.
        """
        pauses = timing.PauseDetector()
        while True:
            self._resumed_at = pauses.poll()
            codes = [child.poll() for child in children]
            is_stopped = any(map(is_stop_exit, codes))
            failed = None if is_stopped else self._find_failed_process(codes)
            if failed is not None:
                failure = self._find_first_failure(children, failed)
                if any(is_stop_exit(child.poll()) for child in children):
                    continue  # the failure is a consequence of a stopped process
                return failure
            if all(code is not None for code in codes) or self._is_lingering(codes):
                return self._find_common_failure(codes)
            if is_stopped or self._signals.is_stop_requested or self._group.is_resizing():
                self._forward_stop()
                if self._is_stop_overdue(codes, watchdog.heartbeats):
                    return self._find_stop(codes)
            alarm = self._group.find_alarm()
            problem = watchdog.find_hang(self._group.remote_silence(), self._resumed_at)
            if problem or alarm == "hang":
                reason = problem or "no heartbeat on another node"
                return self._describe_hang(children, watchdog, reason)
            if alarm:
                return None
            self._write_signs_of_life(children, watchdog.heartbeats)
            self._events.observe(watchdog.heartbeats, self._reports)
            if self._tail:
                self._tail.forward()
            time.sleep(POLL_SECONDS)

    def _forward_stop(self) -> None:
        if self._stop_began_at is None:
            self._stop_began_at = time.monotonic()
            self._signals.forward()

    def _is_stop_overdue(self, codes: list[int | None], heartbeats: HeartbeatReader) -> bool:
        """Return whether processes do not stop although there is nothing to save.

        The kernel may have stopped them, or they wait for a process that has ended. A repeated
        signal does not wait for a save.
        """
        now = time.monotonic()
        began_at = self._stop_began_at or now
        if is_repeated() or (not self._reports.has_progress() and now - began_at > STOP_SECONDS):
            return True
        running = [heartbeats.read(number) for number, code in enumerate(codes) if code is None]
        last_beat_at = max(began_at, *(beat.at for beat in running))
        is_saving = any(beat.phase == "checkpoint" for beat in running)
        return len(running) < self._size and not is_saving and now - last_beat_at > LINGER_SECONDS

    def _write_signs_of_life(self, children: list[Child], heartbeats: HeartbeatReader) -> None:
        """Record the run as alive once a second, and the state of each process."""
        now = time.monotonic()
        if now - self._last_seen_clock < LAST_SEEN_SECONDS:
            return
        self._last_seen_clock = now
        if self._group.is_leader:
            write_last_seen(self._folder)
        self._write_status(children, heartbeats)

    def _write_status(
        self,
        children: list[Child],
        heartbeats: HeartbeatReader,
        *,
        is_final: bool = False,
    ) -> None:
        beats = [heartbeats.read(number) for number in range(self._size)]
        write_node_status(
            self._folder,
            self._spec.first_rank,
            children,
            beats,
            attempt=self._spec.attempt,
            is_final=is_final,
        )

    def _is_lingering(self, codes: list[int | None]) -> bool:
        """Return whether all processes are done, but some have not exited in time."""
        if not all(map(self._reports.is_done, range(self._size))):
            return False
        self._done_at = self._done_at or time.monotonic()
        if time.monotonic() - self._done_at < LINGER_SECONDS:
            return False
        for number, code in enumerate(codes):
            if code is None:
                rank = self._layout.first_rank + number
                logger.warning("process %d finished but did not exit; killing it", rank)
        return True

    def _find_failed_process(self, codes: list[int | None]) -> int | None:
        """Return the first process to exit before it was done, or None."""
        for number, code in enumerate(codes):
            has_ended_well = self._reports.is_done(number) or (
                code in COMMON_EXIT_CODES and self._reports.read_failure(number)
            )
            if code is not None and not has_ended_well:
                return number
        return None

    def _find_common_failure(self, codes: list[int | None]) -> Failure | None:
        """Return why all processes stopped at the same step, or None if the run is finished."""
        for number, code in enumerate(codes):
            if code and self._reports.is_done(number):
                rank = self._layout.first_rank + number
                logger.warning("process %d finished, then exited with code %d", rank, code)
        if any(map(is_stop_exit, codes)):
            return self._find_stop(codes)
        return next(iter(self._reports.read_failures()), None)

    def _find_stop(self, codes: list[int | None]) -> Failure:
        """Return the failure after a stop signal, from the processes' reports if possible."""
        for failure in self._reports.read_failures():
            if failure.kind == "preempted":
                return failure
        number = self._signals.number or signal.SIGTERM
        code = next(filter(is_stop_exit, codes), None) or -number
        exit_code = convert_return_code(code)
        when = "before a save" if self._reports.has_progress() else "before the run began"
        return Failure(
            "preempted",
            self._layout.first_rank,
            0,
            f"stopped by a signal {when}",
            evidence={"exit_code": exit_code},
        )

    def _find_first_failure(self, children: list[Child], failed: int) -> Failure:
        """Return the failure that caused the others.

        In this order: the error reported by the failed process, a process that died without a
        report, the first reported error, the first network error.
        """
        first_rank = self._layout.first_rank
        self._reports.request_collectives()
        timing.wait_for(
            lambda: not any(map(self._may_report, range(self._size), children)),
            EVIDENCE_SECONDS,
            poll_seconds=POLL_SECONDS,
        )
        failed_code = children[failed].poll() or 0
        reported = self._reports.read_failures()
        unreported = [
            Failure(
                "process",
                first_rank + number,
                0,
                _describe_exit(first_rank + number, code),
                evidence={"exit_code": code, **self._collect_evidence(number)},
            )
            for number, child in enumerate(children)
            if (code := child.poll()) is not None
            and not self._reports.is_done(number)
            and self._reports.read_failure(number) is None
        ]
        causes = [failure for failure in reported if failure.kind != "network"]
        failed_causes = [failure for failure in causes if failure.rank == first_rank + failed]
        candidates = [*failed_causes, *unreported, *causes, *reported]
        if candidates:
            return candidates[0]
        rank = first_rank + failed
        return Failure("process", rank, 0, _describe_exit(rank, failed_code))

    def _may_report(self, number: int, child: Child) -> bool:
        return child.poll() is None and self._reports.read_failure(number) is None

    def _describe_hang(self, children: list[Child], watchdog: Watchdog, reason: str) -> Failure:
        """Return the failure of the process the others wait for, with the stacks of all."""
        pids = [child.pid for child in children]
        snapshots = take_snapshots(watchdog.heartbeats, pids, self._reports)
        blamed, first_rank = snapshots[blamed_rank(snapshots)], self._layout.first_rank
        by_rank = {str(first_rank + snapshot.rank): snapshot for snapshot in snapshots}
        is_stopped = " (it is stopped)" if blamed.state in ("T", "t") else ""
        return Failure(
            "preflight" if blamed.beat.phase == PREFLIGHT else "hang",
            first_rank + blamed.rank,
            blamed.beat.step,
            f"process {first_rank + blamed.rank} hangs{is_stopped}: {reason}",
            phase=blamed.beat.phase,
            evidence={
                "process_states": {rank: snapshot.state for rank, snapshot in by_rank.items()},
                "collectives": {rank: snapshot.collectives for rank, snapshot in by_rank.items()},
                "stacks": {
                    rank: snapshot.stack[-MAX_STACK_LINES:] for rank, snapshot in by_rank.items()
                },
                "progress_key": blamed.progress_key,
            },
        )

    def _collect_evidence(self, number: int) -> dict[str, Any]:
        """Return a dead process's stack and log, and the others' last collectives."""
        first_rank = self._layout.first_rank
        log = self._folder / RANKS / f"{first_rank + number}.log"
        collectives = {
            str(first_rank + other): self._reports.read_collectives(other)
            for other in range(self._size)
            if other != number
        }
        return {
            "stack": self._reports.read_stack(number)[:MAX_STACK_LINES],
            "log": read_last_lines(log, MAX_LOG_LINES),
            "collectives": collectives,
        }


def _describe_exit(rank: int, code: int) -> str:
    if code == 0:
        return f"process {rank} exited before the end of the run"
    if code > 0:
        return f"process {rank} exited with code {code} and reported no error"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"process {rank} was killed by {name}"


def _count_oom_kills() -> int:
    """Return how many processes in this control group the kernel killed for lack of memory."""
    events = read_text(Path("/sys/fs/cgroup/memory.events")).splitlines()
    return next((int(line.split()[1]) for line in events if "oom_kill " in line), 0)
