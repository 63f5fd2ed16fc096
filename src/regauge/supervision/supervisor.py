"""Runs attempts until the run ends, and decides after each failure whether to restart.

The supervisor computes nothing, and on a single node it does not import torch. Every attempt has
new processes and a new rendezvous. The failure that ended an attempt is written to `failures/`.
"""

from __future__ import annotations

import datetime as dt
import math
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from regauge import accelerators
from regauge.config import read_microbatch_rows
from regauge.config.output_files import FAILURES, FAULTS
from regauge.machines.catalog import find_price
from regauge.run_folders.cost_meter import CostMeter, read_last_seen, read_paid, read_time
from regauge.supervision.attempt import Attempt
from regauge.supervision.failures import POLICIES, Failure
from regauge.supervision.forks import open_fork_server
from regauge.supervision.health.examination import examine
from regauge.supervision.health.findings import raise_if_bad
from regauge.supervision.health.machine import check_machine
from regauge.supervision.nodes.attempt_registry import RunEndedError
from regauge.supervision.nodes.interface import build_launcher
from regauge.supervision.run_events import send_run_events
from regauge.supervision.run_metrics import export_run
from regauge.supervision.signals import SupervisorSignals
from regauge.supervision.spot_notices import watch_spot_notices
from regauge.system.children import SpawnFunction, spawn
from regauge.system.errors import FIRST_SIGNAL_CODE, ChildError, PreflightError
from regauge.system.log import logger
from regauge.system.scratch import create_scratch_folder
from regauge.system.stop_signals import record_signals
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.supervision.forks import ForkServer
    from regauge.supervision.nodes.interface import NodeGroup
    from regauge.supervision.run_events import RunEvents
    from regauge.supervision.run_metrics import RunMetrics
    from regauge.training.settings import TrainSettings
MAX_WAIT_SECONDS = 60.0
RECHECKED_KINDS = ("device", "network", "hang", "preflight")
"""Failure kinds after which devices and collectives are checked again."""


def supervise(settings: TrainSettings, local_size: int, fault_plan: str | None = None) -> None:
    """Run to the end, with `local_size` processes on this node.

    Raises ChildError if the run fails.
    """
    folder = Path(settings.output.folder)
    launcher = build_launcher(settings, folder)
    notices = settings.execution.supervision.spot_notices
    notifications = settings.monitoring.notifications
    signals = SupervisorSignals()
    with (
        record_signals(),
        launcher.open(),
        create_scratch_folder() as scratch,
        watch_spot_notices(notices, signals),
        send_run_events(notifications, folder, lambda: launcher.is_leader) as events,
        open_fork_server() as fork_server,
        export_run(settings) as metrics,
    ):
        run = Supervisor(
            settings,
            local_size,
            scratch,
            fault_plan,
            signals=signals,
            events=events,
            fork_server=fork_server,
            metrics=metrics,
        )
        while True:
            raise_if_bad(check_machine(folder, settings.output.checkpoint.remote))
            try:
                with launcher.begin_attempt(
                    len(run.devices), signals, needs_preflight=run.needs_preflight
                ) as group:
                    failure = run.run_attempt(group)
            except RunEndedError as end:
                if end.code:
                    raise ChildError(end.code, end.message) from None
                return
            if failure is None:
                launcher.record_end(0, "")
                events.report_finish(settings.find_next_command(str(folder)))
                return
            if failure.has_lost_leader:
                launcher.is_leader = True  # until the remaining nodes meet again
            try:
                run.wait_before_next()
            except ChildError as error:
                if not signals.is_stop_requested:
                    launcher.record_end(error.exit_code, str(error))
                raise


class Supervisor:
    """A run's attempts so far, as known to one node's supervisor."""

    def __init__(
        self,
        settings: TrainSettings,
        local_size: int,
        scratch: Path,
        fault_plan: str | None,
        *,
        signals: SupervisorSignals,
        events: RunEvents,
        fork_server: ForkServer,
        metrics: RunMetrics | None = None,
    ) -> None:
        self._settings, self._scratch = settings, scratch
        self._spawn_function: SpawnFunction = spawn
        self.devices = tuple(range(local_size))
        """Indices of the devices the run uses on this node."""
        self._fault_plan, self._signals, self._events = fault_plan, signals, events
        self._metrics = metrics
        self._failures: list[Failure] = []
        self._unrecorded: Attempt | None = None
        """The last attempt, if the node that records attempts was lost with it."""
        self._has_excluded = False
        """Whether devices were excluded after the last attempt."""
        self._started_at = read_time()
        self._price = find_price(settings.execution.price)
        today = dt.datetime.now(tz=dt.UTC).date()
        warning = self._price.staleness_warning(today) if self._price else None
        if warning:
            logger.warning(warning)
        self._last_seen_at = read_last_seen(Path(settings.output.folder))
        accelerator = settings.accelerator or accelerators.choose_without_torch()
        if accelerator is not None and accelerator.is_fork_safe and sys.platform == "linux":
            fork_server.start_server()
            timeout_seconds = float(settings.execution.timeout_seconds)
            self._spawn_function = partial(fork_server.start, timeout_seconds=timeout_seconds)
        else:
            fork_server.close()

    @property
    def needs_preflight(self) -> bool:
        """Whether the next attempt checks devices and collectives."""
        if self._settings.execution.supervision.preflight == "brief":
            return False
        return not self._failures or self._failures[-1].kind in RECHECKED_KINDS

    def run_attempt(self, group: NodeGroup) -> Failure | None:
        """Run one attempt; return how it failed, or None if the run is finished."""
        if group.is_leader and self._unrecorded is not None:
            self._unrecorded.record(self._failures[-1])
        self._unrecorded = None
        meter = self._build_meter(group)
        self._events.begin_attempt(group.plan.attempt, meter)
        attempt = Attempt(
            self._settings,
            self.devices,
            self._scratch,
            self._fault_plan,
            group=group,
            signals=self._signals,
            meter=meter,
            spawn_function=self._spawn_function,
        )
        failure = attempt.run(self._events, self._metrics)
        if failure is not None and failure.kind == "preflight" and group.num_nodes == 1:
            failure = self._find_bad_devices(failure)
        if group.is_leader:
            attempt.record(failure)
        elif failure is not None and failure.has_lost_leader:
            self._unrecorded = attempt
        if failure is not None:
            self._failures.append(failure)
        return failure

    def _build_meter(self, group: NodeGroup) -> CostMeter:
        """Return a meter from now on, with the cost so far and the time between attempts."""
        folder = Path(self._settings.output.folder)
        cost, since = read_paid(folder, self._started_at, self._last_seen_at)
        usd_per_hour = self._price.usd_per_hour if self._price else None
        world_size = group.plan.layout.world_size
        meter = CostMeter(cost, time.monotonic(), group.num_nodes, world_size, usd_per_hour)
        return replace(meter, paid_before=meter.cost_after(read_time() - since))

    def wait_before_next(self) -> None:
        """Wait before the next attempt; raises ChildError if the run is not restarted."""
        limit = self._settings.execution.supervision.max_attempts_per_step
        last = self._failures[-1]
        has_new_devices = last.kind == "preflight" and self._has_excluded
        wait = 0.0 if has_new_devices else _compute_wait(self._failures, limit)
        if wait is None or self._signals.is_stop_requested:
            error = _build_final_error(self._failures, self._settings, self._signals.number)
            self._events.report_end(last, error)
            raise error
        self._events.report_restart(last, wait)
        when = f"in {wait:g} s" if wait else "now"
        logger.warning("%s; restarting %s", _format_failure(last), when)
        self._signals.sleep(wait)

    def _find_bad_devices(self, failure: Failure) -> Failure:
        """Examine all devices after a failed preflight; return the failure with its cause.

        If the number of processes is `auto`, later attempts exclude bad devices.
        """
        accelerator = self._settings.accelerator or accelerators.choose()[0]
        examination = examine(
            accelerator,
            len(self.devices),
            fault_plan=self._fault_plan,
            record=Path(self._settings.output.folder) / FAULTS,
            devices=self.devices,
        )
        bad = [finding for finding in examination.findings if not finding.ok]
        try:
            raise_if_bad(bad)
        except PreflightError as error:
            evidence = {**failure.evidence, "findings": [finding.to_row() for finding in bad]}
            failure = replace(failure, problem=str(error), evidence=evidence)
        if self._settings.execution.processes == "auto" and accelerator.is_indexed:
            self._exclude_devices(examination.bad_ranks)
        return failure

    def _exclude_devices(self, ranks: set[int]) -> None:
        remaining = tuple(device for rank, device in enumerate(self.devices) if rank not in ranks)
        self._has_excluded = 0 < len(remaining) < len(self.devices)
        if self._has_excluded:
            excluded = ", ".join(map(str, sorted(set(self.devices) - set(remaining))))
            self.devices = remaining
            count = format_count(len(remaining), "process")
            logger.warning("device %s is excluded; the run uses %s", excluded, count)


def _compute_wait(failures: list[Failure], limit: int) -> float | None:
    """Return the seconds before the next attempt, or None if the run is not restarted."""
    last = failures[-1]
    if not last.policy.is_retried:
        return None
    num_same = _count_last(failures, last.is_same)
    if last.policy.is_counted and num_same >= (last.policy.max_attempts or limit):
        return None
    num_of_kind = _count_last(failures, lambda failure: failure.kind == last.kind)
    return min(MAX_WAIT_SECONDS, math.ldexp(last.policy.wait_seconds, num_of_kind - 1))


def _count_last(failures: list[Failure], predicate: Callable[[Failure], bool]) -> int:
    """Return how many of the last failures in a row fulfil a predicate."""
    return sum(1 for _ in takewhile(predicate, reversed(failures)))


def _build_final_error(
    failures: list[Failure], settings: TrainSettings, number: int | None = None
) -> ChildError:
    """Return the run's final error; `number` is the signal that stopped it, if any."""
    code, line = _summarize_failures(failures, settings)
    if failures[-1].kind == "preempted":
        code = failures[-1].evidence.get("exit_code", code)
    elif number is not None:
        line = f"stopped by a signal after a failure: {line}"
    error = ChildError(code if number is None else FIRST_SIGNAL_CODE + number, line)
    if trace := failures[-1].evidence.get("traceback"):
        error.add_note("\n".join([f"In process {failures[-1].rank}:", *trace]))
    return error


def _summarize_failures(failures: list[Failure], settings: TrainSettings) -> tuple[int, str]:
    """Return exit code and last line for a run that is not restarted."""
    last, folder = failures[-1], Path(settings.output.folder)
    policy, limit = last.policy, settings.execution.supervision.max_attempts_per_step
    if last.kind == "memory":
        largest = "".join(
            f", largest tensors {entry['count']} x {entry['tensors']}: "
            f"{entry['bytes'] / 1e6:,.0f} MB"
            for entry in last.evidence.get("largest_tensors", [])[:1]
        )
        remedy = _suggest_microbatch(settings, folder)
        remedy = f"{remedy}, or set execution.activation_checkpointing"
        return policy.exit_code, f"{last.problem} (process {last.rank}{largest}); {remedy}"
    if not policy.is_retried or policy.max_attempts is not None:
        return policy.exit_code, last.problem
    num_same = _count_last(failures, last.is_same)
    if policy.is_counted and num_same >= limit:
        attempts = format_count(num_same, "attempt")
        line = f"{attempts} failed at step {last.step} in the same way: {last.problem}"
        return POLICIES["progress"].exit_code, f"{line}; see {folder / FAILURES}"
    return policy.exit_code, f"{last.problem}; see {folder / FAILURES}"


def _suggest_microbatch(settings: TrainSettings, folder: Path) -> str:
    """Return the advice to halve the microbatch, even one chosen by the batch finder."""
    rows = settings.batch.microbatch_rows
    if rows == "auto":
        rows = read_microbatch_rows(folder)
    if rows == "auto":
        return "set batch.microbatch_rows to a number"
    return f"set batch.microbatch_rows = {max(1, rows // 2)}"


def _format_failure(failure: Failure) -> str:
    process = f"process {failure.rank}"
    is_named = process in failure.problem
    problem = failure.problem if is_named else f"{process}: {failure.problem}"
    return f"{problem}, after step {failure.step}"
