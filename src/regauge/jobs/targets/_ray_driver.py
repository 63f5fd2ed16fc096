"""Runs a Ray job's nodes: one actor per node, all restarted together after a failure.

This module is the job's entrypoint, so it survives the command that submitted it. It prints one
line per event, and every node's output with the attempt and node number:

    [event] {"time": "…", "state": "running", "attempt": 1, "hosts": ["10.0.0.4", "10.0.0.5"]}
    [1/0] step 10  loss 6.91

`regauge.jobs.targets.ray` reads these lines from the job log.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regauge.jobs.targets import LeaderAddress
from regauge.jobs.targets._nodes import build_leader_variables
from regauge.jobs.targets._ray_node import NodeActor
from regauge.jobs.targets._times import format_now
from regauge.system.errors import (
    FIRST_SIGNAL_CODE,
    RESTART_CODES,
    LimitReachedError,
    TransientError,
)
from regauge.system.timing import REMOTE_POLL_SECONDS
from regauge.system.units import SECONDS_PER_HOUR

START_SECONDS = 300.0
"""Time limit for the first call to a node, which starts a process there."""
CALL_SECONDS = 5.0
"""Time limit for a call to a node; a longer one counts as no answer."""
LOST_SECONDS = 10.0
"""Silence after which a node is lost, if Ray does not report its loss earlier."""
FOLLOW_SECONDS = 10.0
"""Time for the other nodes to end by themselves after one of them failed."""
LOST = TransientError.exit_code
"""Exit code for an attempt that lost a node."""
BUILT_IN = ("CPU", "GPU")
"""Resources with their own Ray parameters."""
EVENT_PREFIX = "[event] "
_LINE = re.compile(r"\[(\d+)/(\d+)\] (.*)", re.DOTALL)


class NodeLine(NamedTuple):
    attempt: int
    node: int
    text: str


def format_event(document: dict[str, Any]) -> str:
    return EVENT_PREFIX + json.dumps(document)


def format_line(attempt: int, node: int, text: str) -> str:
    return f"[{attempt}/{node}] {text}"


def read_events(log: str) -> list[dict[str, Any]]:
    """Return a log's events, oldest first; damaged lines are skipped."""
    events = []
    for line in log.splitlines():
        if line.startswith(EVENT_PREFIX):
            try:
                document = json.loads(line.removeprefix(EVENT_PREFIX))
            except ValueError:
                continue
            if isinstance(document, dict):
                events.append(document)
    return events


def read_lines(log: str) -> Iterator[NodeLine]:
    for line in log.splitlines():
        if match := _LINE.fullmatch(line):
            yield NodeLine(int(match[1]), int(match[2]), match[3])


class DriverOptions(argparse.Namespace):
    name: str
    nodes: int
    """Node count; 0 if the command itself uses the cluster."""
    resources: Mapping[str, float]
    """Resources per node, by their names in Ray."""
    strategy: str
    max_attempts: int
    grace_seconds: float
    hours: float | None
    secrets: Mapping[str, str]
    """Environment variable -> secret file reference."""
    command: tuple[str, ...]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> DriverOptions:
        parser = argparse.ArgumentParser(prog="regauge.jobs.targets._ray_driver")
        parser.add_argument("--name", required=True)
        parser.add_argument("--nodes", type=int, default=1)
        parser.add_argument("--resources", type=json.loads, default={})
        parser.add_argument("--strategy", default="STRICT_SPREAD")
        parser.add_argument("--max-attempts", type=int, default=1)
        parser.add_argument("--grace-seconds", type=float, default=60.0)
        parser.add_argument("--hours", type=float)
        parser.add_argument("--secret", action="append", default=[], dest="secrets")
        parser.add_argument("command", nargs=argparse.REMAINDER)
        options = parser.parse_args(arguments, cls())
        options.secrets = dict(text.split("=", 1) for text in options.secrets)
        words = tuple(options.command)
        options.command = words[1:] if words[:1] == ("--",) else words
        return options


@dataclass
class _Node:
    index: int
    process: Any
    is_actor: bool
    code: int | None = None
    """Exit code; None while the command runs."""
    is_lost: bool = False
    answered_at: float = field(default_factory=time.monotonic)
    """Monotonic time of the last answer, in seconds."""
    pending: Any = None
    """Reference to the answer for a poll that timed out."""

    @property
    def is_running(self) -> bool:
        return self.code is None and not self.is_lost

    def call(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a method; raises RayError if the node does not answer."""
        function = getattr(self.process, method)
        if not self.is_actor:
            return function(*arguments)
        import ray

        return ray.get(function.remote(*arguments), timeout=seconds)

    def poll(self) -> tuple[list[str], int | None]:
        """Return the new lines and the exit code; raises RayError if the node does not answer."""
        if not self.is_actor:
            lines, code = self.process.poll()
            return lines, code
        import ray

        request = self.process.poll.remote() if self.pending is None else self.pending
        self.pending = None
        try:
            lines, code = ray.get(request, timeout=CALL_SECONDS)
        except ray.exceptions.GetTimeoutError:
            self.pending = request  # it holds lines that no other answer has
            raise
        return lines, code


class Driver:
    """Runs attempts until one decides how the job ends."""

    def __init__(self, options: DriverOptions) -> None:
        self._options = options
        self._attempt = 0
        self._is_stopped = False
        seconds = None if options.hours is None else options.hours * SECONDS_PER_HOUR
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def stop(self, *_: object) -> None:
        """Stop the nodes, then the job. This is a signal handler."""
        self._is_stopped = True

    def run(self) -> int:
        """Run attempts; return the job's exit code."""
        while True:
            self._attempt += 1
            code = self._run_attempt()
            if self._is_late() and code:
                self._record("stopping", f"the time limit of {self._options.hours:g} h is reached")
                return LimitReachedError.exit_code
            is_final = code not in RESTART_CODES or self._attempt >= self._options.max_attempts
            if is_final or self._is_stopped:
                return code
            remaining = self._options.max_attempts - self._attempt
            message = f"exit code {code} allows another attempt; {remaining} left"
            self._record("restarting", message)

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _record(self, state: str, message: str, **values: Any) -> None:
        document = {"time": format_now(), "state": state, "attempt": self._attempt, **values}
        _write_line(format_event({**document, "message": message}))

    def _run_attempt(self) -> int:
        options = self._options
        with self._open_nodes() as nodes:
            if nodes is None:
                return FIRST_SIGNAL_CODE + signal.SIGTERM
            variables: dict[str, str] = {}
            hosts = ["driver"]
            try:
                if options.nodes:
                    addresses = [node.call("find_address", seconds=START_SECONDS) for node in nodes]
                    hosts = [host for host, _ in addresses]
                    run_id = f"{options.name}-{self._attempt}"
                    leader = LeaderAddress(addresses[0][0], addresses[0][1], run_id)
                    variables = build_leader_variables(str(options.nodes), leader)
                for node in nodes:
                    node.call("start", options.command, variables, dict(options.secrets))
            except _list_loss_errors() as error:
                self._record("running", f"a node was lost before its command started: {error!r}")
                return LOST
            self._record("running", f"{len(nodes)} nodes on {', '.join(hosts)}", hosts=hosts)
            return self._watch(nodes)

    @contextmanager
    def _open_nodes(self) -> Iterator[list[_Node] | None]:
        """Yield an attempt's nodes; None if the job is stopped before they are available."""
        options = self._options
        if not options.nodes:
            yield [_Node(0, NodeActor(), is_actor=False)]
            return
        import ray
        from ray.util import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        demand = f"{options.nodes} x {json.dumps(options.resources)} ({options.strategy})"
        self._record("starting", f"waiting for {demand}")
        group = placement_group([dict(options.resources)] * options.nodes, options.strategy)
        try:
            ready = group.ready()
            while not ray.wait([ready], timeout=REMOTE_POLL_SECONDS)[0]:
                if self._is_stopped or self._is_late():
                    yield None
                    return
            custom = {key: value for key, value in options.resources.items() if key not in BUILT_IN}
            nodes = []
            for index in range(options.nodes):
                strategy = PlacementGroupSchedulingStrategy(group, index)
                actor = ray.remote(NodeActor).options(
                    num_cpus=options.resources.get("CPU", 0),
                    num_gpus=options.resources.get("GPU", 0),
                    resources=custom,
                    scheduling_strategy=strategy,
                    max_restarts=0,
                )
                nodes.append(_Node(index, actor.remote(), is_actor=True))
            yield nodes
        finally:
            remove_placement_group(group)

    def _watch(self, nodes: list[_Node]) -> int:
        """Print the nodes' output until all have ended; return the attempt's exit code."""
        stop_at = kill_at = None
        while any(node.is_running for node in nodes):
            for node in nodes:
                if node.is_running:
                    self._poll(node)
            now = time.monotonic()
            if kill_at is None:
                stop_at = min(
                    filter(None, (stop_at, self._find_stop_time(nodes, now))), default=None
                )
                if stop_at is not None and now >= stop_at:
                    _signal_nodes(nodes, signal.SIGTERM)
                    kill_at = now + self._options.grace_seconds
            elif now >= kill_at:
                _signal_nodes(nodes, signal.SIGKILL)
            time.sleep(REMOTE_POLL_SECONDS)
        return find_attempt_code([None if node.is_lost else node.code for node in nodes])

    def _find_stop_time(self, nodes: list[_Node], now: float) -> float | None:
        """Return when the remaining nodes must stop; None if they may continue."""
        if self._is_stopped or self._is_late() or any(node.is_lost for node in nodes):
            return now
        return now + FOLLOW_SECONDS if any(node.code for node in nodes) else None

    def _poll(self, node: _Node) -> None:
        """Print a node's new lines; record its end or loss."""
        try:
            lines, node.code = node.poll()
            node.answered_at = time.monotonic()
        except _list_loss_errors() as error:
            is_silent = time.monotonic() - node.answered_at >= LOST_SECONDS
            if _is_dead(error) or is_silent:
                node.is_lost = True
                self._record("running", f"node {node.index} was lost", node=node.index)
            return
        for line in lines:
            _write_line(format_line(self._attempt, node.index, line))
        if node.code is not None:
            message = f"node {node.index} ended with exit code {node.code}"
            self._record("running", message, node=node.index, exit_code=node.code)


def find_attempt_code(codes: Sequence[int | None]) -> int:
    """Return an attempt's exit code from its nodes' codes; None is a lost node.

    A code that forbids a restart decides. Otherwise a loss does, because it caused the others.
    """
    failures = [code for code in codes if code]
    final = [code for code in failures if code not in RESTART_CODES]
    if None in codes:
        return LOST
    return next(iter(final or failures), 0)


def _signal_nodes(nodes: list[_Node], number: int) -> None:
    for node in nodes:
        if node.is_running:
            try:
                node.call("stop", number)
            except _list_loss_errors():
                continue  # the next poll decides whether it is lost


def _list_loss_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions raised by calls to a lost or unresponsive node."""
    ray = sys.modules.get("ray")
    return () if ray is None else (ray.exceptions.RayError, TimeoutError)


def _is_dead(error: Exception) -> bool:
    """Return whether Ray reports that an actor has ended, rather than only being unreachable."""
    from ray.exceptions import ActorDiedError

    return isinstance(error, ActorDiedError)


def _write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line's job; return the exit code."""
    options = DriverOptions.parse(sys.argv[1:] if arguments is None else arguments)
    driver = Driver(options)
    if options.nodes:
        import ray

        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, driver.stop)
    return driver.run()


if __name__ == "__main__":
    sys.exit(main())
