"""Where the nodes of a run meet before each attempt: torch's dynamic rendezvous.

Every attempt has a rendezvous of its own, `<run>-<attempt>`, and its name is never used again.
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

from regauge import timing
from regauge.config import dump
from regauge.errors import ChildError, RegaugeError, SettingsError, TransientError, plain
from regauge.log import logger
from regauge.supervision import folder_lock
from regauge.supervision.folder_lock import Owner
from regauge.supervision.nodes import coordinator
from regauge.supervision.nodes.attempt_registry import BEAT_SECONDS, Lookout, Register
from regauge.supervision.nodes.coordinator import Council, Node
from regauge.supervision.nodes.heartbeats import STORE_ERRORS, Ear
from regauge.supervision.signals import POLL_SECONDS, Signals

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed import Store

    from regauge.supervision.nodes.interface import Alone
    from regauge.supervision.nodes.topology import Several
    from regauge.training.settings import Training

PLACES = {"c10d": "c10d_rendezvous_backend", "etcd": "etcd_rendezvous_backend"}
"""Modules of torch's rendezvous that know a meeting place."""
AGAIN_SECONDS = 3.0
"""Last call where a run goes on: who is alive comes at once."""
ANSWER_SECONDS = 20
"""Longest wait for an answer at the meeting place."""
FOLDER_SECONDS = 30.0
"""A shared file system shows a new file to the other nodes after so long at the latest."""
LOCK_SECONDS = 120.0
"""A file server gives the lock of a node that is lost to others after so long at the latest."""
STORE_SECONDS = LOCK_SECONDS + 30
"""Longest wait of one node for what another one tells it."""
OWN = ("processes", "threads", "compile_cache", "nodes")
"""Of `execution`: what may differ between the nodes."""


@dataclass
class Round:
    """A rendezvous that this node has come into."""

    attempt: int
    node: int
    nodes: int
    store: Store
    handler: DynamicRendezvousHandler
    lookout: Lookout


class Rendezvous:
    """Brings the nodes of a run together for one attempt after the other."""

    def __init__(self, several: Several, settings: Training, folder: Path) -> None:
        self._several, self._settings, self._folder = several, settings, folder
        self._address = several.own_address()
        self._register: Register | None = None
        self._past: int | None = None
        self._kept: list[Store] = []
        self._ended = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Be at the meeting place for as long as the block lasts."""
        try:
            yield
        finally:
            if self._ended:
                time.sleep(BEAT_SECONDS)  # this node may keep the place where others hear of it

    @contextmanager
    def attempt(self, size: int, signals: Signals, *, preflight: bool) -> Iterator[Alone]:
        """Wait for enough nodes and begin an attempt with them, `size` processes here.

        Raises TransientError where they do not come in time, SettingsError where they cannot work
        together, ChildError where a signal came first, OverError where the run had ended.
        """
        until = time.monotonic() + self._several.nodes.join_seconds
        while True:
            with ExitStack() as stack:
                found = self._together(until, signals)
                stack.callback(found.handler.shutdown)
                stack.callback(found.lookout.stop)
                try:
                    team = self._team(found, size, stack, preflight=preflight)
                except STORE_ERRORS:
                    logger.warning("attempt %d did not begin: a node has left", found.attempt)
                    continue
                yield team
                return

    def over(self, code: int, line: str) -> None:
        """Tell the nodes that wait how the run ended."""
        if self._register is not None:
            self._ended = True
            try:
                self._register.over(code, line)
            except RendezvousError:
                logger.warning("%s does not answer any more", self._several.endpoint)

    def _together(self, until: float, signals: Signals) -> Round:
        """Wait for the other nodes in a thread: a signal is heard meanwhile, and time runs out."""
        future: Future[Round] = Future()

        def come() -> None:
            try:
                future.set_result(self._come(until))
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                future.set_exception(error)

        threading.Thread(target=come, name="rendezvous", daemon=True).start()
        timing.wait_for(
            lambda: future.done() or signals.told,
            until + BEAT_SECONDS - time.monotonic(),
            poll_seconds=POLL_SECONDS,
        )
        if future.done():
            return future.result()
        if signals.told:
            raise ChildError(143, "told to stop while it waited for other nodes")
        raise self._alone("no answer")

    def _come(self, until: float) -> Round:
        """Come into the next attempt; a meeting place that is gone may come back meanwhile."""
        problem = "too few came"
        while time.monotonic() < until:
            try:
                if self._register is None:
                    backend, store = self._place(self._several.name)
                    self._kept.append(store)
                    self._register = Register(backend, self._folder)
                attempt = self._register.choose(self._past)
                return self._met(self._register, attempt, until - time.monotonic())
            except RendezvousClosedError:
                continue
            except RendezvousTimeoutError:
                break
            except RendezvousConnectionError as error:
                problem, self._register = plain(error.__cause__ or error), None
                time.sleep(BEAT_SECONDS)
        raise self._alone(problem)

    def _alone(self, problem: str) -> TransientError:
        """Return the error of a node that has waited long enough."""
        return TransientError(
            f"{self._several.fewest} nodes did not meet at {self._several.endpoint} within "
            f"{self._several.nodes.join_seconds:g} s: {problem}",
            "start the same command on every node, and see execution.nodes",
        )

    def _place(self, name: str) -> tuple[RendezvousBackend, Store]:
        """Return a record at the meeting place, and a store there."""
        several = self._several
        try:
            module = import_module(f"torch.distributed.elastic.rendezvous.{PLACES[several.kind]}")
        except ImportError:
            remedy = "pip install 'regauge[etcd]'"
            raise SettingsError("the client for an etcd is not installed", remedy) from None
        limits = several.fewest, several.most
        where = partial(
            RendezvousParameters, several.kind, several.endpoint, name, *limits,
            read_timeout=ANSWER_SECONDS,
        )  # fmt: skip
        found: tuple[RendezvousBackend, Store]
        if several.is_here():
            with suppress(RendezvousConnectionError):  # another node of this machine has it
                found = module.create_backend(where(is_host=True))
                return found
        found = module.create_backend(where())
        return found

    def _met(self, register: Register, attempt: int, left: float) -> Round:
        several = self._several
        name = f"{several.name}-{attempt}"
        backend, store = self._place(name)
        call = several.nodes.last_call_seconds
        handler = DynamicRendezvousHandler.from_backend(
            name,
            store,
            backend,
            several.fewest,
            several.most,
            local_addr=self._address,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=left),
                last_call=timedelta(seconds=min(call, AGAIN_SECONDS) if self._past else call),
            ),
            keep_alive_interval=1,
            keep_alive_max_attempt=4,
        )
        lookout = Lookout(register, attempt)
        lookout.start()
        self._past = attempt
        try:
            found = handler.next_rendezvous()
        except BaseException:
            lookout.stop()
            raise
        lookout.handler = handler
        return Round(attempt, found.rank, found.world_size, found.store, handler, lookout)

    def _team(self, found: Round, size: int, stack: ExitStack, *, preflight: bool) -> Council:
        """Return the nodes of an attempt once all of them know of each other."""
        store, second = self._stores(found)
        own = Node(socket.gethostname(), self._address, size, _alike(self._settings))
        members = coordinator.gather(store, found.node, found.nodes, own)
        ear = Ear(second, found.node, found.nodes, lambda: found.lookout.waiting)
        ear.start()
        stack.callback(ear.stop)
        if found.node == 0:
            token = self._owned(stack, store)
            coordinator.lead(store, members, found.attempt, token, preflight=preflight)
        shared = coordinator.follow(store, found.node, members)
        coordinator.agree(store, found.node, members, self._seen(shared.token))
        hosts = ", ".join(f"{member.host} ({member.size})" for member in members)
        logger.info("attempt %d on %d nodes: %s", found.attempt, found.nodes, hosts)
        lost = self._several.nodes.lost_seconds
        return Council(store, found.node, members, ear, shared=shared, lost=lost)

    def _stores(self, found: Round) -> tuple[Store, Store]:
        """Return two ways to the store of an attempt, which its first node keeps."""
        wait = timedelta(seconds=STORE_SECONDS)
        server = None
        if found.node == 0:
            server = TCPStore(
                self._address, 0, is_master=True, wait_for_workers=False, timeout=wait
            )
            found.store.set("council", f"{self._address} {server.port}")
        host, port = found.store.get("council").decode().split()
        first, second = (TCPStore(host, int(port), timeout=wait) for _ in range(2))
        return server or first, second

    def _owned(self, stack: ExitStack, store: Store) -> str:
        """Own the output folder for the attempt, and return the right to publish there."""
        own = Owner(self._folder, wait_seconds=LOCK_SECONDS)
        try:
            return stack.enter_context(own).admit()
        except RegaugeError as error:
            coordinator.refuse(store, str(error))
            raise

    def _seen(self, token: str) -> str:
        """Return why this node does not see what the first one wrote; nothing where it does."""
        if timing.wait_for(
            lambda: folder_lock.holds(self._folder, token),
            FOLDER_SECONDS,
            poll_seconds=POLL_SECONDS,
        ):
            return ""
        return f"{self._folder} is not the folder that node 0 writes: let all nodes share it"


def _alike(settings: Training) -> dict[str, Any]:
    """Return what the settings of all nodes must agree on."""
    document = dump(settings)
    execution = {name: each for name, each in document["execution"].items() if name not in OWN}
    return {**document, "execution": execution}
