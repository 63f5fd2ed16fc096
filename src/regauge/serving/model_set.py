"""All models of a server, and their memory limits."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast, get_args

from regauge.models.io_spec import OutputKind
from regauge.serving.model_slot import TRIAL, ModelSlot
from regauge.serving.model_version import ModelVersion
from regauge.serving.request_errors import InvalidRequestError, UnknownModelError
from regauge.system.processes import inspect_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from concurrent.futures import Executor

    from regauge.serving.loaded_version import LoadedVersion
    from regauge.serving.server_metrics import ServerMetrics
    from regauge.serving.settings import Serve
    from regauge.serving.text_generation.text_version import TextVersion


RECORD_KINDS: tuple[OutputKind, ...] = tuple(
    kind for kind in get_args(OutputKind) if kind != "text"
)


class ModelSet:
    """A server's models."""

    def __init__(self, settings: Serve, metrics: ServerMetrics, executor: Executor) -> None:
        self._settings = settings
        self.slots = {
            name: ModelSlot(name, settings, metrics, executor) for name in settings.artifacts
        }
        """Models by name."""
        self._lock = asyncio.Lock()
        self._loading: dict[str, asyncio.Task[None]] = {}
        """Name -> the load that all requests for a model wait for."""

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
        slots = list(self.slots.values())
        loaded = slots[:1] if self.is_lazy else slots
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(slot.load()) for slot in loaded]
        tasks += [asyncio.create_task(slot.read_program()) for slot in slots[len(loaded) :]]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def stop(self) -> None:
        await asyncio.gather(*(slot.stop() for slot in self.slots.values()))

    def find(
        self, name: str | None, kinds: Sequence[OutputKind] = (), num_texts: int | None = None
    ) -> ModelSlot:
        """Return a model by name, or the first one of these output kinds and number of texts.

        Without such a model, returns the first one. Raises UnknownModelError.
        """
        if name is not None and name not in self.slots:
            names = ", ".join(self.slots)
            raise UnknownModelError(f"no model is called '{name[:80]}'; the server has: {names}")
        if name is not None:
            return self.slots[name]
        slots = list(self.slots.values())
        return next((slot for slot in slots if slot.fits(kinds, num_texts)), slots[0])

    @asynccontextmanager
    async def use(self, slot: ModelSlot) -> AsyncIterator[LoadedVersion]:
        """Keep a model version loaded within the block; its name is that of the request's model."""
        if (trial := TRIAL.get()) is not None:
            trial.model = slot.name
        while slot.current is None and self.is_lazy:  # another model may take the place
            if slot.name not in self._loading:
                loading = asyncio.create_task(self._load(slot))
                loading.add_done_callback(lambda _: self._loading.pop(slot.name))
                self._loading[slot.name] = loading
            await asyncio.shield(self._loading[slot.name])
        async with slot.use() as version:
            yield version

    async def _load(self, slot: ModelSlot) -> None:
        async with self._lock:  # models that load at the same time would exceed the limits
            await self._make_room(slot)
            await slot.load_for_request()

    @asynccontextmanager
    async def use_for_records(
        self,
        name: str | None,
        kinds: Sequence[OutputKind] = RECORD_KINDS,
        num_texts: int | None = None,
    ) -> AsyncIterator[ModelVersion]:
        """Keep a record-computing model loaded within the block; see `find`.

        Raises UnknownModelError, and InvalidRequestError if the model has another output kind.
        """
        async with self.use(self.find(name, kinds, num_texts)) as version:
            if not isinstance(version, ModelVersion):
                raise InvalidRequestError("the model generates text; send it to /v1/completions")
            if (kind := version.program.output_kind) not in kinds:
                raise InvalidRequestError(f"the model returns {kind}, not {' or '.join(kinds)}")
            yield version

    @asynccontextmanager
    async def use_for_text(self, name: str | None) -> AsyncIterator[TextVersion]:
        """Keep a text-generating model loaded within the block.

        Raises UnknownModelError, and InvalidRequestError if the model does not generate text.
        """
        async with self.use(self.find(name, ("text",))) as version:
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
            # Without a minimum time, alternating requests would do nothing but load models.
            latest = time.monotonic() - limits.min_loaded_seconds
            if expired := [slot for slot in loaded if slot.loaded_at <= latest]:
                await expired[0].stop()
            else:
                await asyncio.sleep(min(slot.loaded_at for slot in loaded) - latest)

    def _memory_bytes(self) -> int:
        pids = [pid for version in self.loaded_versions for pid in version.worker_pids]
        return sum(inspect_process(pid).resident_bytes for pid in pids)
