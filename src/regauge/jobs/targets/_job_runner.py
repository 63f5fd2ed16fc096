"""Runs a job's nodes as local processes: starts, restarts by exit code, limits, cancellation.

A job is a gang, whose nodes train together, or an array with independent jobs. Codes in
RESTART_CODES and SIGKILL restart a node; any other code ends a gang. A gang's leader serves the
rendezvous. If the leader is lost, all nodes restart with a new rendezvous.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from regauge.jobs.targets import JobSpec, JobState, LeaderAddress, NodeCommand
from regauge.jobs.targets._nodes import is_listening
from regauge.system.children import Child, convert_return_code, kill_group, spawn
from regauge.system.errors import (
    FIRST_SIGNAL_CODE,
    RESTART_CODES,
    LimitReachedError,
    PreemptedError,
)
from regauge.system.processes import available_cores, find_free_port
from regauge.system.timing import POLL_SECONDS
from regauge.system.units import SECONDS_PER_HOUR

LOOPBACK = "127.0.0.1"
GRACE_SECONDS = 10.0
"""Time from SIGTERM to SIGKILL, in which commands save and end; a server first drains."""
LOST_CODES = (*RESTART_CODES, FIRST_SIGNAL_CODE + signal.SIGKILL)
"""Exit codes after which a node starts again; SIGKILL represents a lost machine."""
NO_ATTEMPT = "it has no attempt left"


class JobEnd(NamedTuple):
    message: str
    state: JobState
    exit_code: int | None = None
    node: int | None = None


CANCELLATION = JobEnd("cancelled by a user", "cancelled")


@dataclass
class _Node:
    index: int
    attempt: int = 0
    state: JobState = "pending"
    exit_code: int | None = None
    process: Child | None = None

    def poll(self) -> int | None:
        """Return the process's exit code as in shells; None while it runs."""
        code = self.process.poll() if self.process else None
        return None if code is None else convert_return_code(code)

    def terminate(self) -> None:
        """Send SIGTERM to the process, as a scheduler does before it stops a node."""
        if self.process:
            self.process.terminate()

    def kill(self) -> None:
        """Kill the process group, as if the machine were lost, and wait."""
        if self.process is not None:
            if self.process.poll() is None:
                kill_group(self.process)
            self.process.wait()


class JobRunner:
    def __init__(
        self,
        job: JobSpec,
        list_commands: Callable[[LeaderAddress], list[NodeCommand]],
        logs: Path,
        environment: Mapping[str, str],
        on_event: Callable[..., object] = lambda *_, **__: None,
    ) -> None:
        """Nodes get the environment and their own variables, and write one log per attempt.

        `on_event` is called with each event's message, and with the other `EventLine` fields as
        keywords.
        """
        self._job, self._list_commands, self._logs = job, list_commands, logs
        self._environment, self._on_event = environment, on_event
        self._is_gang = job.jobs == 1
        self._is_cancelled = False
        self._nodes: list[_Node] = []
        self._commands: list[NodeCommand] = []
        self._port = 0
        self.state: JobState = "pending"
        self.attempt = 0
        self.exit_code: int | None = None

    def run(self, on_poll: Callable[[], object]) -> None:
        """Run the job to the end; `on_poll` is called regularly. Nodes do not outlive the call."""
        hours = math.inf if self._job.hours is None else self._job.hours
        deadline = time.monotonic() + hours * SECONDS_PER_HOUR
        end = None
        try:
            while end is None:
                self._begin_attempt()
                end = self._run_attempt(deadline, on_poll)
                self._stop_nodes("cancelled" if self._is_cancelled else "failed")
                if self._is_cancelled:  # also while nodes stopped that would start again
                    end = end or CANCELLATION
        finally:
            for node in self._nodes:
                node.kill()
        self.exit_code = end.exit_code
        self._set_state(end.state, end.message, exit_code=end.exit_code, node=end.node)

    def cancel(self) -> None:
        """Let `run` stop the nodes; the job ends as cancelled."""
        self._is_cancelled = True

    def kill_node(self, index: int) -> None:
        self._nodes[index].kill()

    def _begin_attempt(self) -> None:
        """Choose a new rendezvous port and id for all unfinished nodes."""
        self.attempt += 1
        self._port = find_free_port()
        leader = LeaderAddress(LOOPBACK, self._port, f"{self._job.name}-{self.attempt}")
        self._commands = self._list_commands(leader)
        self._nodes = self._nodes or [_Node(index) for index in range(len(self._commands))]
        for node in self._nodes:
            if node.state != "succeeded":
                node.state = "pending"

    def _run_attempt(self, deadline: float, on_poll: Callable[[], object]) -> JobEnd | None:
        """Run the nodes until the job ends; return None if all of them must start again."""
        while True:
            if self._is_cancelled:
                return CANCELLATION
            if time.monotonic() >= deadline:
                message = f"the time limit of {self._job.hours:g} h is reached"
                return JobEnd(message, "failed", LimitReachedError.exit_code)
            self._start_nodes()
            on_poll()
            time.sleep(POLL_SECONDS)
            failed = [node for node in self._collect_exits("failed") if node.exit_code]
            lost = [node for node in failed if node.exit_code in LOST_CODES]
            if not self._is_gang:
                self._restart_jobs(lost)
            elif len(lost) < len(failed):
                final = next(node for node in failed if node not in lost)
                return _describe_failure(final, "its exit code allows no restart")
            elif lost and self.attempt < self._job.max_attempts:
                self._set_pending(lost)
                if self._nodes[0].state != "running":
                    return None
                self.attempt += 1
            elif lost and not self._can_continue():
                return _describe_failure(lost[0], NO_ATTEMPT)
            if not self._list_nodes("pending", "running"):
                return self._find_end()

    def _can_continue(self) -> bool:
        """Return whether a gang works without its lost nodes: it has a leader and enough nodes."""
        has_leader = self._nodes[0].state == "running"
        return has_leader and len(self._list_nodes("running")) >= self._job.min_nodes

    def _find_end(self) -> JobEnd:
        """Return how a job ended; all nodes must have ended."""
        failed = self._list_nodes("failed")
        num_succeeded = len(self._list_nodes("succeeded"))
        if not failed or (self._is_gang and num_succeeded >= self._job.min_nodes):
            return JobEnd("all nodes have ended", "succeeded", 0)
        return _describe_failure(failed[0], NO_ATTEMPT)

    def _start_nodes(self) -> None:
        """Start pending nodes: the leader first, the others when its rendezvous answers.

        Any local node could serve the rendezvous, so the others wait for the leader. An array runs
        at most one job per core at the same time.
        """
        startable = self._list_startable()
        for node in startable:
            node.attempt = self.attempt if self._is_gang else node.attempt + 1
            self.attempt = max(self.attempt, node.attempt)
            log = build_log_path(self._logs, node.attempt, node.index)
            log.parent.mkdir(parents=True, exist_ok=True)
            command = self._commands[node.index]
            environment = {**self._environment, **command.environment}
            node.process = spawn(command.command, log, new_session=True, env=environment)
            node.state, node.exit_code = "running", None
            self._report_node(node, "started")
        if self._is_gang and self._list_nodes("pending"):
            if startable:
                self._set_state("starting", "the other nodes wait for the rendezvous of node 0")
        elif self.state != "running":
            self._set_state("running", f"attempt {self.attempt} runs")

    def _list_startable(self) -> list[_Node]:
        pending = self._list_nodes("pending")
        if not self._is_gang:
            return pending[: max(0, available_cores() - len(self._list_nodes("running")))]
        if pending and pending[0].index == 0:
            return pending[:1]
        if self._nodes[0].state == "running" and self._uses_port() and not is_listening(self._port):
            return []
        return pending

    def _uses_port(self) -> bool:
        """Return whether a node variable names the leader's port."""
        port = str(self._port)
        values = self._commands[-1].environment.values()
        return any(value == port or value.endswith(f":{port}") for value in values)

    def _list_nodes(self, *states: JobState) -> list[_Node]:
        return [node for node in self._nodes if node.state in states]

    def _collect_exits(self, state: JobState) -> list[_Node]:
        """Return the nodes that have ended since the last call; failed ones get a state."""
        ended_nodes = [node for node in self._list_nodes("running") if node.poll() is not None]
        for node in ended_nodes:
            node.exit_code = node.poll()
            node.state = state if node.exit_code else "succeeded"
            self._report_node(node, f"ended with exit code {node.exit_code}")
        return ended_nodes

    def _restart_jobs(self, lost: list[_Node]) -> None:
        """Restart lost array jobs that have attempts left."""
        for node in lost:
            if node.attempt < self._job.max_attempts:
                self._set_pending([node])

    def _set_pending(self, lost: list[_Node]) -> None:
        """Let lost nodes start again, and set the job state."""
        is_preempted = all(node.exit_code == PreemptedError.exit_code for node in lost)
        names = ", ".join(str(node.index) for node in lost)
        state: JobState = "preempted" if is_preempted else "restarting"
        self._set_state(state, f"node {names} is lost; it starts again")
        for node in lost:
            node.state = "pending"

    def _stop_nodes(self, state: JobState) -> None:
        """Send SIGTERM to the nodes, and kill those that exceed the grace period."""
        for node in self._list_nodes("running"):
            node.terminate()
        deadline = time.monotonic() + find_grace_seconds(self._job)
        while self._list_nodes("running") and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._collect_exits(state)
        for node in self._list_nodes("running"):
            node.kill()
        self._collect_exits(state)

    def _set_state(self, state: JobState, message: str, **fields: int | None) -> None:
        self.state = state
        self._on_event(message, state=state, attempt=self.attempt, **fields)

    def _report_node(self, node: _Node, change: str) -> None:
        self._on_event(
            f"node {node.index} {change}",
            node=node.index,
            node_state=node.state,
            attempt=node.attempt,
            exit_code=node.exit_code,
            pid=node.process.pid if node.process else None,
        )


def _describe_failure(node: _Node, reason: str) -> JobEnd:
    message = f"node {node.index} ended with exit code {node.exit_code}; {reason}"
    return JobEnd(message, "failed", node.exit_code, node.index)


def find_grace_seconds(job: JobSpec) -> float:
    """Return the time from SIGTERM to SIGKILL, with a server's drain."""
    return GRACE_SECONDS + (0.0 if job.server is None else job.server.drain_seconds)


def build_log_path(logs: Path, attempt: int, node: int) -> Path:
    return logs / f"attempt-{attempt}" / f"node-{node}.log"
