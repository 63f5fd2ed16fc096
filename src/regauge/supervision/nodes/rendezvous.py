"""Joins a run's nodes for each attempt, with torch's dynamic rendezvous.

Every attempt has a separate rendezvous, `<run>-<attempt>`, and the name is never reused.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from regauge.config import dump
from regauge.run_folders import folder_lock
from regauge.run_folders.folder_lock import FolderLock
from regauge.supervision.nodes import coordinator
from regauge.supervision.nodes.attempt_registry import (
    BEAT_SECONDS,
    AttemptRegistry,
    RendezvousWatcher,
)
from regauge.supervision.nodes.coordinator import Coordinator, Node
from regauge.supervision.nodes.heartbeats import STORE_ERRORS, HeartbeatThread
from regauge.supervision.signals import SupervisorSignals
from regauge.system import stop_signals, timing
from regauge.system.errors import (
    FIRST_SIGNAL_CODE,
    ChildError,
    RegaugeError,
    SettingsError,
    TransientError,
    first_line,
)
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed import Store

    from regauge.supervision.nodes.interface import NodeGroup
    from regauge.supervision.nodes.topology import NodeTopology
    from regauge.training.settings import TrainSettings

BACKEND_MODULES = {"c10d": "c10d_rendezvous_backend", "etcd": "etcd_rendezvous_backend"}
"""Backend -> module in torch.distributed.elastic.rendezvous."""
REJOIN_SECONDS = 3.0
"""Maximum last call after the first attempt: live nodes join at once."""
RETURN_SECONDS = 10.0
"""Maximum wait after the first attempt, if the launcher does not replace lost nodes."""
ANSWER_SECONDS = 20
"""Maximum wait for an answer from the rendezvous."""
FOLDER_SECONDS = 30.0
"""Maximum time until a shared file system shows a new file to the other nodes."""
LOCK_SECONDS = 120.0
"""Maximum time until a file server releases a lost node's lock."""
STORE_SECONDS = LOCK_SECONDS + 30
"""Maximum wait for a value written to the store by another node."""
NODE_FIELDS = ("processes", "threads", "compile_cache", "nodes")
"""Fields of `execution` allowed to differ between nodes."""


@dataclass
class Membership:
    """This node's place in a rendezvous it joined."""

    attempt: int
    node: int
    """Node number; node 0 is the leader."""
    num_nodes: int
    store: Store
    handler: DynamicRendezvousHandler
    watcher: RendezvousWatcher


class RendezvousLauncher:
    """Launches a run's attempts on several nodes, each after a rendezvous."""

    def __init__(self, topology: NodeTopology, settings: TrainSettings, folder: Path) -> None:
        self._topology, self._settings, self._folder = topology, settings, folder
        self._address = topology.local_address()
        self._registry: AttemptRegistry | None = None
        self._previous_attempt: int | None = None
        self._join_seconds = topology.settings.join_seconds
        self._stores: list[Store] = []
        """Stores to keep open until the run ends."""
        self._has_ended = False
        self.is_leader = topology.backend == "etcd" or topology.is_endpoint_local()
        """Whether this node sends the run's events: as node 0 of the last attempt.

        Before the nodes have met, the node that serves the rendezvous does, or every node if
        another process serves it.
        """

    @contextmanager
    def open(self) -> Iterator[None]:
        """Serve the rendezvous within the block, if this node is to do so."""
        try:
            yield
        finally:
            if self._has_ended:
                time.sleep(BEAT_SECONDS)  # the waiting nodes read the end of the run meanwhile

    @contextmanager
    def begin_attempt(
        self, size: int, signals: SupervisorSignals, *, needs_preflight: bool
    ) -> Iterator[NodeGroup]:
        """Wait for enough nodes, and begin an attempt with `size` processes on this node.

        Raises TransientError if too few nodes join in time, SettingsError if the nodes cannot work
        together, ChildError if a signal arrives first, and RunEndedError if the run has ended.
        """
        self._join_seconds = self._find_join_seconds()
        until = time.monotonic() + self._join_seconds
        while True:
            with ExitStack() as stack:
                membership = self._join_in_thread(until, signals)
                stack.callback(membership.handler.shutdown)
                stack.callback(membership.watcher.stop)
                self.is_leader = membership.node == 0
                try:
                    group = self._build_group(
                        membership, size, stack, needs_preflight=needs_preflight
                    )
                except STORE_ERRORS:
                    logger.warning("attempt %d did not begin: a node left", membership.attempt)
                    continue
                yield group
                return

    def _find_join_seconds(self) -> float:
        """Return the maximum wait for the other nodes in the next attempt."""
        seconds = self._topology.settings.join_seconds
        is_first = self._previous_attempt is None
        return (
            seconds if is_first or self._topology.replaces_nodes else min(seconds, RETURN_SECONDS)
        )

    def record_end(self, code: int, message: str) -> None:
        """Record how the run ended, for nodes waiting to join."""
        if self._registry is not None:
            self._has_ended = True
            try:
                self._registry.record_end(code, message)
            except RendezvousError:
                logger.warning("the rendezvous %s no longer answers", self._topology.endpoint)

    def _join_in_thread(self, until: float, signals: SupervisorSignals) -> Membership:
        """Join the next attempt in a thread, so that signals and the time limit are noticed."""
        future: Future[Membership] = Future()

        def join() -> None:
            try:
                future.set_result(self._join(until))
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                future.set_exception(error)

        name = f"{stop_signals.NATIVE_PREFIX}rendezvous"
        threading.Thread(target=join, name=name, daemon=True).start()
        timing.wait_for(
            lambda: future.done() or signals.is_stop_requested,
            until + BEAT_SECONDS - time.monotonic(),
        )
        if future.done():
            return future.result()
        if signals.number is not None:
            code = FIRST_SIGNAL_CODE + signals.number
            raise ChildError(code, "stopped by a signal while waiting for other nodes")
        raise self._build_timeout_error("no answer")

    def _join(self, until: float) -> Membership:
        """Join the next attempt; until the deadline, retry an unresponsive rendezvous."""
        problem = "too few nodes joined"
        while time.monotonic() < until:
            try:
                if self._registry is None:
                    backend, store = self._connect(self._topology.name)
                    self._stores.append(store)
                    self._registry = AttemptRegistry(backend, self._folder)
                attempt = self._registry.choose_attempt(self._previous_attempt)
                return self._join_attempt(self._registry, attempt, until - time.monotonic())
            except RendezvousClosedError:
                continue
            except RendezvousTimeoutError:
                break
            except RendezvousConnectionError as error:
                problem, self._registry = first_line(error.__cause__ or error), None
                time.sleep(BEAT_SECONDS)
        raise self._build_timeout_error(problem)

    def _build_timeout_error(self, problem: str) -> TransientError:
        """Return the error after too long a wait for the other nodes."""
        return TransientError(
            f"{self._topology.min_nodes} nodes did not meet at {self._topology.endpoint} within "
            f"{self._join_seconds:g} s: {problem}",
            "start the same command on every node, and check execution.nodes",
        )

    def _connect(self, name: str) -> tuple[RendezvousBackend, Store]:
        topology = self._topology
        module_name = BACKEND_MODULES[topology.backend]
        try:
            module = import_module(f"torch.distributed.elastic.rendezvous.{module_name}")
        except ImportError:
            remedy = "pip install 'regauge[etcd]'"
            raise SettingsError("the etcd client is not installed", remedy) from None
        build_parameters = partial(
            RendezvousParameters,
            topology.backend,
            topology.endpoint,
            name,
            topology.min_nodes,
            topology.max_nodes,
            read_timeout=ANSWER_SECONDS,
        )
        connection: tuple[RendezvousBackend, Store]
        if topology.is_endpoint_local():
            with suppress(RendezvousConnectionError):  # another process of this machine serves it
                connection = module.create_backend(build_parameters(is_host=True))
                return connection
        connection = module.create_backend(build_parameters())
        return connection

    def _join_attempt(
        self, registry: AttemptRegistry, attempt: int, seconds_left: float
    ) -> Membership:
        topology = self._topology
        name = f"{topology.name}-{attempt}"
        backend, store = self._connect(name)
        last_call = topology.settings.last_call_seconds
        if self._previous_attempt:
            last_call = min(last_call, REJOIN_SECONDS)
        handler = DynamicRendezvousHandler.from_backend(
            name,
            store,
            backend,
            topology.min_nodes,
            topology.max_nodes,
            local_addr=self._address,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=seconds_left),
                last_call=timedelta(seconds=last_call),
            ),
            keep_alive_interval=1,
            keep_alive_max_attempt=4,
        )
        watcher = RendezvousWatcher(registry, attempt)
        watcher.start()
        self._previous_attempt = attempt
        try:
            info = handler.next_rendezvous()
        except BaseException:
            watcher.stop()
            raise
        watcher.handler = handler
        return Membership(attempt, info.rank, info.world_size, info.store, handler, watcher)

    def _build_group(
        self, membership: Membership, size: int, stack: ExitStack, *, needs_preflight: bool
    ) -> Coordinator:
        """Return an attempt's node group, after all nodes have agreed on the plan."""
        node, num_nodes = membership.node, membership.num_nodes
        store, heartbeat_store = self._open_stores(membership)
        local = Node(socket.gethostname(), self._address, size, _shared_settings(self._settings))
        members = coordinator.gather_nodes(store, node, num_nodes, local)
        heartbeats = HeartbeatThread(
            heartbeat_store, node, num_nodes, lambda: membership.watcher.num_waiting
        )
        heartbeats.start()
        stack.callback(heartbeats.stop)
        if node == 0:
            token = self._lock_folder(stack, store)
            coordinator.publish_plan(
                store, members, membership.attempt, token, needs_preflight=needs_preflight
            )
        plan = coordinator.read_plan(store, node, members)
        coordinator.check_all_ready(store, node, members, self._find_folder_problem(plan.token))
        hosts = ", ".join(f"{member.host} ({member.size})" for member in members)
        text = "attempt %d on %d nodes: %s; this is node %d"
        logger.info(text, membership.attempt, num_nodes, hosts, node)
        return Coordinator(
            store,
            node,
            members,
            heartbeats,
            plan=plan,
            node_timeout_seconds=self._topology.settings.node_timeout_seconds,
        )

    def _open_stores(self, membership: Membership) -> tuple[Store, Store]:
        """Return two clients of the attempt's store, the second one for the heartbeat thread.

        The leader starts the server.
        """
        wait = timedelta(seconds=STORE_SECONDS)
        server = None
        if membership.node == 0:
            server = TCPStore(
                self._address, 0, is_master=True, wait_for_workers=False, timeout=wait
            )
            membership.store.set("coordinator", f"{self._address} {server.port}")
        host, port = membership.store.get("coordinator").decode().split()
        first, second = (TCPStore(host, int(port), timeout=wait) for _ in range(2))
        return server or first, second

    def _lock_folder(self, stack: ExitStack, store: Store) -> str:
        """Lock the output folder for the attempt; return the token to publish in it."""
        lock = FolderLock(self._folder, wait_seconds=LOCK_SECONDS)
        try:
            return stack.enter_context(lock).issue_token()
        except RegaugeError as error:
            coordinator.publish_refusal(store, str(error))
            raise

    def _find_folder_problem(self, token: str) -> str:
        """Return why this node does not see the leader's output folder, or ""."""
        if timing.wait_for(
            lambda: folder_lock.is_current(self._folder, token),
            FOLDER_SECONDS,
        ):
            return ""
        return f"{self._folder} is not the output folder of node 0; use a shared file system"


def _shared_settings(settings: TrainSettings) -> dict[str, Any]:
    """Return the settings that must be equal on all nodes."""
    document = dump(settings)
    execution = document["execution"]
    shared = {name: value for name, value in execution.items() if name not in NODE_FIELDS}
    return {**document, "execution": shared}
