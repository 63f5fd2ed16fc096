"""A named model: the current version, and how a new one replaces it.

A new version is loaded beside the current one. It may first answer a share of the requests, as a
canary. The old version is stopped after its last request.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from regauge.inference.export.artifact import is_artifact
from regauge.inference.export.manifest import MANIFEST
from regauge.registry.model_reference import fetch_version, parse_reference
from regauge.registry.registry import Registry
from regauge.serving.artifact_snapshot import create_snapshot, remove_snapshot
from regauge.serving.model_version import ModelVersion, open_served_artifact
from regauge.serving.request_errors import UnavailableError
from regauge.system.errors import DataError, RegaugeError, SettingsError, first_line
from regauge.system.files import read_stamps
from regauge.system.json_files import find_json, hash_document
from regauge.system.log import logger
from regauge.system.timing import POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from concurrent.futures import Executor

    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.manifest import ProgramEntry
    from regauge.models.io_spec import OutputKind
    from regauge.registry.model_reference import ModelReference
    from regauge.registry.registered_version import RegisteredVersion
    from regauge.serving.loaded_version import LoadedVersion
    from regauge.serving.server_metrics import ServerMetrics
    from regauge.serving.settings import Serve
    from regauge.system.files import Stamps

"""Path, inode, size and time in nanoseconds of each file, with links resolved."""


R = TypeVar("R")
T = TypeVar("T")
VARIABLE_WIDTHS = frozenset({"text", "entities"})
"""Output kinds whose width follows from the length of a text."""
PADDING_PARTS = ("padding", "truncation")
RETRY_SECONDS = 60.0
"""Time after which a corrupted version is verified again."""


@dataclass
class CanaryTrial:
    """The canaries that a request uses.

    If they fail, the current versions answer the request; their success discards the canaries.
    """

    discards: list[Callable[[str], None]] = field(default_factory=list)
    """A function per canary, which takes the problem."""
    is_over: bool = False
    """Whether only current versions answer."""
    model: str = ""
    """The request's model name."""
    num_failures: int = 0
    """Records reported as failed in an answer with status 200."""

    async def run(self, answer: Callable[[], Awaitable[R]]) -> R:
        """Return the answer of the canaries, or if they fail of the current versions.

        Raises the errors of the current versions.
        """
        TRIAL.set(self)
        try:
            response = await answer()
            problem, num_failures = "it could not compute a record", float(self.num_failures)
            if not (self.discards and num_failures):
                return response
        except Exception as error:
            if not self.discards:
                raise
            problem, num_failures = first_line(error), math.inf
        self.is_over, self.num_failures = True, 0
        response = await answer()
        if self.num_failures < num_failures:
            for discard in self.discards:
                discard(problem)
        return response


TRIAL: ContextVar[CanaryTrial | None] = ContextVar("TRIAL", default=None)
"""The trial of the current request."""


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


class ModelSlot:
    """A model with the versions that answer its requests."""

    def __init__(
        self, name: str, settings: Serve, metrics: ServerMetrics, executor: Executor
    ) -> None:
        self.name = name
        """Name used by clients."""
        self._source = ModelSource(name, settings.artifacts[name])
        self.current: LoadedVersion | None = None
        """Version that answers requests; None if the model is not loaded."""
        self.canary: LoadedVersion | None = None
        """Version that gets a share of the requests."""
        self.last_used = 0.0
        """Time of the last request."""
        self.loaded_at = 0.0
        """When the model was loaded, on time.monotonic()."""
        self._settings = settings
        self._metrics = metrics
        self._executor = executor
        self._lock = asyncio.Lock()
        self._fingerprint: Stamps | None = None
        self._contract: Mapping[str, object] = {}
        """What clients rely on: the contract of the current version, or of the last one."""
        self._program: ProgramEntry | None = None
        """What the model computes, if known; also while it is not loaded."""
        self._check: Callable[[Artifact], object] = lambda _: None
        self._required_files: Sequence[Path] = ()
        self._source_problem = ""
        self._num_requests = 0
        self._stopping: set[asyncio.Task[None]] = set()
        self._promoting: asyncio.Task[None] | None = None

    def fits(self, kinds: Sequence[OutputKind], num_texts: int | None) -> bool:
        """Return whether the model has one of these output kinds, and reads this many texts."""
        program = self.current.program if self.current is not None else self._program
        if program is None or (kinds and program.output_kind not in kinds):
            return False
        return num_texts is None or len(program.fields.text_fields) == num_texts

    async def read_program(self) -> None:
        """Read what the model computes, before it is loaded; loading reports an error."""
        with suppress(RegaugeError):
            folder, _ = await self._find_version()
            artifact = await self._source.run(partial(open_served_artifact, folder))
            self._program = artifact.program

    def require(self, check: Callable[[Artifact], object], files: Sequence[Path]) -> None:
        """Refuse versions for which `check` raises, until one of these files changes."""
        self._check, self._required_files = check, files

    async def load(self) -> LoadedVersion:
        """Load the model if necessary; raises errors from loading."""
        if self.current is not None:
            return self.current
        async with self._lock:
            if self.current is None:
                folder, fingerprint = await self._find_version()
                self.current = await self._start_version(folder)
                self._contract, self._program = self.current.contract, self.current.program
                self._fingerprint = fingerprint
                self.loaded_at = time.monotonic()
            return self.current

    async def load_for_request(self) -> None:
        """Load the model if necessary; raises UnavailableError on failure."""
        try:
            await self.load()
        except RegaugeError as error:
            raise UnavailableError(f"model '{self.name}' cannot be loaded: {error}") from None

    async def unload(self) -> None:
        """Stop the versions after their last requests."""
        if self._promoting is not None:
            self._promoting.cancel()
        async with self._lock:
            for version in (self.current, self.canary):
                if version is not None:
                    self._stop_later(version)
            self.current = self.canary = None

    async def stop(self) -> None:
        """Stop all versions and wait for their last requests."""
        await self.unload()
        await asyncio.gather(*self._stopping, return_exceptions=True)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[LoadedVersion]:
        """Keep a version loaded while the block answers a request.

        Raises UnavailableError if the model cannot be loaded.
        """
        self.last_used = time.monotonic()
        await self.load_for_request()
        version = self._select_version()
        with version.keep_open():
            yield version
        if version.has_failed:
            self._discard_canary(version, "an answer broke off")

    async def check_for_new_version(self) -> None:
        """Replace the current version if the folder's files, or the stage, have changed.

        A version that fails to load is tried again when another file changes.
        """
        try:
            folder, fingerprint = await self._find_version()
        except RegaugeError as error:
            if str(error) != self._source_problem:
                logger.error("%s keeps its version: %s", self.name, error)
            self._source_problem = str(error)
            return
        self._source_problem = ""
        if self.current is None or not fingerprint or fingerprint == self._fingerprint:
            return
        self._fingerprint = fingerprint
        try:
            version = await self._start_version(folder)
        except (RegaugeError, OSError) as error:
            logger.error("%s keeps its version: the new one does not load: %s", self.name, error)
            return
        if self.current is None or version.content_sha256 == self.current.content_sha256:
            await version.drain()
            return
        self._replace_canary()
        share = self._settings.models.canary_share
        if share:
            self.canary = version
            seconds = self._settings.models.canary_seconds
            message = "%s: a new version gets %g %% of the requests for %g s"
            logger.info(message, self.name, 100 * share, seconds)
            loop = asyncio.get_running_loop()
            self._promoting = loop.create_task(self._promote_later(version))
        else:
            await self._promote(version)

    def _replace_canary(self) -> None:
        if self.canary is not None:
            self._stop_later(self.canary)
            self.canary = None

    async def _promote_later(self, version: LoadedVersion) -> None:
        """Promote the canary after its time and its answers, unless a request has failed."""
        limits = self._settings.models
        await asyncio.sleep(limits.canary_seconds)
        if self.canary is version and version.num_answers < limits.canary_requests:
            message = "%s: the new version has answered %d of %d requests, so it stays a canary"
            logger.warning(message, self.name, version.num_answers, limits.canary_requests)
        while self.canary is version and version.num_answers < limits.canary_requests:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        if self.canary is version:
            await self._promote(version)

    async def _promote(self, version: LoadedVersion) -> None:
        async with self._lock:
            previous, self.current, self.canary = self.current, version, None
            self._contract, self._program = version.contract, version.program
            if previous is not None:
                self._stop_later(previous)
        logger.info("%s: replaced by version %s", self.name, version.content_sha256[:12])

    def _discard_canary(self, version: LoadedVersion, problem: str) -> None:
        if self.canary is version:
            logger.error("%s keeps its version: the new one failed: %s", self.name, problem)
            self._stop_later(version)
            self.canary = None

    def _select_version(self) -> LoadedVersion:
        """Return the version for the next request: every 1 / share-th goes to the canary."""
        if self.current is None:
            raise UnavailableError(f"model '{self.name}' was unloaded", retry_after=1)
        trial = TRIAL.get()
        if self.canary is None or trial is None or trial.is_over:
            return self.current
        share = self._settings.models.canary_share
        self._num_requests += 1
        is_canary = int(self._num_requests * share) > int((self._num_requests - 1) * share)
        if not is_canary:
            return self.current
        trial.discards.append(partial(self._discard_canary, self.canary))
        return self.canary

    async def _start_version(self, folder: Path) -> LoadedVersion:
        """Start a folder, with links resolved: this version's workers never load another one."""
        artifact, contract = await self._source.run(partial(self._open_artifact, folder))
        version: LoadedVersion
        if artifact.program.output_kind == "text":
            from regauge.serving.text_generation.text_version import TextVersion

            version = TextVersion(artifact, self._settings, self._metrics)
        else:
            version = ModelVersion(artifact, self._settings, self._metrics, self._executor)
        version.contract, version.name = contract, self.name
        try:
            await version.start()
        except BaseException:
            await version.stop()
            remove_snapshot(artifact)
            raise
        return version

    def _open_artifact(self, folder: Path) -> tuple[Artifact, Mapping[str, object]]:
        artifact = open_served_artifact(folder)
        contract = read_contract(artifact)
        if self._contract and not self._settings.models.allow_other_contract:
            _compare_contracts(self._contract, contract, artifact)
        self._check(artifact)
        has_fixed_files = self._source.is_registered or not is_artifact(folder)
        if has_fixed_files or not self._settings.models.snapshot:
            return artifact, contract
        return create_snapshot(artifact), contract

    async def _find_version(self) -> tuple[Path, Stamps]:
        def find() -> tuple[Path, Stamps]:
            folder = self._source.find_folder()
            return folder, _read_fingerprint(folder, self._required_files)

        return await self._source.run(find)

    def _stop_later(self, version: LoadedVersion) -> None:
        task = asyncio.get_running_loop().create_task(version.drain())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)


def read_contract(artifact: Artifact) -> dict[str, object]:
    """Return what clients rely on in a model's answers: name -> comparable content."""
    program = artifact.program
    contract: dict[str, object] = {
        "output kind": program.output_kind,
        "width": None if program.output_kind in VARIABLE_WIDTHS else program.output_size,
        "labels": program.labels,
        "activation": program.activation,
        "text fields": program.fields.text_fields,
    }
    if program.tokenization is None:
        return {**contract, "input tensors": program.inputs}
    tokenizer = find_json(artifact.tokenizer_folder / "tokenizer.json", "export the model again")
    # How a library pads and truncates is saved with a tokenizer, but does not change its tokens.
    parts = {name: part for name, part in (tokenizer or {}).items() if name not in PADDING_PARTS}
    return {**contract, "tokenizer": hash_document(parts)}


def _compare_contracts(
    current: Mapping[str, object], new: Mapping[str, object], artifact: Artifact
) -> None:
    """Raise SettingsError if a version would break the clients of the current one."""
    names = [name for name in new if new[name] != current.get(name)]
    if names:
        problem = f"{artifact.origin} has another {' and '.join(names)}"
        remedy = "serve it under another name, or set serve.models.allow_other_contract = true"
        raise SettingsError(problem, remedy)


def _read_fingerprint(folder: Path, required_files: Sequence[Path]) -> Stamps:
    """Return a fingerprint of an artifact's files and other ones; empty without a manifest."""
    try:
        folder = folder.resolve(strict=True)
        if not (folder / MANIFEST).is_file():
            return ()
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        paths += filter(Path.is_file, required_files)
        return read_stamps(paths)
    except OSError:  # the folder is being replaced
        return ()
