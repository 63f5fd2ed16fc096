"""What a node does at the meeting place while it waits or works there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import RendezvousError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    from regauge.supervision.nodes.register import Register

BEAT_SECONDS = 1.0


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
