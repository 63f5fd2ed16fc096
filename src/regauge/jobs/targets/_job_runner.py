"""Runs the nodes of a job as local processes: starts, restarts by exit code, limits, cancellation.

A job is a gang, whose nodes train together, or an array of independent jobs. Codes of RESTART_CODES
and SIGKILL restart a node; any other code ends a gang. The leader of a gang serves its rendezvous.
If the leader is lost, all nodes are restarted with a new rendezvous.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.jobs.targets import FINAL_STATES, JobState, LeaderAddress
from regauge.jobs.targets._nodes import NodeProcess, is_listening
from regauge.system.errors import (
    FIRST_SIGNAL_CODE,
    RESTART_CODES,
    LimitReachedError,
    PreemptedError,
)
from regauge.system.processes import available_cores, find_free_port
from regauge.system.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from regauge.jobs.targets import NodeCommand

LOOPBACK = "127.0.0.1"
GRACE_SECONDS = 10.0
"""Time from SIGTERM to SIGKILL; a command of Regauge saves and ends meanwhile."""
POLL_SECONDS = 0.1
CANCELLED = "cancelled by a user"


@dataclass(frozen=True)
class RestartRules:
    """The limits of a job, and how its nodes depend on each other."""

    is_gang: bool
    """Whether the nodes work together; otherwise they are the jobs of an array."""
    min_nodes: int = 1
    max_attempts: int = 1
    hours: float | None = None

    def allows_restart(self, code: int) -> bool:
        """Return whether a node or a job starts again after an exit code.

        SIGKILL represents the loss of a machine.
        """
        return code in RESTART_CODES or code == FIRST_SIGNAL_CODE + signal.SIGKILL


@dataclass(frozen=True)
class RunnerEvent:
    """A change of a job or of one of its nodes."""

    message: str
    state: JobState | None = None
    """New state of the job; None if it did not change."""
    node: int | None = None
    node_state: JobState | None = None
    attempt: int = 1
    exit_code: int | None = None
    pid: int | None = None


@dataclass
class _NodeSlot:
    """A node of the job, with its process in the current attempt."""

    index: int
    attempt: int = 0
    process: NodeProcess | None = None
    state: JobState = "pending"
    exit_code: int | None = None

    @property
    def is_running(self) -> bool:
        return self.state == "running"


class JobRunner:
    """Runs one job; the caller calls `start`, and then `poll` until `is_final`."""

    def __init__(
        self,
        name: str,
        list_commands: Callable[[LeaderAddress], list[NodeCommand]],
        rules: RestartRules,
        logs: Path,
        *,
        environment: Mapping[str, str],
        folder: Path | None = None,
        on_event: Callable[[RunnerEvent], object] = lambda _: None,
    ) -> None:
        """`environment` has the variables that every node inherits; `folder` is its working folder.

        The output of a node is in `<logs>/attempt-<n>/node-<n>.log`.
        """
        self._name, self._list_commands, self._rules = name, list_commands, rules
        self._logs, self._environment, self._folder = logs, environment, folder
        self._on_event = on_event
        self.state: JobState = "pending"
        self.attempt = 0
        self.exit_code: int | None = None
        self._nodes: list[_NodeSlot] = []
        self._commands: list[NodeCommand] = []
        self._leader = LeaderAddress(LOOPBACK, 0, "")
        self._deadline: float | None = None
        self._kill_at: float | None = None
        """Monotonic time in seconds at which the nodes that received SIGTERM are killed."""
        self._final_event: RunnerEvent | None = None
        """Last event of the job, which is reported as soon as its nodes have stopped."""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL_STATES

    def start(self) -> None:
        """Begin the first attempt."""
        if self._rules.hours is not None:
            self._deadline = time.monotonic() + self._rules.hours * SECONDS_PER_HOUR
        self._begin_attempt()
        self._nodes = [_NodeSlot(index) for index in range(len(self._commands))]
        self._start_nodes()

    def poll(self) -> None:
        """Handle the nodes that have ended, start those that wait, and apply the limits."""
        ended_nodes = self._collect_exits()
        if self._kill_at is not None:
            self._continue_stop()
        elif self._deadline is not None and time.monotonic() >= self._deadline:
            message = f"the time limit of {self._rules.hours:g} h is reached"
            self._stop(RunnerEvent(message, "failed", exit_code=LimitReachedError.exit_code))
        else:
            self._handle_exits(ended_nodes)
        if not self.is_final and self._kill_at is None:
            self._start_nodes()

    def cancel(self) -> None:
        """Stop the nodes; the job ends as cancelled."""
        if self._final_event is None and not self.is_final:
            self._stop(RunnerEvent(CANCELLED, "cancelled"))

    def kill_node(self, index: int) -> None:
        """Kill the process of a node, as the loss of its machine does."""
        process = self._nodes[index].process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the nodes that still run."""
        for node in self._nodes:
            if node.process is not None:
                node.process.kill()

    def _begin_attempt(self) -> None:
        """Choose the port and the id of a new rendezvous, and list the commands for it."""
        self.attempt += 1
        port = find_free_port()
        self._leader = LeaderAddress(LOOPBACK, port, f"{self._name}-{self.attempt}")
        self._commands = self._list_commands(self._leader)

    def _start_nodes(self) -> None:
        """Start pending nodes: the leader first, the others when its rendezvous answers.

        Any node of this machine could serve the rendezvous, so the others wait for the leader. An
        array runs at most one job per core at the same time.
        """
        startable = self._list_startable()
        for node in startable:
            self._start_node(node)
        is_waiting = any(node.state == "pending" for node in self._nodes)
        if self._rules.is_gang and is_waiting:
            if startable:
                self._set_state("starting", "the other nodes wait for the rendezvous of node 0")
        elif self.state != "running":
            self._set_state("running", f"attempt {self.attempt} runs")

    def _list_startable(self) -> list[_NodeSlot]:
        """Return the pending nodes that may start now."""
        pending = [node for node in self._nodes if node.state == "pending"]
        if not self._rules.is_gang:
            num_running = sum(node.is_running for node in self._nodes)
            return pending[: max(0, available_cores() - num_running)]
        if pending and self._needs_leader(pending):
            return [node for node in pending if node.index == 0]
        return pending

    def _needs_leader(self, pending: list[_NodeSlot]) -> bool:
        """Return whether pending nodes wait until the leader serves the rendezvous."""
        leader = self._nodes[0]
        if leader not in pending and not leader.is_running:
            return False  # it has finished the run, so that no rendezvous is needed
        uses_leader = len(self._nodes) > 1 and self._uses_leader_port()
        return uses_leader and not is_listening(self._leader.port)

    def _uses_leader_port(self) -> bool:
        """Return whether a variable of the nodes names the port of the leader."""
        port = str(self._leader.port)
        values = self._commands[-1].environment.values()
        return any(value == port or value.endswith(f":{port}") for value in values)

    def _start_node(self, node: _NodeSlot) -> None:
        """Start the command of a node."""
        node.attempt = self.attempt if self._rules.is_gang else node.attempt + 1
        self.attempt = max(self.attempt, node.attempt)
        command = self._commands[node.index]
        log = build_log_path(self._logs, node.attempt, node.index)
        environment = {**self._environment, **command.environment}
        node.process = NodeProcess(command.command, environment, log, self._folder)
        node.state, node.exit_code = "running", None
        self._report_node(node, "started")

    def _collect_exits(self) -> list[_NodeSlot]:
        """Return the nodes that have ended since the last call."""
        ended_nodes = []
        for node in self._nodes:
            code = node.process.exit_code if node.process else None
            if node.is_running and code is not None:
                node.exit_code = code
                event = self._final_event
                node.state = "succeeded" if code == 0 else "failed"
                if code and event is not None and event.state == "cancelled":
                    node.state = "cancelled"
                self._report_node(node, f"ended with exit code {code}")
                ended_nodes.append(node)
        return ended_nodes

    def _handle_exits(self, ended_nodes: list[_NodeSlot]) -> None:
        """Restart or end the job after the exits of some nodes."""
        failed = [node for node in ended_nodes if node.exit_code]
        final = [node for node in failed if not self._rules.allows_restart(node.exit_code or 0)]
        if not self._rules.is_gang:
            self._restart_jobs([node for node in failed if node not in final])
        elif final:
            self._fail(final[0], "its exit code allows no restart")
        elif failed:
            self._restart_gang(failed)
        if self._final_event is None and self._kill_at is None and not self._has_active_nodes():
            self._end_job(self._build_final_event())

    def _has_active_nodes(self) -> bool:
        return any(node.state in {"pending", "running"} for node in self._nodes)

    def _build_final_event(self) -> RunnerEvent:
        """Return the last event of a job whose nodes have all ended."""
        failed = next((node for node in self._nodes if node.state == "failed"), None)
        num_succeeded = sum(node.state == "succeeded" for node in self._nodes)
        is_done = num_succeeded >= self._rules.min_nodes if self._rules.is_gang else not failed
        if is_done or failed is None:
            return RunnerEvent("all nodes have ended", "succeeded", exit_code=0)
        return self._describe_failure(failed, "it has no attempt left")

    def _restart_jobs(self, lost: list[_NodeSlot]) -> None:
        """Restart the lost jobs of an array that have attempts left."""
        for node in lost:
            if node.attempt < self._rules.max_attempts:
                self._set_pending(node)

    def _restart_gang(self, lost: list[_NodeSlot]) -> None:
        """Begin the next attempt of a gang after the loss of nodes."""
        leader = self._nodes[0]
        if self.attempt >= self._rules.max_attempts:
            num_left = sum(node.is_running for node in self._nodes)
            if not leader.is_running or num_left < self._rules.min_nodes:
                self._fail(lost[0], "it has no attempt left")
            return
        self._set_pending(*lost)
        if leader.is_running:
            self.attempt += 1
            return
        if any(node.is_running for node in self._nodes):
            self._stop(None)
        else:
            self._restart_all()

    def _restart_all(self) -> None:
        """Begin an attempt with a new rendezvous, for all nodes that have not finished."""
        self._begin_attempt()
        for node in self._nodes:
            if node.state != "succeeded":
                node.state = "pending"

    def _set_pending(self, *lost: _NodeSlot) -> None:
        """Let lost nodes start again, and set the state of the job."""
        is_preempted = all(node.exit_code == PreemptedError.exit_code for node in lost)
        names = ", ".join(str(node.index) for node in lost)
        self._set_state(
            "preempted" if is_preempted else "restarting", f"node {names} is lost; it starts again"
        )
        for node in lost:
            node.state = "pending"

    def _fail(self, node: _NodeSlot, reason: str) -> None:
        self._stop(self._describe_failure(node, reason))

    def _describe_failure(self, node: _NodeSlot, reason: str) -> RunnerEvent:
        message = f"node {node.index} ended with exit code {node.exit_code}; {reason}"
        return RunnerEvent(message, "failed", node=node.index, exit_code=node.exit_code)

    def _stop(self, final_event: RunnerEvent | None) -> None:
        """Send SIGTERM to the nodes; the job then ends with an event, or restarts if it is None."""
        self._final_event = final_event
        self._kill_at = time.monotonic() + GRACE_SECONDS
        for node in self._nodes:
            if node.process is not None and node.is_running:
                node.process.terminate()
        self._continue_stop()

    def _continue_stop(self) -> None:
        """Kill the nodes that exceed GRACE_SECONDS; then end or restart the job."""
        running = [node for node in self._nodes if node.is_running]
        if running and self._kill_at is not None and time.monotonic() < self._kill_at:
            return
        for node in running:
            if node.process is not None:
                node.process.kill()
        self._collect_exits()
        self._kill_at = None
        if self._final_event is None:
            self._restart_all()
        else:
            self._end_job(self._final_event)

    def _end_job(self, event: RunnerEvent) -> None:
        self.exit_code, self.state = event.exit_code, event.state or "unknown"
        for node in self._nodes:
            if node.state == "pending":
                node.state = "cancelled"
        self._report_job(event)

    def _set_state(self, state: JobState, message: str) -> None:
        self.state = state
        self._report_job(RunnerEvent(message, state))

    def _report_node(self, node: _NodeSlot, change: str) -> None:
        pid = node.process.pid if node.process else None
        self._on_event(
            RunnerEvent(
                f"node {node.index} {change}",
                node=node.index,
                node_state=node.state,
                attempt=node.attempt,
                exit_code=node.exit_code,
                pid=pid,
            )
        )

    def _report_job(self, event: RunnerEvent) -> None:
        self._on_event(
            RunnerEvent(
                event.message,
                event.state,
                node=event.node,
                attempt=self.attempt,
                exit_code=event.exit_code,
            )
        )


def build_log_path(logs: Path, attempt: int, node: int) -> Path:
    """Return the log file of a node in an attempt."""
    return logs / f"attempt-{attempt}" / f"node-{node}.log"
