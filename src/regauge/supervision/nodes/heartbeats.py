"""Heartbeats between an attempt's nodes, through their store."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

from regauge.system.stop_signals import NATIVE_PREFIX
from regauge.system.timing import PauseDetector

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

BEAT_SECONDS = 0.25
STOP_SECONDS = 1.0
"""Maximum wait for a beat in progress."""
STORE_ERRORS = (RuntimeError, TimeoutError)
"""Raised when the store does not answer."""


def beat_key(node: int) -> str:
    return f"beat/{node}"


class HeartbeatThread(threading.Thread):
    """Writes this node's heartbeats and reads the other nodes' heartbeats, in the background."""

    def __init__(
        self, store: Store, node: int, num_nodes: int, count_waiting: Callable[[], int]
    ) -> None:
        super().__init__(name=f"{NATIVE_PREFIX}node-heartbeats", daemon=True)
        self._store, self._node, self._num_nodes = store, node, num_nodes
        self._count_waiting = count_waiting
        self._has_ended = threading.Event()
        self._last_beats = [(-1, -1)] * num_nodes
        now = time.monotonic()
        self._last_beat_at = [now] * num_nodes
        self._pauses = PauseDetector()
        self.count_beats: Callable[[], int] = int
        """Returns how many heartbeats this node's processes have written."""
        self.last_remote_beat = now
        """Time of the last heartbeat by a process on another node, on time.monotonic()."""
        self.alarm: str | None = None
        """How a node ended the attempt: `failed` or `hang`."""
        self.is_resizing = False
        """Whether the attempt restarts with another number of nodes."""
        self.is_store_lost = False
        """Whether the store no longer answers."""

    def run(self) -> None:
        """Exchange heartbeats until `stop`, or until the store is lost."""
        count = 0
        try:
            while not self._has_ended.wait(BEAT_SECONDS):
                count += 1
                self._exchange(count)
        except STORE_ERRORS:
            self.is_store_lost = True

    def stop(self) -> None:
        self._has_ended.set()
        self.join(STOP_SECONDS)

    def find_lost_nodes(self, timeout_seconds: float) -> set[int]:
        """Return the nodes without a heartbeat for longer than the timeout.

        Time in which this node's own supervisor was stopped does not count.
        """
        resumed_at, now = self._pauses.poll(), time.monotonic()
        silences = (now - max(at, resumed_at) for at in self._last_beat_at)
        silent = {node for node, silence in enumerate(silences) if silence > timeout_seconds}
        return silent - {self._node}

    def _exchange(self, count: int) -> None:
        self._store.set(beat_key(self._node), json.dumps([count, self.count_beats()]))
        values = self._store.multi_get([beat_key(node) for node in range(self._num_nodes)])
        now = time.monotonic()
        for node, (last, value) in enumerate(zip(self._last_beats, values, strict=True)):
            node_beats, process_beats = json.loads(value)
            if node_beats != last[0]:
                self._last_beat_at[node] = now
            if process_beats != last[1] and node != self._node:
                self.last_remote_beat = now
            self._last_beats[node] = (node_beats, process_beats)
        if self._store.check(["alarm"]):
            self.alarm = self._store.get("alarm").decode()
        if self._node == 0 and self._count_waiting():
            self._store.set("resize", "yes")
        self.is_resizing = self.is_resizing or self._store.check(["resize"])
