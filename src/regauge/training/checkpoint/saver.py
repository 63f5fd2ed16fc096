"""Saves checkpoints in the background, while training continues."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from regauge.run_folders import checkpoint_files
from regauge.run_folders.remote_checkpoints import RemoteCheckpoints
from regauge.system.errors import TransientError
from regauge.system.files import fsync_paths, write_json
from regauge.system.log import logger
from regauge.system.timing import POLL_SECONDS
from regauge.training.checkpoint import tensors
from regauge.training.checkpoint.loading import download_checkpoint, find_damage, find_newest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor

    from regauge.system.processes import World
    from regauge.training.checkpoint.settings import Checkpoint

T = TypeVar("T")
MAX_LOST_SAVES = 3
"""The run fails after this many consecutive failed saves."""


class Saver:
    """Saves checkpoints one at a time, in a background thread.

    `on_point(point, step=step)` is called at each point of a save; if it raises, the save fails.
    `on_wait()` is called while the process waits for the object store. `on_saved(step, checkpoint)`
    is called in the training thread after a save.
    """

    def __init__(
        self,
        root: Path,
        settings: Checkpoint,
        world: World,
        on_point: Callable[..., None] = checkpoint_files.ignore_point,
        on_wait: Callable[[], None] = lambda: None,
        *,
        on_saved: Callable[[int, Path], None] = lambda _step, _checkpoint: None,
    ) -> None:
        self._root = root
        self._settings = settings
        self._world = world
        self._on_point = on_point
        self._on_wait = on_wait
        self._on_saved = on_saved
        self._remote = RemoteCheckpoints(settings.remote) if settings.remote else None
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._save_in_progress: Future[None] | None = None
        self._has_copied = Event()
        self._has_copied.set()
        self._step = 0
        self._num_lost = 0
        self._last_error: BaseException | None = None

    def save(
        self,
        step: int,
        values: dict[str, Tensor],
        state: dict[str, Any],
        best: dict[str, Any] | None = None,
    ) -> None:
        """Save tensors and a JSON state as a step's checkpoint.

        `best` is this step's metric and value if it is the best step so far. Call `wait_for_copies`
        before the tensors change. First waits for the save in progress, and handles failures like
        `check_save`.
        """
        self.check_save(wait=True)
        self._step = step
        local_values = {name: _clone_shard(value) for name, value in values.items()}
        self._has_copied.clear()
        self._save_in_progress = _start_thread(self._write, step, local_values, state, best)
        if not self._settings.async_save:
            self.check_save(wait=True)

    def wait_for_copies(self) -> None:
        """Wait until the tensors being saved are copied, so they may change."""
        self._has_copied.wait()

    def check_save(self, *, wait: bool = False) -> None:
        """Check whether the save in progress has ended; a failure is logged, training continues.

        Raises the error of the third consecutive failed save, or one not caused by the storage.
        """
        if self._save_in_progress is None or not (wait or self._save_in_progress.done()):
            return
        error = self._wait_for(self._save_in_progress).exception()
        self._save_in_progress = None
        self._num_lost = self._num_lost + 1 if error else 0
        self._last_error = error
        if error is None:
            self._on_saved(self._step, self._root / checkpoint_files.checkpoint_name(self._step))
            return
        if self._num_lost == MAX_LOST_SAVES or not isinstance(error, OSError | TransientError):
            raise error
        if self._world.is_main_process:
            logger.warning(
                "the checkpoint of step %d was not saved; training continues: %s", self._step, error
            )

    def _wait_for(self, work: Future[T]) -> Future[T]:
        """Wait until work ends; report progress while it waits for the object store."""
        while not work.done():
            if self._remote is not None and self._remote.is_waiting:
                self._on_wait()
            wait([work], POLL_SECONDS)
        return work

    def find_newest(self) -> Path | None:
        """Return the newest whole checkpoint, here or in the object store; None without any."""
        search = _start_thread(find_newest, self._root, self._world, self._remote)
        return self._wait_for(search).result()

    def find_step(self, step: int) -> Path | None:
        """Return a step's checkpoint, here or in the object store; None if it is not whole."""
        search = _start_thread(find_damage, self._root, step, self._world, self._remote)
        if self._wait_for(search).result() is not None:
            return None
        return self._root / checkpoint_files.checkpoint_name(step)

    def fetch_best(self, step: int, best: dict[str, Any]) -> None:
        """Record the best checkpoint to keep it; every process calls this.

        Downloads it if only the object store has it. `best` is its metric and value.
        """
        if self._remote is not None:
            download = partial(download_checkpoint, if_missing=True)
            work = _start_thread(download, self._remote, step, self._root, self._world)
            self._wait_for(work).result()
        is_local = (self._root / checkpoint_files.checkpoint_name(step)).is_dir()
        if self._world.is_main_process and is_local:
            self._write_best(step, best)

    def _write_best(self, step: int, best: dict[str, Any]) -> None:
        document = {"checkpoint": checkpoint_files.checkpoint_name(step), **best}
        write_json(self._root / checkpoint_files.BEST, document)

    def wait(self) -> None:
        """Wait for the save in progress, and raise on failure: the last save must not fail."""
        self.check_save(wait=True)
        if self._last_error is not None:
            raise self._last_error

    def _write(
        self,
        step: int,
        values: dict[str, Tensor],
        state: dict[str, Any],
        best: dict[str, Any] | None,
    ) -> None:
        staging = checkpoint_files.staging_folder(self._root, step)
        on_point = partial(self._on_point, step=step)
        with self._raise_together():
            try:
                values = {name: _copy_to_host(value) for name, value in values.items()}
            finally:
                self._has_copied.set()
            on_point("begin")
            if self._world.is_main_process:
                _create_empty_folder(staging)
        files: dict[str, dict[str, Any]] = {}
        with self._raise_together():
            on_point("staged")
        with self._raise_together():
            tensors.save_tensors(staging, values, self._group)
            on_point("written")
        with self._raise_together():
            files = self._finish_local_files(staging, state)
        if self._remote:
            self._upload(self._remote, staging, step, files)
        all_files = self._gather_files(files)
        with self._raise_together():
            if self._world.is_main_process:
                final = checkpoint_files.commit(self._root, step, all_files, on_point)
                if self._remote:
                    self._remote.commit(final / checkpoint_files.MANIFEST, step)
                if best is not None:
                    self._write_best(step, best)
                on_point("retention")
                checkpoint_files.retain(self._root, self._settings.keep_last, step)
                if self._remote:
                    self._remote.retain(checkpoint_files.list_steps(self._root), step)

    def _upload(
        self, remote: RemoteCheckpoints, staging: Path, step: int, names: Iterable[str]
    ) -> None:
        """Upload this process's files, after withdrawing the step's older checkpoint."""
        with self._raise_together():
            if self._world.is_main_process:
                remote.withdraw(step)
        with self._raise_together():
            remote.upload(staging, step, names)

    @contextmanager
    def _raise_together(self) -> Iterator[None]:
        """Run part of a save; if it fails on one process, all processes raise after it.

        A part that may fail calls no collective, because the other processes would wait in it.
        """
        problem: BaseException | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again, on all processes
            problem = error
        if self._group is not None:
            problems: list[Any] = [None] * self._world.size
            dist.all_gather_object(problems, str(problem) if problem else None, group=self._group)
            message = next((text for text in problems if text), None)
            if message and problem is None:
                raise TransientError(f"another process could not save: {message}", "see its log")
        if problem is not None:
            raise problem

    def _finish_local_files(
        self, staging: Path, state: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Flush and hash a share of the files; return file name -> hash and size.

        The main process writes the state and checks all headers first.
        """
        if self._world.is_main_process:
            write_json(staging / checkpoint_files.STATE, state)
            if problem := tensors.find_bad_header(staging):
                raise TransientError(problem, "start the run again")
        names = sorted(path.name for path in staging.glob("*.safetensors"))
        local_names = names[self._world.rank :: self._world.size]
        if self._world.is_main_process:
            others = (path.name for path in staging.iterdir() if path.name not in names)
            local_names += sorted(name for name in others if not name.startswith("."))
        fsync_paths(staging / name for name in local_names)
        return {name: checkpoint_files.describe_file(staging / name) for name in local_names}

    def _gather_files(self, files: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if self._group is None:
            return files
        shares: list[Any] = [None] * self._world.size
        dist.all_gather_object(shares, files, group=self._group)
        return {name: facts for share in shares for name, facts in share.items()}


def _start_thread(work: Callable[..., T], *arguments: Any) -> Future[T]:
    pool = ThreadPoolExecutor(1, "checkpoint")
    future = pool.submit(work, *arguments)
    pool.shutdown(wait=False)
    return future


def _clone_shard(value: Tensor) -> Tensor:
    """Copy a sharded tensor on its device; a whole tensor is returned unchanged."""
    value = value.detach()
    return value.clone() if isinstance(value, DTensor) else value


def _copy_to_host(value: Tensor) -> Tensor:
    """Copy a whole tensor to the host; a sharded tensor is returned unchanged."""
    return value if isinstance(value, DTensor) else value.to("cpu", copy=True)


def _create_empty_folder(folder: Path) -> None:
    """Create a folder; delete what an earlier attempt left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
