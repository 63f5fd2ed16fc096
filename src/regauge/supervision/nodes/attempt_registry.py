"""Which attempt of a run is the newest: one record at the place where its nodes meet.

attempt    the newest
beat       changes each second while somebody waits or works in it
over       how the run ended: an exit code and a line
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from regauge import timing
from regauge.supervision.nodes.interface import attempts

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler,
        RendezvousBackend,
    )


POLL_SECONDS = 0.1
STALE_SECONDS = 4.0
"""A record that did not change for so long belongs to nodes that are gone."""
BEAT_SECONDS = 1.0


class OverError(Exception):
    """The run ended while this node waited to come in."""

    def __init__(self, code: int, line: str) -> None:
        super().__init__(line)
        self.code, self.line = code, line


class Register:
    """The record of a run; every change names what it replaces, so that two never do so at once."""

    def __init__(self, backend: RendezvousBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder

    def choose(self, past: int | None) -> int:
        """Return the attempt to come into; `past` is the one that this node has seen the end of.

        Raises OverError where the run has ended after that one.
        """
        while True:
            document, token = self._read()
            newest, over = int(document.get("attempt", 0)), document.get("over")
            if over is not None and past is not None:
                raise OverError(*over)
            known = over is None and newest > (past or 0)
            if known and (past is not None or self._lives(document)):
                return newest
            following = max(newest, attempts(self._folder)) + 1
            if self._write({"attempt": following, "beat": 0}, token):
                return following

    def beat(self, attempt: int, last: dict[str, Any]) -> dict[str, Any]:
        """Change the record where nobody did so since it was `last`; return it."""
        document, token = self._read()
        mine = document.get("attempt") == attempt and "over" not in document
        if mine and document == last:
            document = {**document, "beat": document["beat"] + 1}
            self._write(document, token)
        return document

    def over(self, code: int, line: str) -> None:
        """Write down how the run ended."""
        document, token = self._read()
        self._write({**document, "over": [code, line]}, token)

    def _lives(self, document: dict[str, Any]) -> bool:
        """Return whether somebody keeps the record fresh, and does not begin another attempt."""
        changed = timing.wait_for(
            lambda: self._read()[0] != document, STALE_SECONDS, poll_seconds=POLL_SECONDS
        )
        return changed and {**self._read()[0], "beat": 0} == {**document, "beat": 0}

    def _read(self) -> tuple[dict[str, Any], Any]:
        """Return the record, empty where there is none yet, and what names it in a change."""
        found = self._backend.get_state()
        return (json.loads(found[0]), found[1]) if found else ({}, None)

    def _write(self, document: dict[str, Any], token: Any) -> bool:
        """Change the record; return whether it was still the one that the token names."""
        found = self._backend.set_state(json.dumps(document).encode(), token)
        return found is not None and found[2]


class Lookout(threading.Thread):
    """Keeps the record of an attempt fresh, and looks for nodes that wait to come in."""

    def __init__(self, register: Register, attempt: int) -> None:
        super().__init__(name="lookout", daemon=True)
        self._register, self._attempt = register, attempt
        self._ended = threading.Event()
        self.handler: DynamicRendezvousHandler | None = None
        self.waiting = 0

    def run(self) -> None:
        """Look once a second until `stop`; a meeting place that is gone harms no attempt."""
        from torch.distributed.elastic.rendezvous import RendezvousError

        last: dict[str, Any] = {}
        while not self._ended.wait(BEAT_SECONDS):
            try:
                last = self._register.beat(self._attempt, last)
                if self.handler is not None:
                    self.waiting = self.handler.num_nodes_waiting()
            except RendezvousError:
                continue

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self.join(BEAT_SECONDS)
