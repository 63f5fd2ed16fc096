"""What the nodes of one attempt tell each other, in a store that the first of them keeps.

    node/<n>      its host, its processes, its settings
    orders        what the first node decided for all
    ready/<n>     whether a node can follow them
    beat/<n>      signs of life: of the node, and of its processes
    alarm         processes of a node have failed, or hang
    leave         another node waits: save, and begin again with it
    report/<n>    how the attempt ended for the processes of a node
    verdict       how it ended for all, by the first node

The store is any of torch.distributed; nothing of torch is imported here.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from regauge import timing
from regauge.config import first_difference
from regauge.errors import SettingsError
from regauge.processes import Seats, free_port
from regauge.supervision.failures import Failure, failure_of
from regauge.supervision.nodes.heartbeats import STORE_ERRORS, Ear, beat
from regauge.supervision.nodes.interface import Alone, Shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

POLL_SECONDS = 0.05
LEAVING_SECONDS = 3.0
"""How long the first node waits until the others have read its verdict."""


@dataclass(frozen=True)
class Node:
    """One machine of an attempt."""

    host: str
    address: str
    size: int
    """Processes there."""
    settings: dict[str, Any]
    """Those of the run, without what may differ between machines."""


@dataclass(frozen=True)
class Told:
    """How an attempt ended for the processes of a node."""

    node: int
    order: int
    """How many nodes had reported before."""
    failure: Failure | None
    told: bool
    """Whether a signal told the node to stop."""


class Council(Alone):
    """The nodes of an attempt, as each of them knows it."""

    def __init__(
        self, store: Store, node: int, members: list[Node], ear: Ear, *, shared: Shared, lost: float
    ) -> None:
        super().__init__(shared, leads=node == 0)
        self.nodes = len(members)
        self._store, self._node, self._members, self._ear = store, node, members, ear
        self._lost_seconds = lost

    def listen(self, signs: Callable[[], int]) -> None:
        """Tell the others how many signs the processes of this node gave, from now on."""
        self._ear.signs = signs

    def alarm(self) -> str | None:
        """Return how another node's processes ended the attempt: `failed`, `hang`, or None."""
        lost = self._ear.lost(self._lost_seconds) if self.leads else self._without_first()
        return self._ear.alarm or ("failed" if lost else None)

    def leaving(self) -> bool:
        """Return whether all shall save and begin again, with another number of nodes."""
        return self._ear.leaving

    def quiet_seconds(self) -> float:
        """Return for how long the other nodes' processes gave no sign."""
        return time.monotonic() - self._ear.moved

    def settle(self, failure: Failure | None, *, told: bool) -> Failure | None:
        """Return what ended the attempt, from what did so on each node; the first one decides."""
        try:
            verdict = self._gone(0) if self._without_first() else self._verdict(failure, told=told)
        except STORE_ERRORS:
            verdict = self._gone(0)
        finally:
            self._ear.stop()
        if verdict is not None and verdict.kind == "preempted" and not told:
            said = verdict.evidence.get("told", [])
            who = ", ".join(_name(node, self._members) for node in said)
            return replace(verdict, kind="node", problem=f"{who or 'a process'} was told to stop")
        return verdict

    def _verdict(self, failure: Failure | None, *, told: bool) -> Failure | None:
        report = {
            "order": self._store.add("order", 1),
            "failure": failure.document() if failure else None,
            "told": told,
        }
        self._store.set(f"report/{self._node}", json.dumps(report))
        if failure is not None and not failure.together:
            self._raise("hang" if "standing" in failure.evidence else "failed")
        if self.leads:
            found = self._decided()
            self._store.set("verdict", json.dumps(found.document() if found else None))
        timing.wait_for(
            lambda: self._store.check(["verdict"]) or self._without_first(),
            poll_seconds=POLL_SECONDS,
        )
        if not self._store.check(["verdict"]):
            return self._gone(0)
        document = json.loads(self._store.get("verdict"))
        self._part()
        return failure_of(document) if document else None

    def _raise(self, kind: str) -> None:
        if not self._store.check(["alarm"]):
            self._store.set("alarm", kind)

    def _part(self) -> None:
        """Say that the verdict is read; the first node keeps the store until all have said so."""
        self._store.add("parted", 1)
        if self.leads:
            timing.wait_for(self._all_parted, LEAVING_SECONDS, poll_seconds=POLL_SECONDS)

    def _all_parted(self) -> bool:
        """Return whether every node that is not lost has read the verdict."""
        present = self.nodes - len(self._ear.lost(self._lost_seconds))
        return self._store.add("parted", 0) >= present

    def _decided(self) -> Failure | None:
        """Wait until every node has reported or is lost, and return what ended the attempt."""
        reports: list[Told] = []
        while len(reports) < self.nodes:
            reports = self._reports()
            missing = set(range(self.nodes)) - {report.node for report in reports}
            lost = missing & self._ear.lost(self._lost_seconds)
            if lost:
                self._raise("failed")
            if missing == lost:
                return self._cause(reports, lost)
            time.sleep(POLL_SECONDS)
        return self._cause(reports, set())

    def _reports(self) -> list[Told]:
        found = []
        for node in range(self.nodes):
            if self._store.check([f"report/{node}"]):
                report = json.loads(self._store.get(f"report/{node}"))
                told = report["failure"]
                failure = failure_of(told) if told else None
                found.append(Told(node, report["order"], failure, report["told"]))
        return sorted(found, key=lambda report: report.order)

    def _cause(self, reports: list[Told], lost: set[int]) -> Failure | None:
        """Return the failure that is no consequence of another one."""
        failures = [report.failure for report in reports if report.failure]
        alone = [failure for failure in failures if not failure.together]
        hangs = [failure for failure in alone if "standing" in failure.evidence]
        if hangs:
            return min(hangs, key=lambda failure: failure.evidence["standing"])
        if lost:
            return self._gone(min(lost))
        own = [failure for failure in alone if failure.kind != "network"]
        first = next(iter([*own, *alone, *failures]), None)
        if first is None or first.kind != "preempted":
            return first
        told = [report.node for report in reports if report.told]
        if self._ear.leaving and not told:
            return replace(first, kind="resized", problem="another node waits to come in")
        return replace(first, evidence={**first.evidence, "told": told})

    def _without_first(self) -> bool:
        """Return whether the first node is lost, and the store that it keeps."""
        return self._ear.gone or 0 in self._ear.lost(self._lost_seconds)

    def _gone(self, node: int) -> Failure:
        rank, problem = _processes(self._members[:node]), f"{_name(node, self._members)} is lost"
        return Failure("node", rank, 0, problem, host=self._members[node].host)


def _name(node: int, members: list[Node]) -> str:
    return f"node {node} ({members[node].host})"


def _processes(members: list[Node]) -> int:
    return sum(member.size for member in members)


def gather(store: Store, node: int, nodes: int, own: Node) -> list[Node]:
    """Return all nodes of an attempt once they have told of themselves.

    Raises SettingsError where one of them was started with another run file.
    """
    store.set(beat(node), "[0, 0]")
    store.set(f"node/{node}", json.dumps(asdict(own)))
    told = store.multi_get([f"node/{each}" for each in range(nodes)])
    store.multi_get([beat(each) for each in range(nodes)])
    members = [Node(**json.loads(one)) for one in told]
    first = members[0]
    for number, member in enumerate(members):
        if member.settings != first.settings:
            raise SettingsError(
                f"{_name(number, members)} was started with other settings than "
                f"{_name(0, members)}: {first_difference('', member.settings, first.settings)}",
                "start the same command on every node",
            )
    return members


def lead(store: Store, members: list[Node], attempt: int, token: str, *, preflight: bool) -> None:
    """Tell the others what the first node decided."""
    orders = {
        "attempt": attempt,
        "token": token,
        "preflight": preflight,
        "address": members[0].address,
        "port": free_port(),
    }
    store.set("orders", json.dumps(orders))


def refuse(store: Store, problem: str) -> None:
    """Tell the others why the attempt does not begin."""
    store.set("orders", json.dumps({"refused": problem}))


def follow(store: Store, node: int, members: list[Node]) -> Shared:
    """Return what the first node told; raises SettingsError where it refused to begin."""
    orders = json.loads(store.get("orders"))
    if "refused" in orders:
        raise SettingsError(f"{_name(0, members)}: {orders['refused']}", "see there")
    seats = Seats(
        first=_processes(members[:node]),
        size=_processes(members),
        address=orders["address"],
        port=orders["port"],
    )
    return Shared(orders["attempt"], orders["token"], orders["preflight"], seats)


def agree(store: Store, node: int, members: list[Node], problem: str) -> None:
    """Raise SettingsError on every node where one of them has a problem."""
    store.set(f"ready/{node}", problem)
    told = store.multi_get([f"ready/{each}" for each in range(len(members))])
    for number, said in enumerate(told):
        if said:
            raise SettingsError(f"{_name(number, members)}: {said.decode()}", "see there")
