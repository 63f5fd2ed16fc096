"""Runs worker processes on this machine, one per device or per group of CPU cores."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.inference.predict.executors import Executor
from regauge.inference.predict.shard_queue import ShardId
from regauge.system import stop_signals
from regauge.system.children import FunctionProcess, start_function
from regauge.system.errors import NoProgressError, RegaugeError, TransientError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.accelerators import Accelerator
    from regauge.inference.predict.shard_queue import ShardQueue
    from regauge.inference.predict.worker import WorkerSpec

WORKER = "regauge.inference.predict.executors._process:run_worker_process"
SHARDS_IN_FLIGHT = 2
"""Shards per worker at a time: it reads one while it computes the other."""
SIGKILL_EXIT_CODE = -9
"""Exit code after SIGKILL, which the kernel sends when memory runs out."""
IDLE_SECONDS = 1.0
"""Longest wait for an event."""
SHUTDOWN_SECONDS = 10.0
"""Seconds for workers to end before they are killed."""


class Local(Executor):
    """Replaces a lost worker and gives the shards to others."""

    def run(self, spec: WorkerSpec, shard_queue: ShardQueue) -> Iterator[dict[str, Any]]:
        pool = _WorkerPool(spec, shard_queue)
        try:
            pool.start(_count_workers(spec, shard_queue))
            while shard_queue.num_unfinished:
                yield from pool.poll()
            pool.shut_down()
        finally:
            pool.kill()


@dataclass
class _WorkerProcess:
    device: int
    """Device index; identifies the worker."""
    child: FunctionProcess
    last_event: float
    """Time of the last event, on the monotonic clock."""
    is_ready: bool = False
    max_shards: int = SHARDS_IN_FLIGHT
    """How many shards it may have at a time."""
    shards: list[ShardId] = field(default_factory=list)


class _WorkerPool:
    def __init__(self, spec: WorkerSpec, shard_queue: ShardQueue) -> None:
        self._spec = spec
        self._shard_queue = shard_queue
        self._execution = spec.job.settings.execution
        self._losses: Counter[ShardId | None] = Counter()
        """Shard -> lost workers while working on it; None for a loss during the start."""
        self._halvings = 0
        self._workers: list[_WorkerProcess] = []

    def start(self, count: int) -> None:
        self._workers = [self._start_worker(device) for device in range(count)]

    def poll(self) -> Iterator[dict[str, Any]]:
        """Give shards to workers and yield events for up to a second; replace lost workers."""
        for worker in self._workers:
            self._send_shards(worker)
        readable = wait([worker.child.pipe for worker in self._workers], IDLE_SECONDS)
        timeout = self._execution.hang_timeout_seconds
        for worker in list(self._workers):
            try:
                pipe = worker.child.pipe
                while pipe in readable and pipe.poll():
                    worker.last_event = time.monotonic()
                    yield from self._handle_event(worker, pipe.recv())
            except (EOFError, ConnectionResetError):
                yield self._replace(worker, "ended")
                continue
            except TransientError as error:
                yield self._replace(worker, f"failed: {error.problem}", error)
                continue
            if time.monotonic() - worker.last_event > timeout:
                yield self._replace(worker, f"reported no progress for {timeout:g} s")
        yield {"event": "idle"}  # so that the caller can stop

    def shut_down(self) -> None:
        """Let the workers end; kill those that do not."""
        for worker in self._workers:
            worker.child.pipe.close()
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for worker in self._workers:
            worker.child.wait(deadline - time.monotonic())

    def kill(self) -> None:
        for worker in self._workers:
            worker.child.kill()

    def _send_shards(self, worker: _WorkerProcess) -> None:
        with suppress(BrokenPipeError):
            while len(worker.shards) < worker.max_shards:
                shard = self._shard_queue.claim(worker.device)
                if shard is None:
                    break
                worker.shards.append(shard)
                worker.child.pipe.send(shard)

    def _handle_event(
        self, worker: _WorkerProcess, event: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        kind = event["event"]
        if kind == "failed":
            error: RegaugeError = event["error"]
            raise error
        if kind == "shard":
            line = event["line"]
            shard = ShardId(line["piece"], line["part"])
            worker.shards.remove(shard)
            worker.max_shards = SHARDS_IN_FLIGHT
            yield {**line, "event": kind}
            self._shard_queue.finish(shard, is_last=line["is_last"])
        elif kind == "past_end":
            worker.shards.remove(event["shard"])
            self._shard_queue.mark_past_end(event["shard"])
        else:
            worker.is_ready = True
            yield {**event, "worker": worker.device}

    def _replace(
        self, worker: _WorkerProcess, reason: str, error: TransientError | None = None
    ) -> dict[str, Any]:
        """Replace a lost worker and requeue the shards; return the event.

        After SIGKILL the next worker halves the batch size, because memory may have run out. If a
        shard has lost `max_attempts` workers, raises the last error, or NoProgressError.
        """
        worker.child.kill()
        shards = self._shard_queue.requeue(worker.device)
        blamed = shards[0] if shards and worker.is_ready else None
        self._losses[blamed] += 1
        code = worker.child.exit_code
        if code == SIGKILL_EXIT_CODE and reason == "ended":
            self._halvings += 1
        activity = f"shard {blamed.name}" if blamed else "the start"
        if self._losses[blamed] >= self._execution.max_attempts:
            if error is not None:
                raise error
            problem = (
                f"{activity} lost {self._losses[blamed]} workers,"
                f" the last one {reason} (exit code {code})"
            )
            remedy = "read the log above, and correct or remove the input file"
            raise NoProgressError(problem, remedy)
        logger.warning(
            "Worker %d %s (exit code %s) at %s; starting another.",
            worker.device,
            reason,
            code,
            activity,
        )
        replacement = self._start_worker(worker.device)
        replacement.max_shards = 1  # so that the next loss has one shard to blame
        self._workers[self._workers.index(worker)] = replacement
        return {"event": "lost", "worker": worker.device, "reason": reason, "exit_code": code}

    def _start_worker(self, device: int) -> _WorkerProcess:
        with stop_signals.block_signals():
            child = start_function(WORKER)
        with suppress(BrokenPipeError):  # its end is noticed by `poll`
            child.pipe.send((self._spec, device, self._halvings))
        return _WorkerProcess(device, child, time.monotonic())


def _count_workers(spec: WorkerSpec, shard_queue: ShardQueue) -> int:
    """Return the number of workers: one per device, on a CPU at most one per unfinished piece."""
    from regauge.system.processes import available_cores

    workers, resources = spec.job.settings.execution.workers, spec.resources
    if workers != "auto":
        return workers
    accelerator: Accelerator = config.parse_choice("accelerators", resources.accelerator)
    if accelerator.on_host:
        cores = resources.threads * resources.devices
        return max(1, min(available_cores() // cores, shard_queue.num_unfinished))
    return max(1, accelerator.num_devices() // resources.devices)
