"""Which machines a run has, which attempt comes next, and what ended one on several of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from regauge.errors import SettingsError
from regauge.processes import Seats
from regauge.supervision.failures import Failure
from regauge.supervision.nodes import attempt_registry as registers
from regauge.supervision.nodes.attempt_registry import OverError, Register
from regauge.supervision.nodes.coordinator import Council, Node
from regauge.supervision.nodes.heartbeats import Ear, beat
from regauge.supervision.nodes.interface import Shared
from regauge.supervision.nodes.topology import several, starts
from regauge.supervision.settings import Nodes, limits

FOLDER = Path("out/run")
OPERATOR = {
    "PET_NNODES": "2:4",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
    "PET_RDZV_ID": "job",
}


@pytest.mark.parametrize(
    ("count", "found"), [(1, (1, 1)), ("3", (3, 3)), ("2:4", (2, 4)), ("1:1", (1, 1))]
)
def test_how_many(count: int | str, found: tuple[int, int]) -> None:
    assert limits(count) == found
    assert Nodes(count=count).count == count


@pytest.mark.parametrize("count", ["", "0", "4:2", "a", "2:", "1:2:3", -1, "0:2"])
def test_what_is_no_number_of_nodes(count: int | str) -> None:
    with pytest.raises(ValueError, match="is no number of nodes"):
        limits(count)


def test_one_machine_meets_nobody() -> None:
    assert several(Nodes(), FOLDER, {}) is None
    assert several(Nodes(), FOLDER, {"PET_NNODES": "1"}) is None


def test_what_an_operator_says_is_taken() -> None:
    found = several(Nodes(), FOLDER, OPERATOR)
    assert found is not None
    assert (found.fewest, found.most, found.kind, found.name) == (2, 4, "c10d", "job")
    assert found.endpoint == "job-worker-0:23456"


def test_the_run_file_comes_first() -> None:
    nodes = Nodes(count=3, rendezvous="etcd", endpoint="[::1]")
    found = several(nodes, FOLDER, OPERATOR)
    assert found is not None
    assert (found.fewest, found.most, found.kind) == (3, 3, "etcd")
    assert (found.host, found.port, found.endpoint) == ("::1", 2379, "[::1]:2379")


@pytest.mark.parametrize(
    ("host", "here"), [("127.0.0.1", True), ("127.0.0.9", False), ("localhost", True)]
)
def test_who_has_the_address_of_the_meeting_place_keeps_it(host: str, *, here: bool) -> None:
    """By the address itself: what the machine's name leads to may be another one."""
    found = several(Nodes(count=2, endpoint=f"{host}:29400"), FOLDER, {})
    assert found is not None
    assert found.is_here() == here


def test_a_step_of_slurm_meets_at_its_first_node() -> None:
    slurm = {
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }
    found = several(Nodes(count=2), FOLDER, slurm)
    assert found is not None
    assert found.host == "gpu07"
    assert starts(Nodes(count=2), slurm)
    assert not starts(Nodes(), slurm)
    assert not starts(Nodes(count=2), {"LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("nodes", "environment", "said"),
    [
        (Nodes(count=2), {}, "says not where the nodes meet"),
        (Nodes(count=2, endpoint="a:b"), {}, "is no host:port"),
        (Nodes(), {"PET_NNODES": "many"}, "PET_NNODES"),
        (Nodes(), {**OPERATOR, "PET_RDZV_BACKEND": "zeus"}, "'zeus' is no meeting place"),
    ],
)
def test_what_cannot_be_met_is_one_line(
    nodes: Nodes, environment: dict[str, str], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        several(nodes, FOLDER, environment)


# The record


class Place:
    """A record that knows who changed it, as those of torch do."""

    name = "memory"

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.changes = 0
        self.before_a_change: list[dict[str, Any]] = []
        """What others write just before this node does."""

    def get_state(self) -> tuple[bytes, int] | None:
        return None if self.state is None else (self.state, self.changes)

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool]:
        if self.before_a_change:
            self.state = json.dumps(self.before_a_change.pop()).encode()
            self.changes += 1
        mine = token == (self.changes or None)
        if mine:
            self.state, self.changes = state, self.changes + 1
        assert self.state is not None
        return self.state, self.changes, mine

    @property
    def document(self) -> dict[str, Any]:
        assert self.state is not None
        found: dict[str, Any] = json.loads(self.state)
        return found


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(registers, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(registers, "POLL_SECONDS", 0.01)
    return Place()


def test_the_first_node_begins_after_the_attempts_of_the_folder(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 6}\n')
    assert Register(place, tmp_path).choose(None) == 7
    assert place.document == {"attempt": 7, "beat": 0}


def test_a_record_that_nobody_keeps_fresh_is_left_behind(place: Place, tmp_path: Path) -> None:
    Register(place, tmp_path).choose(None)
    assert Register(place, tmp_path).choose(None) == 2


def test_one_that_comes_a_moment_later_begins_the_same_attempt(
    place: Place, tmp_path: Path
) -> None:
    """While it finds out that nobody is left of the last one, the first has begun another."""
    Register(place, tmp_path).choose(None)
    first, seen = Register(place, tmp_path), {"attempt": 2, "beat": 0}

    class Later(Register):
        reads = 0

        def _read(self) -> tuple[dict[str, Any], Any]:
            nonlocal seen
            found = super()._read()
            self.reads += 1
            if self.reads == 3:
                assert first._write(seen, found[1])
            elif self.reads > 3:
                seen = first.beat(2, seen)
            return found

    assert Later(place, tmp_path).choose(None) == 2
    assert place.document["attempt"] == 2


def test_nodes_that_live_are_joined(place: Place, tmp_path: Path) -> None:
    first = Register(place, tmp_path)
    first.choose(None)
    seen = first.beat(1, {})

    class Busy(Register):
        def _read(self) -> tuple[dict[str, Any], Any]:
            nonlocal seen
            seen = first.beat(1, seen)
            return super()._read()

    assert Busy(place, tmp_path).choose(None) == 1


def test_two_nodes_never_begin_two_attempts(place: Place, tmp_path: Path) -> None:
    place.before_a_change = [{"attempt": 1, "beat": 3}]
    own = Register(place, tmp_path)
    assert own.choose(0) == 1
    assert place.document == {"attempt": 1, "beat": 3}


def test_after_an_attempt_comes_the_next(place: Place, tmp_path: Path) -> None:
    first, second = (Register(place, tmp_path) for _ in range(2))
    first.choose(None)
    assert first.choose(1) == 2
    assert second.choose(1) == 2


def test_who_waited_hears_how_the_run_ended(place: Place, tmp_path: Path) -> None:
    own = Register(place, tmp_path)
    own.choose(None)
    own.over(66, "it failed three times")
    with pytest.raises(OverError) as told:
        own.choose(1)
    assert (told.value.code, told.value.line) == (66, "it failed three times")
    assert own.beat(1, place.document) == place.document, "an ended run is not kept fresh"
    assert Register(place, tmp_path).choose(None) == 2, "a new start is a new run of attempts"


def test_a_beat_is_one_change_for_all(place: Place, tmp_path: Path) -> None:
    own = Register(place, tmp_path)
    own.choose(None)
    seen = own.beat(1, {})
    seen = own.beat(1, seen)
    assert seen["beat"] == 1
    place.state = json.dumps({**seen, "beat": 5}).encode()
    assert own.beat(1, seen)["beat"] == 5, "another node did it"


# What ended an attempt


def failed(kind: str, rank: int, **evidence: Any) -> Failure:
    return Failure(kind, rank, 3, f"{kind} in {rank}", evidence=evidence)


@pytest.fixture
def council() -> Iterator[Callable[..., list[Failure | None]]]:
    """Return a function from what each node has to what each of them makes of it in the end.

    `...` is a node that is lost.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ears: list[Ear] = []

    def client() -> TCPStore:
        return TCPStore("127.0.0.1", server.port)

    def settled(*found: Any, told: tuple[int, ...] = (), waiting: int = 0) -> list[Failure | None]:
        members = [Node(f"host-{n}", "127.0.0.1", 2, {}) for n in range(len(found))]
        shared = Shared(1, "token", preflight=False, seats=Seats(2 * len(found), 1))
        for node in range(len(found)):
            server.set(beat(node), "[0, 0]")

        def node(number: int) -> Failure | None:
            ear = Ear(client(), number, len(found), lambda: waiting)
            ears.append(ear)
            ear.start()
            one = Council(client(), number, members, ear, shared=shared, lost=1.0)
            until = time.monotonic() + 10
            while waiting and not one.leaving() and time.monotonic() < until:
                time.sleep(0.01)
            return one.settle(found[number], told=number in told)

        alive = [number for number, each in enumerate(found) if each is not ...]
        with ThreadPoolExecutor(len(alive)) as pool:
            return list(pool.map(node, alive))

    yield settled
    for ear in ears:
        ear.stop()


def test_all_nodes_finish_together(council: Callable[..., list[Failure | None]]) -> None:
    assert council(None, None, None) == [None, None, None]


@pytest.mark.parametrize(
    ("found", "kind", "rank"),
    [
        ((failed("network", 0), failed("process", 3)), "process", 3),
        ((None, failed("user", 2)), "user", 2),
        ((failed("network", 1), None), "network", 1),
        ((failed("network", 1), ...), "node", 2),
        (
            (failed("hang", 0, standing=[1, 1, 9]), failed("hang", 3, standing=[0, 0, 4])),
            "hang",
            3,
        ),
        ((failed("limit", 0), failed("limit", 0)), "limit", 0),
    ],
)
def test_consequences_are_left_out(
    council: Callable[..., list[Failure | None]], found: tuple[Any, ...], kind: str, rank: int
) -> None:
    verdicts = council(*found)
    assert len({json.dumps(verdict.document()) for verdict in verdicts if verdict}) == 1
    assert verdicts[0] is not None
    assert (verdicts[0].kind, verdicts[0].rank) == (kind, rank)


def test_who_was_told_to_stop_does_and_the_others_go_on(
    council: Callable[..., list[Failure | None]],
) -> None:
    first, second = council(failed("preempted", 0), failed("preempted", 2), told=(1,))
    assert first is not None
    assert second is not None
    assert (first.kind, first.problem) == ("node", "node 1 (host-1) was told to stop")
    assert first.policy.retried
    assert second.kind == "preempted"


def test_another_size_is_no_failure(council: Callable[..., list[Failure | None]]) -> None:
    verdicts = council(failed("preempted", 0), failed("preempted", 2), waiting=1)
    assert [verdict.kind for verdict in verdicts if verdict] == ["resized", "resized"]


def test_without_the_first_node_there_is_no_verdict(
    council: Callable[..., list[Failure | None]],
) -> None:
    (found,) = council(..., failed("network", 3))
    assert found is not None
    assert (found.kind, found.rank, found.host) == ("node", 0, "host-0")
