"""Saving beside training."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from regauge.checkpoint import layout, tensors
from regauge.checkpoint.loading import newest
from regauge.checkpoint.remote import Remote
from regauge.errors import TransientError
from regauge.files import flush, write_json
from regauge.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor

    from regauge.checkpoint.settings import Checkpoint
    from regauge.processes import World

T = TypeVar("T")
Failure = BaseException | None
JOIN_SECONDS = 0.2
MOST_LOST = 3
"""Saves in a row that may fail before the run does."""


class Saver:
    """Writes the checkpoints of a run; one at a time, in a thread of its own.

    `moment` is called with each moment of a save and its step; it may fail as the save may. `alive`
    is called while the process waits for what its object store may still answer.
    """

    def __init__(
        self,
        root: Path,
        settings: Checkpoint,
        world: World,
        moment: Callable[..., None] = layout.nothing,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = root
        self._settings = settings
        self._world = world
        self._moment = moment
        self._alive = alive
        self._remote = Remote(settings.root) if settings.root else None
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._saving: Future[None] | None = None
        self._copied = Event()
        self._copied.set()
        self._step = 0
        self._lost = 0
        self._last: Failure = None

    def save(
        self,
        step: int,
        values: dict[str, Tensor],
        state: dict[str, Any],
        metrics: dict[str, float],
    ) -> None:
        """Save tensors and a JSON state as a step's checkpoint; `settle` before they change.

        An earlier save that failed is said, and raised when it was the third in a row.
        """
        self.look(wait=True)
        self._step = step
        parts = {name: _own_part(value) for name, value in values.items()}
        self._copied.clear()
        self._saving = _begun(self._write, step, parts, state, metrics)
        if self._settings.writing == "blocking":
            self.look(wait=True)

    def settle(self) -> None:
        """Wait until the tensors of the save under way are copied: they may change then."""
        self._copied.wait()

    def look(self, *, wait: bool = False) -> None:
        """Take note of how the save under way ended, if it has; training goes on after a failure.

        Raises the failure of the third save in a row that was lost: the disk does not recover.
        """
        if self._saving is None or not (wait or self._saving.done()):
            return
        failure = self._awaited(self._saving).exception()
        self._saving = None
        self._lost = self._lost + 1 if failure else 0
        self._last = failure
        if failure is None:
            return
        if self._lost == MOST_LOST or not isinstance(failure, OSError | TransientError):
            raise failure
        if self._world.first:
            logger.warning(
                "the checkpoint of step %d was not saved, and training goes on: %s",
                self._step,
                failure,
            )

    def _awaited(self, work: Future[T]) -> Future[T]:
        """Wait for work to end, and give signs of life while it waits for the object store."""
        while not work.done():
            if self._remote is not None and self._remote.asking:
                self._alive()
            wait([work], JOIN_SECONDS)
        return work

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint, here or in the object store; None without any."""
        return self._awaited(_begun(newest, self._root, self._world, self._remote)).result()

    def wait(self) -> None:
        """Wait for the save under way; raises its failure: it was the last one."""
        self.look(wait=True)
        if self._last is not None:
            raise self._last

    def _write(
        self,
        step: int,
        values: dict[str, Tensor],
        state: dict[str, Any],
        metrics: dict[str, float],
    ) -> None:
        part = layout.part_of(self._root, step)
        moment = partial(self._moment, step=step)
        with self._together():
            try:
                values = {name: _copied(value) for name, value in values.items()}
            finally:
                self._copied.set()
            moment("begin")
            if self._world.first:
                _empty(part)
        files: dict[str, dict[str, Any]] = {}
        with self._together():
            moment("staged")
        with self._together():
            tensors.write(part, values, self._group)
            moment("written")
        with self._together():
            files = self._own_files(part, state)
        if self._remote:
            self._upload(self._remote, part, step, files)
        everything = self._gathered(files)
        with self._together():
            if self._world.first:
                final = layout.commit(self._root, step, everything, moment)
                if self._remote:
                    self._remote.commit(final / layout.MANIFEST, step)
                self._keep_best(step, metrics)
                moment("retention")
                layout.retain(self._root, self._settings.keep, step)
                if self._remote:
                    self._remote.retain(layout.steps(self._root), step)

    def _upload(self, remote: Remote, part: Path, step: int, names: Iterable[str]) -> None:
        """Copy this process's files to the object store, once what it has of that step is none."""
        with self._together():
            if self._world.first:
                remote.withdraw(step)
        with self._together():
            remote.put(part, step, names)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Do a part of a save; where one process fails in it, all of them raise after it.

        A part that may fail calls no collective: the others would wait in it.
        """
        problem: Failure = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again, here and on the others
            problem = error
        self._agree(problem)

    def _own_files(self, part: Path, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Check, flush and hash a share of the files; the first process adds the state."""
        if self._world.first:
            write_json(part / layout.STATE, state)
            if problem := tensors.damage(part):
                raise TransientError(problem, "start the run again")
        names = sorted(path.name for path in part.glob("*.safetensors"))
        mine = names[self._world.rank :: self._world.size]
        if self._world.first:
            others = (path.name for path in part.iterdir() if path.name not in names)
            mine += sorted(name for name in others if not name.startswith("."))
        flush(part / name for name in mine)
        return {name: layout.digest(part / name) for name in mine}

    def _gathered(self, files: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if self._group is None:
            return files
        shares: list[Any] = [None] * self._world.size
        dist.all_gather_object(shares, files, group=self._group)
        return {name: facts for share in shares for name, facts in share.items()}

    def _agree(self, problem: Failure) -> None:
        """Raise on every process when one of them has a problem."""
        if self._group is not None:
            problems: list[Any] = [None] * self._world.size
            dist.all_gather_object(problems, str(problem) if problem else None, group=self._group)
            told = next((text for text in problems if text), None)
            if told and problem is None:
                raise TransientError(f"another process could not save: {told}", "see its log")
        if problem is not None:
            raise problem

    def _keep_best(self, step: int, metrics: dict[str, float]) -> None:
        metric = self._settings.best
        if metric is None or metric not in metrics:
            return
        value, old = metrics[metric], layout.best(self._root)
        sign = 1 if self._settings.best_is == "highest" else -1
        if old is None or sign * value > sign * old["value"]:
            document = {"name": layout.name_of(step), "metric": metric, "value": value}
            write_json(self._root / layout.BEST, document)


def _begun(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Begin work in a thread that ends with it."""
    pool = ThreadPoolExecutor(1, "checkpoint")
    future = pool.submit(work, *arguments)
    pool.shutdown(wait=False)
    return future


def _own_part(value: Tensor) -> Tensor:
    """Return a copy of a shard, on its device, or a whole tensor as it is."""
    value = value.detach()
    return value.clone() if isinstance(value, DTensor) else value


def _copied(value: Tensor) -> Tensor:
    """Return a whole tensor's copy on the host, or the copy of a shard as it is."""
    return value if isinstance(value, DTensor) else value.to("cpu", copy=True)


def _empty(part: Path) -> None:
    """Make a part folder with nothing of an earlier attempt in it."""
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
