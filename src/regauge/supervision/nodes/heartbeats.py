"""Signs of life between the nodes of an attempt."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

BEAT_SECONDS = 0.25
STOP_SECONDS = 1.0
"""Longest wait for a beat that is under way."""
STORE_ERRORS = (RuntimeError, TimeoutError)
"""What a store raises that does not answer."""


def beat(node: int) -> str:
    """Return where a node's signs of life are."""
    return f"beat/{node}"


class Ear(threading.Thread):
    """Gives this node's signs of life and hears those of the others, beside the supervisor."""

    def __init__(self, store: Store, node: int, nodes: int, waiting: Callable[[], int]) -> None:
        super().__init__(name="council", daemon=True)
        self._store, self._node, self._nodes, self._waiting = store, node, nodes, waiting
        self._ended = threading.Event()
        self._beats = [(-1, -1)] * nodes
        now = time.monotonic()
        self._heard = [now] * nodes
        self.signs: Callable[[], int] = int
        self.moved = now
        """When processes of another node last gave a sign."""
        self.alarm: str | None = None
        self.leaving = False
        self.gone = False
        """Whether the store does not answer any more."""

    def run(self) -> None:
        """Beat and listen until `stop`."""
        number = 0
        try:
            while not self._ended.wait(BEAT_SECONDS):
                number += 1
                self._beat(number)
        except STORE_ERRORS:
            self.gone = True

    def stop(self) -> None:
        """Beat no more."""
        self._ended.set()
        self.join(STOP_SECONDS)

    def lost(self, seconds: float) -> set[int]:
        """Return the nodes that gave no sign for so long."""
        now = time.monotonic()
        silent = {node for node, heard in enumerate(self._heard) if now - heard > seconds}
        return silent - {self._node}

    def _beat(self, number: int) -> None:
        self._store.set(beat(self._node), json.dumps([number, self.signs()]))
        found = self._store.multi_get([beat(node) for node in range(self._nodes)])
        now = time.monotonic()
        for node, (last, told) in enumerate(zip(self._beats, found, strict=True)):
            count, signs = json.loads(told)
            if count != last[0]:
                self._heard[node] = now
            if signs != last[1] and node != self._node:
                self.moved = now
            self._beats[node] = (count, signs)
        if self._store.check(["alarm"]):
            self.alarm = self._store.get("alarm").decode()
        if self._node == 0 and self._waiting():
            self._store.set("leave", "yes")
        self.leaving = self.leaving or self._store.check(["leave"])
