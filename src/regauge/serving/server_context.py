"""What the server's routes share: settings, models, metrics and state."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from regauge.serving.api_keys import ApiKeys
    from regauge.serving.model_set import ModelSet
    from regauge.serving.server_metrics import ServerMetrics
    from regauge.serving.settings import Serve

T = TypeVar("T")
State = Literal["starting", "ready", "draining"]
OVERLOAD_SECONDS = 2.0
"""How long after a refusal the server reports overload."""


@dataclass
class ServerContext:
    """A server's state."""

    settings: Serve
    models: ModelSet
    metrics: ServerMetrics
    api_keys: ApiKeys
    executor: Executor
    """Threads for long work, such as tokenizing long texts."""
    state: State = "starting"
    body_bytes: int = 0
    """Total size of the bodies being received or processed."""
    refused_at: float = -math.inf
    """Time of the last refusal due to overload."""
    tasks: dict[tuple[str, int], set[asyncio.Task[object]]] = field(default_factory=dict)
    """Connection address -> tasks answering requests."""

    async def run_in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, function, *arguments)

    @property
    def has_refused(self) -> bool:
        """Whether a request was refused due to overload in the last seconds."""
        return time.monotonic() - self.refused_at < OVERLOAD_SECONDS

    @property
    def is_overloaded(self) -> bool:
        """Whether every model would refuse a new request."""
        limit = self.settings.queue.max_wait_seconds
        versions = self.models.loaded_versions
        return bool(versions) and all(version.is_overloaded(limit) for version in versions)
