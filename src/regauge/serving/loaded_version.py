"""A model version that answers requests: what batches and text generation share."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from regauge.inference.export.manifest import PARITY
from regauge.serving.artifact_snapshot import remove_snapshot
from regauge.system.json_files import find_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.manifest import ProgramEntry
    from regauge.serving.workers.worker_pool import WorkerPool


class LoadedVersion(ABC):
    """An artifact version with workers."""

    pool: WorkerPool[Any]
    """Worker processes."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.program: ProgramEntry = artifact.program
        """The manifest's `program` table."""
        self.loaded_at = time.time()
        """Load time in seconds since 1970."""
        self.name = ""
        """Name used by clients; set by the model slot."""
        self.contract: Mapping[str, object] = {}
        """What clients rely on; set by the model slot."""
        self.content_sha256 = ""
        """Manifest hash; empty until the version has started."""
        self.has_failed = False
        """Whether a streamed answer broke off, which cannot be repeated."""
        self.num_answers = 0
        """How many requests have been computed without a failure."""
        self._num_open = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @abstractmethod
    async def start(self) -> None:
        """Start the workers and load the tokenizer; raises their errors."""

    async def stop(self) -> None:
        """Stop the workers."""
        await self.pool.stop()

    @property
    def worker_pids(self) -> list[int]:
        """Ids of the ready processes."""
        return [worker.pid for worker in self.pool.ready]

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """How many records or requests wait for a worker."""

    @abstractmethod
    def estimate_wait(self) -> float:
        """Return the expected seconds until a new interactive request is answered."""

    @abstractmethod
    def is_overloaded(self, max_wait_seconds: float) -> bool:
        """Return whether a new request would be refused."""

    def count_cache_blocks(self) -> tuple[int, int]:
        """Return the key-value cache blocks in use and in all; zeros without generated text."""
        return 0, 0

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Keep the workers while the block answers a request."""
        self._num_open += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._unused.set()

    async def drain(self) -> None:
        """Stop the workers after the last request, and remove the artifact copy."""
        await self._unused.wait()
        await self.stop()
        await asyncio.to_thread(remove_snapshot, self.artifact)

    def describe(self) -> dict[str, Any]:
        """Return the model, its limits, and quality evidence."""
        artifact, manifest, program = self.artifact, self.artifact.manifest, self.program
        modes = program.pooling.modes if program.pooling else ()
        return {
            "model_sha": self.content_sha256,
            "model_dtype": manifest.compiled.precision,
            "model_type": {program.output_kind: {"pooling": list(modes)}},
            "output_size": program.output_size,
            "labels": list(program.labels),
            "backend": manifest.compiled.backend.kind,
            "quantization": manifest.compiled.quantization,
            "parity": find_json(artifact.folder / PARITY, "export the artifact again"),
        }
