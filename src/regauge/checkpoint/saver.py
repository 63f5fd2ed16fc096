"""Saving beside training, and finding what can be loaded."""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from regauge.checkpoint import folder, tensors
from regauge.errors import NoCheckpointError, RegaugeError, TransientError
from regauge.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from regauge.processes import World
    from regauge.training.settings import Checkpoint

Failure = BaseException | None
MOST_LOST = 3
"""Saves in a row that may fail before the run does."""


class Saver:
    """Writes the checkpoints of a run; one at a time, in a thread of its own.

    `moment` is called with each moment of a save and its step; it may fail as the save may.
    """

    def __init__(
        self,
        root: Path,
        settings: Checkpoint,
        world: World,
        moment: Callable[..., None] = folder.nothing,
    ) -> None:
        self._root = root
        self._settings = settings
        self._world = world
        self._moment = moment
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._thread: threading.Thread | None = None
        self._failure: Failure = None
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
        """Save tensors and a JSON state as a step's checkpoint.

        An earlier save that failed is said, and raised when it was the third in a row.
        """
        self.look(wait=True)
        self._step = step
        copies = {name: _copied(value) for name, value in values.items()}
        arguments = (step, copies, state, metrics)
        self._thread = threading.Thread(target=self._guarded, args=arguments, name="checkpoint")
        self._thread.start()
        if self._settings.writing == "blocking":
            self.look(wait=True)

    def look(self, *, wait: bool = False) -> None:
        """Take note of how the save under way ended, if it has; training goes on after a failure.

        Raises the failure of the third save in a row that was lost: the disk does not recover.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
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

    def wait(self) -> None:
        """Wait for the save under way; raises its failure: it was the last one."""
        self.look(wait=True)
        if self._last is not None:
            raise self._last

    def _guarded(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again by the next `wait`
            self._failure = error

    def _write(
        self,
        step: int,
        values: dict[str, Tensor],
        state: dict[str, Any],
        metrics: dict[str, float],
    ) -> None:
        part = folder.part_of(self._root, step)
        moment = partial(self._moment, step=step)
        with self._together():
            moment("begin")
            if self._world.first:
                _empty(part)
        files: dict[str, dict[str, Any]] = {}
        with self._together():
            moment("staged")
        with self._together():
            tensors.write(part, values, self._group)
            moment("written")
            files = self._own_files(part, state)
        everything = self._gathered(files)
        with self._together():
            if self._world.first:
                folder.commit(self._root, step, everything, moment)
                self._keep_best(step, metrics)
                moment("retention")
                folder.retain(self._root, self._settings.keep, step)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Do a part of a save; where one process fails in it, all of them raise after it."""
        problem: Failure = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again, here and on the others
            problem = error
        self._agree(problem)

    def _own_files(self, part: Path, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Check, flush and hash a share of the files; the first process adds the state."""
        if self._group is not None:
            dist.barrier(self._group)
        if self._world.first:
            folder.write_json(part / folder.STATE, state)
            if problem := tensors.damage(part):
                raise TransientError(problem, "start the run again")
        names = sorted(path.name for path in part.glob("*.safetensors"))
        mine = names[self._world.rank :: self._world.size]
        if self._world.first:
            others = (path.name for path in part.iterdir() if path.name not in names)
            mine += sorted(name for name in others if not name.startswith("."))
        folder.flush(part / name for name in mine)
        return {name: folder.digest(part / name) for name in mine}

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
        value, old = metrics[metric], folder.best(self._root)
        sign = 1 if self._settings.best_is == "highest" else -1
        if old is None or sign * value > sign * old["value"]:
            document = {"name": folder.name_of(step), "metric": metric, "value": value}
            folder.write_json(self._root / folder.BEST, document)


def newest(root: Path, world: World) -> Path | None:
    """Return the newest checkpoint that is whole, the same on every process; None without any.

    Raises NoCheckpointError when there are some and all are damaged: a run never starts again from
    nothing in silence.
    """
    if world.first:
        folder.recover(root)
    if world.size > 1:
        dist.barrier()
    damages = []
    for step in folder.steps(root):
        path = root / folder.name_of(step)
        damage = _first_damage(damage_of(path, world), world)
        if damage is None:
            return path
        damages.append(damage)
        logger.warning("checkpoint passed over: %s", damage)
    if damages:
        raise NoCheckpointError(
            f"no checkpoint in {root} can be loaded: {damages[0]}",
            "restore one from a copy, or start a new run in another output.folder",
        )
    return None


def damage_of(path: Path, world: World) -> str | None:
    """Return what is wrong with a checkpoint, or None; each process looks at a share of it."""
    return folder.damage(path, rank=world.rank, size=world.size) or tensors.damage(path)


def _first_damage(damage: str | None, world: World) -> str | None:
    if world.size == 1:
        return damage
    everywhere: list[Any] = [None] * world.size
    dist.all_gather_object(everywhere, damage)
    return next((found for found in everywhere if found), None)


def _copied(value: Tensor) -> Tensor:
    """Return a copy that training does not touch; a shard stays a shard on its device."""
    value = value.detach()
    return value.clone() if isinstance(value, DTensor) else value.to("cpu", copy=True)


def _empty(part: Path) -> None:
    """Make a part folder with nothing of an earlier attempt in it."""
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def load(path: Path, values: dict[str, Tensor]) -> dict[str, Any]:
    """Fill tensors from a checkpoint and return its state.

    Raises NoCheckpointError for one of another model.
    """
    try:
        tensors.read_into(path, values)
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | RegaugeError):
            raise
        said = str(error).strip().splitlines()
        raise NoCheckpointError(
            f"{path} does not fit this run: {said[-1] if said else repr(error)}",
            "move it away, or name the run that it is of",
        ) from error
    return folder.read_state(path)
