"""The nodes in an attempt: the interface, which is also the single-node case."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.config.output_files import ATTEMPTS, LEDGER
from regauge.run_folders.documents import AttemptLine, LedgerLine
from regauge.run_folders.folder_lock import FolderLock
from regauge.supervision.nodes.topology import resolve_topology
from regauge.system import jsonl
from regauge.system.json_files import DocumentShape
from regauge.system.processes import RankLayout, find_free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from regauge.supervision.failures import Failure
    from regauge.supervision.nodes.rendezvous import RendezvousLauncher
    from regauge.supervision.signals import SupervisorSignals
    from regauge.training.settings import TrainSettings


@dataclass(frozen=True)
class AttemptPlan:
    """Decisions shared by all nodes in an attempt."""

    attempt: int
    token: str
    """Permission to publish checkpoints."""
    needs_preflight: bool
    """Whether the processes check their devices and collectives first."""
    layout: RankLayout
    """Ranks of this node's processes."""


class NodeGroup:
    """The nodes in an attempt, as one node's supervisor sees them: here only this node."""

    def __init__(self, plan: AttemptPlan, num_nodes: int = 1, *, is_leader: bool = True) -> None:
        self.plan = plan
        self.num_nodes = num_nodes
        self.is_leader = is_leader
        """Whether this node records the attempt."""

    def publish_beats(self, count_beats: Callable[[], int]) -> None:
        """Publish the heartbeat count of this node's processes from now on, for other nodes."""

    def find_alarm(self) -> str | None:
        """Return how another node ended the attempt: `failed`, `hang`, or None."""
        return None

    def is_resizing(self) -> bool:
        """Return whether all processes save and restart with another number of nodes."""
        return False

    def remote_silence(self) -> float:
        """Return the seconds since the last heartbeat from a process on another node."""
        return math.inf

    def agree_on_failure(
        self, failure: Failure | None, *, is_stop_requested: bool
    ) -> Failure | None:
        """Return the failure that ended the attempt, the same on every node.

        `failure` is this node's failure; `is_stop_requested` tells whether a signal stopped this
        node.
        """
        del is_stop_requested
        return failure


class LocalLauncher:
    """Launches a run's attempts on one node, and locks the output folder meanwhile."""

    is_leader = True
    """Whether this node sends the run's events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FolderLock(folder)
        self._last_attempt = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Lock the output folder within the block."""
        with self._lock:
            yield

    @contextmanager
    def begin_attempt(
        self, size: int, signals: SupervisorSignals, *, needs_preflight: bool
    ) -> Iterator[NodeGroup]:
        """Begin an attempt with `size` processes."""
        del signals
        layout = RankLayout(world_size=size, port=find_free_port())
        self._last_attempt = max(self._last_attempt, read_last_attempt(self._folder)) + 1
        token = self._lock.issue_token()
        yield NodeGroup(AttemptPlan(self._last_attempt, token, needs_preflight, layout))

    def record_end(self, code: int, message: str) -> None:
        """Do nothing: only other nodes would wait for the end of the run."""


def read_last_attempt(folder: Path) -> int:
    """Return the last attempt number, supervised or not; 0 without attempts."""
    files: dict[str, type[DocumentShape]] = {ATTEMPTS: AttemptLine, LEDGER: LedgerLine}
    lines = (jsonl.read_last_line(folder / name, shape) for name, shape in files.items())
    return max((line["attempt"] for line in lines if line), default=0)


def build_launcher(settings: TrainSettings, folder: Path) -> LocalLauncher | RendezvousLauncher:
    """Return the launcher of a run's attempts: on one node, or on several."""
    topology = resolve_topology(settings.execution.nodes, folder)
    if topology is None:
        return LocalLauncher(folder)
    with _silence_torch_log():
        from regauge.supervision.nodes.rendezvous import RendezvousLauncher

    return RendezvousLauncher(topology, settings, folder)


@contextmanager
def _silence_torch_log() -> Iterator[None]:
    """Set torch's log level for its import, so a lost node does not print C++ stacks."""
    is_unset = "TORCH_CPP_LOG_LEVEL" not in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        yield
    finally:
        if is_unset:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
