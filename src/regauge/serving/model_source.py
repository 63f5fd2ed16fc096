"""Where a served model comes from: a folder, or a model registry stage.

The stage is read at every check. Its version is verified, and downloaded from an S3 store, before
it is loaded.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from regauge.registry.model_reference import fetch_version, parse_reference
from regauge.registry.registry import Registry
from regauge.system.errors import DataError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.registry.model_reference import ModelReference
    from regauge.registry.registered_version import RegisteredVersion

T = TypeVar("T")
RETRY_SECONDS = 60.0
"""Time after which a corrupted version is verified again."""


class ModelSource:
    """A model's folder, which may change while the server runs."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._path = Path(text).expanduser()
        self._reference: ModelReference | None = parse_reference(text)
        self._registry: Registry | None = None
        self._folder: Path | None = None
        self._version: tuple[str, int] | None = None
        self._refused: tuple[str, int] | None = None
        self._refused_at = 0.0

    @property
    def is_registered(self) -> bool:
        """Whether versions come from a registry, whose files never change."""
        return self._reference is not None

    def find_folder(self) -> Path:
        """Return the current version's folder, with links resolved; this may take long.

        A corrupted stage version is reported once a minute; in between, the previous version's
        folder is returned. Raises the errors of `Registry.resolve`, and DataError for a corrupted
        version.
        """
        if self._reference is None:
            return self._path.resolve() if self._path.exists() else self._path
        if self._registry is None:
            self._registry = Registry(self._reference.registry)
        version = self._registry.resolve(self._reference.name, self._reference.selector)
        identity = version.content_sha256, version.number
        if self._folder is not None and identity == self._version:
            return self._folder
        is_waiting = time.monotonic() < self._refused_at + RETRY_SECONDS
        if self._folder is not None and identity == self._refused and is_waiting:
            return self._folder
        self._folder = self._fetch(version)
        self._version = identity
        logger.info("%s: %s is version %d", self._name, self._reference, version.number)
        return self._folder

    async def run(self, action: Callable[[], T]) -> T:
        """Return the result of an action that may wait for a store.

        It runs in a thread that does not delay server shutdown.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def set_result(result: T | None, error: BaseException | None) -> None:
            if future.done():  # the waiting task was cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, error = None, None
            try:
                result = action()
            except BaseException as failure:  # noqa: BLE001 - it is raised by the waiting task
                error = failure
            if not loop.is_closed():
                loop.call_soon_threadsafe(set_result, result, error)

        threading.Thread(target=work, name=f"version-of-{self._name}", daemon=True).start()
        return await future

    def _fetch(self, version: RegisteredVersion) -> Path:
        try:
            return fetch_version(version).resolve()
        except DataError:
            self._refused = version.content_sha256, version.number
            self._refused_at = time.monotonic()
            raise
