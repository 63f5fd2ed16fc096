"""What the routes of the server share: settings, models, metrics and the state of the server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from regauge.serving.api_keys import ApiKeys
    from regauge.serving.model_set import ModelSet
    from regauge.serving.server_metrics import ServerMetrics
    from regauge.serving.settings import Serve

State = Literal["starting", "ready", "draining"]


@dataclass
class ServerContext:
    """The state of a server."""

    settings: Serve
    models: ModelSet
    metrics: ServerMetrics
    api_keys: ApiKeys
    state: State = "starting"
    body_bytes: int = 0
    """Bytes of the bodies that are being received or processed."""
    tasks: dict[tuple[str, int], set[asyncio.Task[object]]] = field(default_factory=dict)
    """The tasks that answer the requests of each connection, by its address."""

    @property
    def is_overloaded(self) -> bool:
        """Whether every model would refuse a further request."""
        schedulers = [
            slot.current.scheduler for slot in self.models.loaded if slot.current is not None
        ]
        limit = self.settings.queue.max_wait_seconds
        return bool(schedulers) and all(
            scheduler is not None and scheduler.estimate_wait("interactive") > limit
            for scheduler in schedulers
        )
