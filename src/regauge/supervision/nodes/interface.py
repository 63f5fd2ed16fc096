"""Interface to the nodes in an attempt, and the single-node case."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.config.output_files import ATTEMPTS, LEDGER
from regauge.run_folders.documents import AttemptLine, LedgerLine
from regauge.run_folders.folder_lock import FolderLock
from regauge.system import jsonl
from regauge.system.json_files import DocumentShape
from regauge.system.processes import RankLayout, find_free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from regauge.supervision.failures import Failure
    from regauge.supervision.signals import SupervisorSignals


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


class NodeGroup(ABC):
    """The nodes in an attempt, as one node's supervisor sees them."""

    def __init__(self, plan: AttemptPlan, num_nodes: int, *, is_leader: bool) -> None:
        self.plan = plan
        self.num_nodes = num_nodes
        self.is_leader = is_leader
        """Whether this node records the attempt."""

    @abstractmethod
    def publish_beats(self, count_beats: Callable[[], int]) -> None:
        """Publish the heartbeat count of this node's processes from now on."""

    @abstractmethod
    def find_alarm(self) -> str | None:
        """Return how another node ended the attempt: `failed`, `hang`, or None."""

    @abstractmethod
    def is_resizing(self) -> bool:
        """Return whether all processes save and restart with another number of nodes."""

    @abstractmethod
    def remote_silence(self) -> float:
        """Return the seconds since the last heartbeat from a process on another node."""

    @abstractmethod
    def agree_on_failure(
        self, failure: Failure | None, *, is_stop_requested: bool
    ) -> Failure | None:
        """Return the failure that ended the attempt, the same on every node.

        `failure` is this node's failure; `is_stop_requested` tells whether a signal stopped this
        node.
        """


class SingleNodeGroup(NodeGroup):
    """Node group for an attempt on one node."""

    def __init__(self, plan: AttemptPlan) -> None:
        super().__init__(plan, num_nodes=1, is_leader=True)

    def publish_beats(self, count_beats: Callable[[], int]) -> None:
        """Do nothing: heartbeats are only needed by other nodes."""

    def find_alarm(self) -> str | None:
        return None

    def is_resizing(self) -> bool:
        return False

    def remote_silence(self) -> float:
        return math.inf

    def agree_on_failure(
        self, failure: Failure | None, *, is_stop_requested: bool
    ) -> Failure | None:
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
        yield SingleNodeGroup(AttemptPlan(self._last_attempt, token, needs_preflight, layout))

    def record_end(self, code: int, message: str) -> None:
        """Do nothing: only other nodes would wait for the end of the run."""


def read_last_attempt(folder: Path) -> int:
    """Return the last attempt number, supervised or not; 0 without attempts."""
    files: dict[str, type[DocumentShape]] = {ATTEMPTS: AttemptLine, LEDGER: LedgerLine}
    lines = (jsonl.read_last_line(folder / name, shape) for name, shape in files.items())
    return max((line["attempt"] for line in lines if line), default=0)
