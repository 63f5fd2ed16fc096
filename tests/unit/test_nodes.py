"""Runs on several nodes: their topology, the next attempt, and the failure that they agree on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from distributed.runs import settings
from regauge.commands._parts import train_plan
from regauge.supervision.failures import Failure
from regauge.supervision.nodes import attempt_registry
from regauge.supervision.nodes.attempt_registry import AttemptRegistry, RunEndedError
from regauge.supervision.nodes.aws_batch_variables import find_local_address
from regauge.supervision.nodes.coordinator import Coordinator, Node
from regauge.supervision.nodes.heartbeats import HeartbeatThread, beat_key
from regauge.supervision.nodes.interface import AttemptPlan
from regauge.supervision.nodes.rendezvous import RendezvousLauncher
from regauge.supervision.nodes.topology import is_whole_node, resolve_topology
from regauge.supervision.settings import Nodes, parse_node_range
from regauge.system import stop_signals
from regauge.system.errors import SettingsError
from regauge.system.processes import LAUNCHER_VARIABLES, RankLayout

FOLDER = Path("out/run")
OPERATOR = {
    "PET_NNODES": "2:4",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
    "PET_RDZV_ID": "job",
}


@pytest.mark.parametrize(
    ("count", "limits"), [(1, (1, 1)), ("3", (3, 3)), ("2:4", (2, 4)), ("1:1", (1, 1))]
)
def test_a_number_or_a_range_of_nodes_is_parsed(count: int | str, limits: tuple[int, int]) -> None:
    assert parse_node_range(count) == limits
    assert Nodes(count=count).count == count


@pytest.mark.parametrize("count", ["", "0", "4:2", "a", "2:", "1:2:3", -1, "0:2"])
def test_other_numbers_of_nodes_are_refused(count: int | str) -> None:
    with pytest.raises(ValueError, match="is not a number of nodes"):
        parse_node_range(count)


def test_a_single_node_has_no_topology() -> None:
    assert resolve_topology(Nodes(), FOLDER, {}) is None
    assert resolve_topology(Nodes(), FOLDER, {"PET_NNODES": "1"}) is None


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("127.0.0.9", False), ("localhost", True)]
)
def test_the_node_with_the_address_of_the_rendezvous_serves_it(
    host: str, *, is_local: bool
) -> None:
    """The address decides: the name of the machine may resolve to another one."""
    topology = resolve_topology(Nodes(count=2, endpoint=f"{host}:29400"), FOLDER, {})
    assert topology is not None
    assert topology.is_endpoint_local() == is_local


SLURM_STEP = {
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


BATCH = {
    "AWS_BATCH_JOB_ID": "0123#1",
    "AWS_BATCH_JOB_ATTEMPT": "2",
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
}
BATCH_MAIN = {
    name: value
    for name, value in (BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "0"}).items()
    if "ADDRESS" not in name
}


@pytest.mark.parametrize(
    ("nodes", "environment", "limits", "endpoint", "name"),
    [
        (Nodes(), OPERATOR, (2, 4), "job-worker-0:23456", "job"),
        (Nodes(count=2, endpoint="node-0:7"), BATCH, (2, 2), "node-0:7", "0123-2"),
        (Nodes(), BATCH, (4, 4), "10.0.0.7:29400", "0123-2"),
    ],
)
def test_the_nodes_meet_at_the_address_of_their_scheduler(
    nodes: Nodes, environment: dict[str, str], limits: tuple[int, int], endpoint: str, name: str
) -> None:
    topology = resolve_topology(nodes, FOLDER, environment)
    assert topology is not None
    assert (topology.min_nodes, topology.max_nodes, topology.backend) == (*limits, "c10d")
    assert (topology.endpoint, topology.name) == (endpoint, name)
    assert topology.replaces_nodes == (environment is not BATCH)


def test_the_run_file_overrides_the_operator() -> None:
    nodes = Nodes(count=3, rendezvous="etcd", endpoint="[::1]")
    topology = resolve_topology(nodes, FOLDER, OPERATOR)
    assert topology is not None
    assert (topology.min_nodes, topology.max_nodes, topology.backend) == (3, 3, "etcd")
    assert (topology.host, topology.port, topology.endpoint) == ("::1", 2379, "[::1]:2379")


def test_the_nodes_of_a_slurm_step_meet_at_the_first_one() -> None:
    topology = resolve_topology(Nodes(count=2), FOLDER, SLURM_STEP)
    assert topology is not None
    assert topology.host == "gpu07"
    assert is_whole_node(Nodes(count=2), SLURM_STEP)
    assert not is_whole_node(Nodes(), SLURM_STEP)
    assert not is_whole_node(Nodes(count=2), {"LOCAL_RANK": "0"})


def test_the_main_node_of_a_batch_job_uses_its_own_address() -> None:
    topology = resolve_topology(Nodes(), FOLDER, BATCH_MAIN | {"MASTER_PORT": "1234"})
    assert topology is not None
    assert topology.endpoint == f"{find_local_address()}:1234"
    assert topology.is_endpoint_local()
    assert topology.name == "0123-2"


def test_a_batch_job_of_one_node_has_no_topology() -> None:
    environment = {"AWS_BATCH_JOB_ID": "0123", "AWS_BATCH_JOB_ATTEMPT": "1"}
    assert resolve_topology(Nodes(), FOLDER, environment) is None
    topology = resolve_topology(Nodes(count=2, endpoint="a"), FOLDER, environment)
    assert topology is not None
    assert topology.replaces_nodes
    assert topology.name.startswith("run-")


@pytest.mark.parametrize(
    ("environment", "attempt", "seconds"),
    [(BATCH_MAIN, None, 600.0), (BATCH_MAIN, 1, 10.0), (OPERATOR, 1, 600.0)],
)
def test_nodes_wait_briefly_for_a_node_that_is_not_replaced(
    environment: dict[str, str], attempt: int | None, seconds: float
) -> None:
    nodes = Nodes(endpoint="127.0.0.1:29400")
    topology = resolve_topology(nodes, FOLDER, environment)
    assert topology is not None
    settings: Any = None
    launcher = RendezvousLauncher(topology, settings, FOLDER)
    launcher._previous_attempt = attempt
    assert launcher._find_join_seconds() == seconds


@pytest.mark.parametrize(
    ("backend", "host", "is_leader"),
    [("c10d", "127.0.0.1", True), ("c10d", "127.0.0.9", False), ("etcd", "127.0.0.9", True)],
)
def test_the_node_at_the_rendezvous_speaks_until_the_nodes_have_met(
    backend: Any, host: str, *, is_leader: bool
) -> None:
    nodes = Nodes(count=2, rendezvous=backend, endpoint=f"{host}:29400")
    topology = resolve_topology(nodes, FOLDER, {})
    assert topology is not None
    settings: Any = None
    assert RendezvousLauncher(topology, settings, FOLDER).is_leader == is_leader


@pytest.mark.parametrize(("count", "is_node"), [(2, True), (None, False)])
def test_the_checks_before_the_start_do_not_turn_a_node_into_a_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int | None, *, is_node: bool
) -> None:
    """`detect_world` sets the variables of a rank, so a node must not call it."""
    for name, value in SLURM_STEP.items():
        monkeypatch.setenv(name, value)
    for name in (*LAUNCHER_VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(train_plan.dry_run, "check_run", lambda _: [None])
    monkeypatch.setattr(train_plan.dry_run, "find_finished", lambda *_: None)
    monkeypatch.setattr(train_plan.dry_run, "warn_about_length", lambda *_: None)
    monkeypatch.setattr(train_plan, "_verify_datasets", lambda _: None)
    nodes = {"execution": {"nodes": {"count": count}}} if count else {}
    run = settings(tmp_path / "run", tmp_path / "data", "mlm", **nodes)
    train_plan.check_before_start(run)
    assert is_whole_node(run.execution.nodes) == is_node


@pytest.mark.parametrize(
    ("nodes", "environment", "problem"),
    [
        (Nodes(), {**BATCH_MAIN, "AWS_BATCH_JOB_NODE_INDEX": "1"}, "is not set on node 1"),
        (Nodes(), {**BATCH, "AWS_BATCH_JOB_NUM_NODES": "x"}, "AWS_BATCH_JOB_NUM_NODES: 'x' is not"),
        (Nodes(count=2), {}, "execution.nodes.endpoint is not set"),
        (Nodes(count=2, endpoint="a:b"), {}, "execution.nodes.endpoint = 'a:b' is invalid"),
        (Nodes(), {"PET_NNODES": "many"}, "PET_NNODES: 'many' is not a number of nodes"),
        (Nodes(), {**OPERATOR, "PET_RDZV_BACKEND": "zeus"}, "= 'zeus' is not supported"),
    ],
)
def test_an_invalid_topology_is_refused_in_one_line(
    nodes: Nodes, environment: dict[str, str], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        resolve_topology(nodes, FOLDER, environment)


# The attempt registry


class MemoryBackend:
    """A record in memory with versions, as the backends of torch's rendezvous have them."""

    name = "memory"

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.changes = 0
        self.before_a_change: list[dict[str, Any]] = []
        """Records that other nodes write just before a change of this node."""

    def get_state(self) -> tuple[bytes, int] | None:
        return None if self.state is None else (self.state, self.changes)

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool]:
        if self.before_a_change:
            self.state = json.dumps(self.before_a_change.pop()).encode()
            self.changes += 1
        is_current = token == (self.changes or None)
        if is_current:
            self.state, self.changes = state, self.changes + 1
        assert self.state is not None
        return self.state, self.changes, is_current

    @property
    def document(self) -> dict[str, Any]:
        assert self.state is not None
        document: dict[str, Any] = json.loads(self.state)
        return document


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MemoryBackend:
    monkeypatch.setattr(attempt_registry, "STALE_SECONDS", 0.3)
    return MemoryBackend()


def test_the_first_node_begins_after_the_attempts_of_the_folder(
    backend: MemoryBackend, tmp_path: Path
) -> None:
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 6}\n')
    assert AttemptRegistry(backend, tmp_path).choose_attempt(None) == 7
    assert backend.document == {"attempt": 7, "beat": 0}


def test_a_stale_record_is_not_joined(backend: MemoryBackend, tmp_path: Path) -> None:
    AttemptRegistry(backend, tmp_path).choose_attempt(None)
    assert AttemptRegistry(backend, tmp_path).choose_attempt(None) == 2


def test_a_node_that_arrives_later_joins_the_same_attempt(
    backend: MemoryBackend, tmp_path: Path
) -> None:
    """While it waits for the stale record of the last run, the first node starts an attempt."""
    AttemptRegistry(backend, tmp_path).choose_attempt(None)
    first, last = AttemptRegistry(backend, tmp_path), {"attempt": 2, "beat": 0}

    class Later(AttemptRegistry):
        reads = 0

        def _read(self) -> tuple[dict[str, Any], Any]:
            nonlocal last
            record = super()._read()
            self.reads += 1
            if self.reads == 3:
                assert first._write(last, record[1])
            elif self.reads > 3:
                last = first.beat(2, last)
            return record

    assert Later(backend, tmp_path).choose_attempt(None) == 2
    assert backend.document["attempt"] == 2


def test_a_fresh_record_is_joined(backend: MemoryBackend, tmp_path: Path) -> None:
    first = AttemptRegistry(backend, tmp_path)
    first.choose_attempt(None)
    last = first.beat(1, {})

    class Busy(AttemptRegistry):
        def _read(self) -> tuple[dict[str, Any], Any]:
            nonlocal last
            last = first.beat(1, last)
            return super()._read()

    assert Busy(backend, tmp_path).choose_attempt(None) == 1


def test_two_nodes_never_begin_two_attempts(backend: MemoryBackend, tmp_path: Path) -> None:
    backend.before_a_change = [{"attempt": 1, "beat": 3}]
    registry = AttemptRegistry(backend, tmp_path)
    assert registry.choose_attempt(0) == 1
    assert backend.document == {"attempt": 1, "beat": 3}


def test_the_next_attempt_is_chosen_after_an_attempt(
    backend: MemoryBackend, tmp_path: Path
) -> None:
    first, second = (AttemptRegistry(backend, tmp_path) for _ in range(2))
    first.choose_attempt(None)
    assert first.choose_attempt(1) == 2
    assert second.choose_attempt(1) == 2


def test_a_waiting_node_receives_the_exit_status_of_the_run(
    backend: MemoryBackend, tmp_path: Path
) -> None:
    registry = AttemptRegistry(backend, tmp_path)
    registry.choose_attempt(None)
    registry.record_end(66, "it failed three times")
    with pytest.raises(RunEndedError) as ended:
        registry.choose_attempt(1)
    assert (ended.value.code, ended.value.message) == (66, "it failed three times")
    document = backend.document
    assert registry.beat(1, document) == document, "the record of an ended run is not kept fresh"
    following = AttemptRegistry(backend, tmp_path).choose_attempt(None)
    assert following == 2, "a new start is a new series of attempts"


def test_one_node_sends_the_heartbeat_of_all_nodes(backend: MemoryBackend, tmp_path: Path) -> None:
    registry = AttemptRegistry(backend, tmp_path)
    registry.choose_attempt(None)
    last = registry.beat(1, {})
    last = registry.beat(1, last)
    assert last["beat"] == 1
    backend.state = json.dumps({**last, "beat": 5}).encode()
    assert registry.beat(1, last)["beat"] == 5, "another node has beaten"


# The failure that ended an attempt

AgreeFunction = Callable[..., list[Failure | None]]


def build_failure(kind: str, rank: int, **evidence: Any) -> Failure:
    return Failure(kind, rank, 3, f"{kind} in {rank}", evidence=evidence)


@pytest.fixture
def agree() -> Iterator[AgreeFunction]:
    """Return a function from the local failure of each node to the failure that it agrees on.

    `...` is a node that is lost.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads: list[HeartbeatThread] = []

    def client() -> TCPStore:
        return TCPStore("127.0.0.1", server.port)

    def agree(
        *failures: Any, stopped: tuple[int, ...] = (), num_waiting: int = 0
    ) -> list[Failure | None]:
        num_nodes = len(failures)
        members = [Node(f"host-{n}", "127.0.0.1", 2, {}) for n in range(num_nodes)]
        layout = RankLayout(2 * num_nodes, 1)
        plan = AttemptPlan(1, "token", needs_preflight=False, layout=layout)
        for node in range(num_nodes):
            server.set(beat_key(node), "[0, 0]")

        def run_node(node: int) -> Failure | None:
            heartbeats = HeartbeatThread(client(), node, num_nodes, lambda: num_waiting)
            threads.append(heartbeats)
            heartbeats.start()
            coordinator = Coordinator(
                client(), node, members, heartbeats, plan=plan, node_timeout_seconds=1.0
            )
            until = time.monotonic() + 10
            while num_waiting and not coordinator.is_resizing() and time.monotonic() < until:
                time.sleep(0.01)
            return coordinator.agree_on_failure(failures[node], is_stop_requested=node in stopped)

        alive = [node for node, failure in enumerate(failures) if failure is not ...]
        with ThreadPoolExecutor(len(alive)) as pool:
            return list(pool.map(run_node, alive))

    yield agree
    for thread in threads:
        thread.stop()


def test_all_nodes_finish_together(agree: AgreeFunction) -> None:
    assert agree(None, None, None) == [None, None, None]


@pytest.mark.parametrize(
    ("failures", "kind", "rank"),
    [
        ((build_failure("network", 0), build_failure("process", 3)), "process", 3),
        ((None, build_failure("user", 2)), "user", 2),
        ((build_failure("network", 1), None), "network", 1),
        ((build_failure("network", 1), ...), "node", 2),
        (
            (
                build_failure("hang", 0, progress_key=[1, 1, 9]),
                build_failure("hang", 3, progress_key=[0, 0, 4]),
            ),
            "hang",
            3,
        ),
        ((build_failure("limit", 0), build_failure("limit", 0)), "limit", 0),
    ],
)
def test_the_first_failure_is_agreed_on_and_its_consequences_are_ignored(
    agree: AgreeFunction, failures: tuple[Any, ...], kind: str, rank: int
) -> None:
    verdicts = agree(*failures)
    assert len({json.dumps(verdict.document()) for verdict in verdicts if verdict}) == 1
    assert verdicts[0] is not None
    assert (verdicts[0].kind, verdicts[0].rank) == (kind, rank)


def test_a_node_that_is_stopped_leaves_and_the_others_continue(agree: AgreeFunction) -> None:
    first, second = agree(
        build_failure("preempted", 0), build_failure("preempted", 2), stopped=(1,)
    )
    assert first is not None
    assert second is not None
    assert (first.kind, first.problem) == ("node", "node 1 (host-1) was stopped by a signal")
    assert first.policy.is_retried
    assert second.kind == "preempted"


def test_another_number_of_nodes_is_no_failure(agree: AgreeFunction) -> None:
    verdicts = agree(build_failure("preempted", 0), build_failure("preempted", 2), num_waiting=1)
    assert [verdict.kind for verdict in verdicts if verdict] == ["resized", "resized"]


def test_the_loss_of_the_leader_is_a_node_failure(agree: AgreeFunction) -> None:
    (verdict,) = agree(..., build_failure("network", 3))
    assert verdict is not None
    assert (verdict.kind, verdict.rank, verdict.host) == ("node", 0, "host-0")


EXIT_IN_STORE = """
import sys, threading
from torch.distributed import TCPStore
from regauge.system import stop_signals

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", server.port)
client.set("key", "value")
began = threading.Event()

def read() -> None:
    while True:
        client.get("key")
        began.set()

threading.Thread(target=read, name=sys.argv[1], daemon=True).start()
began.wait()
sys.exit(stop_signals.exit_command(143))
"""


def test_a_stopped_command_exits_with_its_code_while_a_thread_uses_a_store() -> None:
    """Python ends the thread when it returns from C++, which then calls std::terminate."""
    command = [sys.executable, "-c", EXIT_IN_STORE, f"{stop_signals.NATIVE_PREFIX}rendezvous"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 143, process.stderr
