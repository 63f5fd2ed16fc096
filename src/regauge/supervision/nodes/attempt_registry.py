"""A run's newest attempt number: one record at the rendezvous, shared by all nodes.

- `attempt`: number of the newest attempt
- `beat`: changes every second while a node waits for that attempt or works in it
- `outcome`: how the run ended: exit code and message
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from regauge.supervision.nodes.interface import read_last_attempt
from regauge.system import timing
from regauge.system.stop_signals import NATIVE_PREFIX

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler,
        RendezvousBackend,
    )


STALE_SECONDS = 4.0
"""A record unchanged for this long belongs to nodes that are gone."""
BEAT_SECONDS = 1.0


class RunEndedError(Exception):
    """The run ended while this node waited to join it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class AttemptRegistry:
    """A run's record; a write succeeds only if the record has not changed since it was read."""

    def __init__(self, backend: RendezvousBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder

    def choose_attempt(self, previous: int | None) -> int:
        """Return the attempt to join: the newest one, or the next one.

        `previous` is this node's last attempt, if any. Raises RunEndedError if the run ended after
        that attempt.
        """
        while True:
            document, token = self._read()
            newest, end = int(document.get("attempt", 0)), document.get("outcome")
            if end is not None and previous is not None:
                raise RunEndedError(*end)
            is_new = end is None and newest > (previous or 0)
            if is_new and (previous is not None or self._is_alive(document)):
                return newest
            following = max(newest, read_last_attempt(self._folder)) + 1
            if self._write({"attempt": following, "beat": 0}, token):
                return following

    def beat(self, attempt: int, last: dict[str, Any]) -> dict[str, Any]:
        """Change the record if no other node has changed it since `last`; return the record."""
        document, token = self._read()
        is_current = document.get("attempt") == attempt and "outcome" not in document
        if is_current and document == last:
            document = {**document, "beat": document["beat"] + 1}
            self._write(document, token)
        return document

    def record_end(self, code: int, message: str) -> None:
        document, token = self._read()
        self._write({**document, "outcome": [code, message]}, token)

    def _is_alive(self, document: dict[str, Any]) -> bool:
        """Return whether a node keeps the record fresh without beginning another attempt."""
        has_changed = timing.wait_for(lambda: self._read()[0] != document, STALE_SECONDS)
        return has_changed and {**self._read()[0], "beat": 0} == {**document, "beat": 0}

    def _read(self) -> tuple[dict[str, Any], Any]:
        """Return the record, or {}, and its version token."""
        state = self._backend.get_state()
        return (json.loads(state[0]), state[1]) if state else ({}, None)

    def _write(self, document: dict[str, Any], token: Any) -> bool:
        """Replace the record version with this token; return whether it succeeded."""
        result = self._backend.set_state(json.dumps(document).encode(), token)
        return result is not None and result[2]


class RendezvousWatcher(threading.Thread):
    """Keeps an attempt's record fresh, and counts the nodes waiting to join."""

    def __init__(self, registry: AttemptRegistry, attempt: int) -> None:
        super().__init__(name=f"{NATIVE_PREFIX}rendezvous-watcher", daemon=True)
        self._registry, self._attempt = registry, attempt
        self._has_ended = threading.Event()
        self.handler: DynamicRendezvousHandler | None = None
        self.num_waiting = 0

    def run(self) -> None:
        """Poll once a second until `stop`; an attempt survives the loss of the rendezvous."""
        from torch.distributed.elastic.rendezvous import RendezvousError

        last: dict[str, Any] = {}
        while not self._has_ended.wait(BEAT_SECONDS):
            try:
                last = self._registry.beat(self._attempt, last)
                if self.handler is not None:
                    self.num_waiting = self.handler.num_nodes_waiting()
            except RendezvousError:
                continue

    def stop(self) -> None:
        self._has_ended.set()
        self.join(BEAT_SECONDS)
