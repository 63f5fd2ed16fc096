"""All models of a server, and their memory limits."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

from regauge.serving.model_slot import ModelSlot
from regauge.serving.model_version import ModelVersion
from regauge.serving.request_errors import InvalidRequestError, UnknownModelError
from regauge.system.processes import inspect_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from concurrent.futures import Executor

    from regauge.serving.loaded_version import LoadedVersion
    from regauge.serving.server_metrics import ServerMetrics
    from regauge.serving.settings import Serve
    from regauge.serving.text_generation.text_version import TextVersion


class ModelSet:
    """A server's models."""

    def __init__(self, settings: Serve, metrics: ServerMetrics, executor: Executor) -> None:
        self._settings = settings
        self.slots = {
            name: ModelSlot(name, settings, metrics, executor) for name in settings.artifacts
        }
        """Models by name; the first is the default."""
        self._lock = asyncio.Lock()

    @property
    def is_lazy(self) -> bool:
        """Whether models are loaded on first request."""
        limits = self._settings.models
        return limits.max_loaded is not None or limits.max_memory_gb is not None

    @property
    def loaded_slots(self) -> list[ModelSlot]:
        """Loaded models, least recently used first."""
        slots = [slot for slot in self.slots.values() if slot.current is not None]
        return sorted(slots, key=lambda slot: slot.last_used)

    @property
    def loaded_versions(self) -> list[LoadedVersion]:
        """Current versions of the loaded models."""
        return [slot.current for slot in self.slots.values() if slot.current is not None]

    async def start(self) -> None:
        """Load the models needed at the start; raises their errors."""
        names = list(self.slots)[:1] if self.is_lazy else list(self.slots)
        tasks = [asyncio.create_task(self.slots[name].load()) for name in names]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def stop(self) -> None:
        await asyncio.gather(*(slot.stop() for slot in self.slots.values()))

    def find(self, name: str | None) -> ModelSlot:
        """Return a model by name, or the default one; raises UnknownModelError."""
        if name is None:
            return next(iter(self.slots.values()))
        if name not in self.slots:
            names = ", ".join(self.slots)
            raise UnknownModelError(f"no model is called '{name[:80]}'; the server has: {names}")
        return self.slots[name]

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[LoadedVersion]:
        """Keep a model version loaded within the block; raises UnknownModelError."""
        slot = self.find(name)
        if slot.current is None and self.is_lazy:
            async with self._lock:  # models that load at the same time would exceed the limits
                await self._make_room(slot)
                await slot.load_for_request()
        async with slot.use() as version:
            yield version

    @asynccontextmanager
    async def use_for_records(self, name: str | None) -> AsyncIterator[ModelVersion]:
        """Keep a record-computing model loaded within the block.

        Raises UnknownModelError, and InvalidRequestError if the model generates text.
        """
        async with self.use(name) as version:
            if not isinstance(version, ModelVersion):
                raise InvalidRequestError("the model generates text; send it to /v1/completions")
            yield version

    @asynccontextmanager
    async def use_for_text(self, name: str | None) -> AsyncIterator[TextVersion]:
        """Keep a text-generating model loaded within the block.

        Raises UnknownModelError, and InvalidRequestError if the model does not generate text.
        """
        async with self.use(name) as version:
            if isinstance(version, ModelVersion):
                kind = version.program.output_kind
                raise InvalidRequestError(f"the model returns {kind}, not generated text")
            yield cast("TextVersion", version)

    async def watch(self) -> None:
        """Check loaded models for new versions until cancelled."""
        while True:
            await asyncio.sleep(self._settings.models.poll_seconds)
            for slot in self.loaded_slots:
                await slot.check_for_new_version()

    async def _make_room(self, slot: ModelSlot) -> None:
        if slot.current is not None:
            return
        limits = self._settings.models
        max_loaded = limits.max_loaded or len(self.slots)
        max_bytes = (limits.max_memory_gb or float("inf")) * 1e9
        while loaded := self.loaded_slots:
            if len(loaded) < max_loaded and self._memory_bytes() < max_bytes:
                break
            await loaded[0].stop()

    def _memory_bytes(self) -> int:
        pids = [pid for version in self.loaded_versions for pid in version.worker_pids]
        return sum(inspect_process(pid).resident_bytes for pid in pids)
