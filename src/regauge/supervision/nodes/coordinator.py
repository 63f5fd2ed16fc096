"""Coordinates the nodes in one attempt through a store served by node 0, the leader.

    node/<n>      a node's host, process count and settings
    plan          the leader's plan for all nodes
    ready/<n>     empty if a node can follow the plan, otherwise the problem
    beat/<n>      heartbeats of a node and its processes
    alarm         processes on some node have failed or hang
    resize        another node waits: save, and restart with it
    report/<n>    how the attempt ended on a node
    verdict       how the attempt ended for all nodes, decided by the leader

Any torch.distributed store will do; this module does not import torch.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from regauge.config import describe_first_difference
from regauge.supervision.failures import Failure, parse_failure
from regauge.supervision.nodes.heartbeats import STORE_ERRORS, HeartbeatThread, beat_key
from regauge.supervision.nodes.interface import AttemptPlan, NodeGroup
from regauge.system import timing
from regauge.system.errors import SettingsError
from regauge.system.processes import RankLayout, find_free_port
from regauge.system.timing import POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

LEAVE_SECONDS = 3.0
"""Maximum time the leader serves the store until all nodes have read the verdict."""


@dataclass(frozen=True)
class Node:
    """One node in an attempt."""

    host: str
    address: str
    size: int
    """Number of processes."""
    settings: dict[str, Any]
    """Run settings, without those allowed to differ between nodes."""


@dataclass(frozen=True)
class NodeReport:
    """How an attempt ended on a node."""

    node: int
    order: int
    """Position among all reports, by time."""
    failure: Failure | None
    is_stop_requested: bool
    """Whether a signal stopped the node."""


class Coordinator(NodeGroup):
    """Node group for an attempt on several nodes."""

    def __init__(
        self,
        store: Store,
        node: int,
        members: list[Node],
        heartbeats: HeartbeatThread,
        *,
        plan: AttemptPlan,
        node_timeout_seconds: float,
    ) -> None:
        super().__init__(plan, num_nodes=len(members), is_leader=node == 0)
        self._store, self._node, self._members = store, node, members
        self._heartbeats = heartbeats
        self._node_timeout_seconds = node_timeout_seconds

    def publish_beats(self, count_beats: Callable[[], int]) -> None:
        self._heartbeats.count_beats = count_beats

    def find_alarm(self) -> str | None:
        is_node_lost = bool(self._find_lost_nodes()) if self.is_leader else self._is_leader_lost()
        return self._heartbeats.alarm or ("failed" if is_node_lost else None)

    def is_resizing(self) -> bool:
        return self._heartbeats.is_resizing

    def remote_silence(self) -> float:
        return time.monotonic() - self._heartbeats.last_remote_beat

    def agree_on_failure(
        self, failure: Failure | None, *, is_stop_requested: bool
    ) -> Failure | None:
        """Return what ended the attempt; the leader decides from all reports."""
        try:
            if self._is_leader_lost():
                verdict: Failure | None = self._describe_lost_node(0)
            else:
                verdict = self._exchange_verdict(failure, is_stop_requested=is_stop_requested)
        except STORE_ERRORS:
            verdict = self._describe_lost_node(0)
        finally:
            self._heartbeats.stop()
        if verdict is not None and verdict.kind == "preempted" and not is_stop_requested:
            nodes = verdict.evidence.get("stopped_nodes", [])
            names = ", ".join(_format_node(node, self._members) for node in nodes)
            problem = f"{names or 'a process'} was stopped by a signal"
            return replace(verdict, kind="node", problem=problem)
        return verdict

    def _exchange_verdict(
        self, failure: Failure | None, *, is_stop_requested: bool
    ) -> Failure | None:
        """Write this node's report, and return the leader's verdict."""
        report = {
            "order": self._store.add("order", 1),
            "failure": failure.document() if failure else None,
            "is_stop_requested": is_stop_requested,
        }
        self._store.set(f"report/{self._node}", json.dumps(report))
        if failure is not None and not failure.ends_all_ranks:
            self._raise_alarm("hang" if "progress_key" in failure.evidence else "failed")
        if self.is_leader:
            verdict = self._decide()
            self._store.set("verdict", json.dumps(verdict.document() if verdict else None))
        timing.wait_for(
            lambda: self._store.check(["verdict"]) or self._is_leader_lost(),
        )
        if not self._store.check(["verdict"]):
            return self._describe_lost_node(0)
        document = json.loads(self._store.get("verdict"))
        self._leave()
        return parse_failure(document) if document else None

    def _raise_alarm(self, kind: str) -> None:
        if not self._store.check(["alarm"]):
            self._store.set("alarm", kind)

    def _leave(self) -> None:
        """Count this node as gone; the leader serves the store until all nodes are gone."""
        self._store.add("left", 1)
        if self.is_leader:
            timing.wait_for(self._have_all_left, LEAVE_SECONDS)

    def _have_all_left(self) -> bool:
        """Return whether all nodes but the lost ones have read the verdict."""
        num_present = self.num_nodes - len(self._find_lost_nodes())
        return self._store.add("left", 0) >= num_present

    def _decide(self) -> Failure | None:
        """Wait until every node has reported or is lost; return what ended the attempt."""
        reports: list[NodeReport] = []
        while len(reports) < self.num_nodes:
            reports = self._read_reports()
            missing = set(range(self.num_nodes)) - {report.node for report in reports}
            lost = missing & self._find_lost_nodes()
            if lost:
                self._raise_alarm("failed")
            if missing == lost:
                return self._find_cause(reports, lost)
            time.sleep(POLL_SECONDS)
        return self._find_cause(reports, set())

    def _read_reports(self) -> list[NodeReport]:
        """Return the reports so far, earliest first."""
        reports = []
        for node in range(self.num_nodes):
            if self._store.check([f"report/{node}"]):
                report = json.loads(self._store.get(f"report/{node}"))
                document = report["failure"]
                failure = parse_failure(document) if document else None
                is_stop_requested = report["is_stop_requested"]
                reports.append(NodeReport(node, report["order"], failure, is_stop_requested))
        return sorted(reports, key=lambda report: report.order)

    def _find_cause(self, reports: list[NodeReport], lost: set[int]) -> Failure | None:
        """Return the failure that caused the others.

        In this order: the hang with the least progress, a lost node, the earliest failure other
        than a network error, the earliest failure.
        """
        failures = [report.failure for report in reports if report.failure]
        separate = [failure for failure in failures if not failure.ends_all_ranks]
        hangs = [failure for failure in separate if "progress_key" in failure.evidence]
        if hangs:
            return min(hangs, key=lambda failure: failure.evidence["progress_key"])
        if lost:
            return self._describe_lost_node(min(lost))
        causes = [failure for failure in separate if failure.kind != "network"]
        first = next(iter([*causes, *separate, *failures]), None)
        if first is None or first.kind != "preempted":
            return first
        stopped = [report.node for report in reports if report.is_stop_requested]
        if self._heartbeats.is_resizing and not stopped:
            return replace(first, kind="resized", problem="another node waits to join")
        return replace(first, evidence={**first.evidence, "stopped_nodes": stopped})

    def _find_lost_nodes(self) -> set[int]:
        return self._heartbeats.find_lost_nodes(self._node_timeout_seconds)

    def _is_leader_lost(self) -> bool:
        """Return whether the leader, and with it the store, is lost."""
        return self._heartbeats.is_store_lost or 0 in self._find_lost_nodes()

    def _describe_lost_node(self, node: int) -> Failure:
        rank = _count_processes(self._members[:node])
        problem = f"{_format_node(node, self._members)} is lost"
        return Failure("node", rank, 0, problem, host=self._members[node].host)


def _format_node(node: int, members: list[Node]) -> str:
    return f"node {node} ({members[node].host})"


def _count_processes(members: list[Node]) -> int:
    return sum(member.size for member in members)


def gather_nodes(store: Store, node: int, num_nodes: int, local: Node) -> list[Node]:
    """Return all nodes in an attempt; every node calls this with its own description.

    Raises SettingsError if a node was started with another run file.
    """
    store.set(beat_key(node), "[0, 0]")
    store.set(f"node/{node}", json.dumps(asdict(local)))
    documents = store.multi_get([f"node/{number}" for number in range(num_nodes)])
    store.multi_get([beat_key(number) for number in range(num_nodes)])
    members = [Node(**json.loads(document)) for document in documents]
    first = members[0]
    for number, member in enumerate(members):
        if member.settings != first.settings:
            difference = describe_first_difference("", member.settings, first.settings)
            raise SettingsError(
                f"{_format_node(number, members)} has other settings than "
                f"{_format_node(0, members)}: {difference}",
                "start the same command on every node",
            )
    return members


def publish_plan(
    store: Store, members: list[Node], attempt: int, token: str, *, needs_preflight: bool
) -> None:
    plan = {
        "attempt": attempt,
        "token": token,
        "needs_preflight": needs_preflight,
        "address": members[0].address,
        "port": find_free_port(),
    }
    store.set("plan", json.dumps(plan))


def publish_refusal(store: Store, problem: str) -> None:
    """Publish why the leader cannot begin the attempt."""
    store.set("plan", json.dumps({"error": problem}))


def read_plan(store: Store, node: int, members: list[Node]) -> AttemptPlan:
    """Return the leader's plan for a node; raises SettingsError if the leader refused to begin."""
    plan = json.loads(store.get("plan"))
    if "error" in plan:
        raise SettingsError(
            f"{_format_node(0, members)}: {plan['error']}", "see the log of that node"
        )
    layout = RankLayout(
        first_rank=_count_processes(members[:node]),
        world_size=_count_processes(members),
        address=plan["address"],
        port=plan["port"],
    )
    return AttemptPlan(plan["attempt"], plan["token"], plan["needs_preflight"], layout)


def check_all_ready(store: Store, node: int, members: list[Node], problem: str) -> None:
    """Publish this node's problem, if any; raises SettingsError on all nodes if one has any."""
    store.set(f"ready/{node}", problem)
    problems = store.multi_get([f"ready/{number}" for number in range(len(members))])
    for number, text in enumerate(problems):
        if text:
            raise SettingsError(
                f"{_format_node(number, members)}: {text.decode()}", "see the log of that node"
            )
