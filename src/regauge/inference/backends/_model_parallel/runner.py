"""Runs a program on several local devices, with a process for each; this one is rank 0.

The other ranks get the program without weights. Rank 0 sends the weights one at a time, cut to each
rank's shard. So only one process reads and verifies a payload, and a program that is tried during
an export needs no files.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from regauge.inference.backends import Runner
from regauge.inference.backends._model_parallel.group import LostRankError, RankGroup, create_store
from regauge.inference.backends._model_parallel.shard import (
    all_named_tensors,
    build_shard,
    copy_to_meta,
    group_tied_names,
    num_bytes,
    set_tied_tensor,
    slice_for_rank,
    tensor_shapes,
)
from regauge.inference.backends._model_parallel.worker import (
    GRACE_SECONDS,
    START_TIMEOUT_SECONDS,
    RankSpec,
    RankWorker,
    start_worker,
)
from regauge.system.errors import RegaugeError
from regauge.system.log import logger
from regauge.system.units import MIB

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from regauge.inference.backends import ExecutionContext, Payload
    from regauge.inference.backends._model_parallel.worker import ParallelConfig


class ModelParallelRunner(Runner):
    """Runs a program in this process and others.

    If a rank is lost, all other processes are ended, and the next call starts new ones.
    """

    def __init__(self, payload: Payload, context: ExecutionContext, config: ParallelConfig) -> None:
        """Start the other ranks; raises SettingsError if the program cannot be split."""
        self._arguments = payload, context, config
        self._lock = threading.Lock()
        self.ranks: _Ranks | None = None
        self._start()

    def __call__(self, *inputs: np.ndarray) -> Tensor:
        tensors = tuple(map(torch.as_tensor, inputs))
        with self._lock, torch.no_grad():
            output: Tensor = self._run(self.ranks or self._start(), tensors)
            return output

    def close(self) -> None:
        """End the other processes; this also happens if the runner is garbage-collected."""
        if self.ranks is not None:
            self._end()
            self.ranks = None

    def _start(self) -> _Ranks:
        ranks = self.ranks = _Ranks(*self._arguments)
        self._end = weakref.finalize(self, ranks.end)  # also when the interpreter exits
        self._run(ranks)
        return ranks

    def _run(self, ranks: _Ranks, inputs: tuple[Tensor, ...] | None = None) -> Any:
        """Start the ranks, or compute; after any error no process is left waiting."""
        try:
            return ranks.start() if inputs is None else ranks.compute(inputs)
        except LostRankError as lost:
            error = ranks.find_error(lost)
            self.close()
            raise error from None
        except BaseException:
            self.close()
            raise


class _Ranks:
    def __init__(self, payload: Payload, context: ExecutionContext, config: ParallelConfig) -> None:
        self._payload = payload
        self._context = context
        self._config = config
        self._group = RankGroup(0, config.num_devices, config.timeout_seconds)
        self._shard: Any = None
        self.workers: list[RankWorker] = []
        self.bytes_per_rank: list[int] = []
        """Bytes of weights and buffers on each rank's device."""

    def start(self) -> None:
        """Start the other processes, and send each rank the weights."""
        accelerator, config = self._context.accelerator, self._config
        program = self._payload.build_program().eval()
        self._shard = self._build_shard(program, self._group)
        accelerator.set_precision(self._payload.precision)
        store, port = create_store(START_TIMEOUT_SECONDS)
        self.workers += [start_worker(rank, config) for rank in range(1, config.num_devices)]
        for rank, worker in enumerate(self.workers, start=1):
            worker.receive()
            worker.send(self._build_spec(rank, copy_to_meta(program), port))
        for worker in self.workers:
            worker.receive()
        self._group.join(accelerator.distributed_backend(), store)
        self._send_weights(program)
        self.bytes_per_rank = [
            num_bytes(self._shard),
            *(worker.receive() for worker in self.workers),
        ]
        sizes = ", ".join(f"{size / MIB:.1f}" for size in self.bytes_per_rank)
        total = num_bytes(program) / MIB
        logger.info("weights of %.1f MiB on %d devices: %s MiB", total, config.num_devices, sizes)

    def compute(self, inputs: tuple[Tensor, ...]) -> Tensor:
        device = self._context.device
        for worker in self.workers:
            worker.send([(value.shape, value.dtype) for value in inputs])
        on_device = [value.to(device).contiguous() for value in inputs]
        for value in on_device:
            self._group.broadcast(value)
        output: Tensor = self._shard(*on_device)
        self._context.accelerator.end_microbatch()
        self._group.synchronize(device, self._has_ended_worker)
        return output

    def find_error(self, lost: LostRankError) -> Exception:
        """Return the error from the rank that ended, failed or stopped responding, else `lost`."""
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self.workers:
            try:
                worker.receive(deadline - time.monotonic(), self._config.timeout_seconds)
            except (RegaugeError, RuntimeError) as error:
                return error
        return lost

    def end(self) -> None:
        """Kill the other processes, and leave the group."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.child.kill()  # all of its data also exists in this process
        self._group.abort()

    def _build_spec(self, rank: int, program: nn.Module, port: int) -> RankSpec:
        context = self._context
        return RankSpec(
            rank=rank,
            config=self._config,
            program=program,
            accelerator=context.accelerator,
            precision=self._payload.precision,
            device_index=(context.device.index or 0) + rank,
            threads=context.threads,
            port=port,
        )

    def _build_shard(self, program: nn.Module, group: RankGroup) -> nn.Module:
        return build_shard(copy_to_meta(program), group, self._config.parallelism)

    @torch.no_grad()
    def _send_weights(self, program: nn.Module) -> None:
        """Send every rank its shard's weights, and set this rank's weights."""
        names = group_tied_names(self._shard)
        num_devices = self._config.num_devices
        groups = (RankGroup(rank, num_devices, 0) for rank in range(1, num_devices))
        others = (self._build_shard(program, group) for group in groups)
        shapes_by_rank = [tensor_shapes(shard) for shard in (self._shard, *others)]
        for name, value in all_named_tensors(program).items():
            for rank, shapes in enumerate(shapes_by_rank):
                if name not in shapes:
                    continue
                view = slice_for_rank(value, shapes[name], rank)
                # A copy, because a view would keep the file of all weights mapped.
                shard = view.clone(memory_format=torch.contiguous_format)
                on_device = shard.to(self._context.device)
                if rank:
                    self._group.send_weight(on_device, rank)
                else:
                    set_tied_tensor(self._shard, names[name], on_device)

    def _has_ended_worker(self) -> bool:
        return any(worker.child.exit_code is not None for worker in self.workers)
