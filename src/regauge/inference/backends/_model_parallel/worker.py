"""Worker processes for all ranks but rank 0: starting them, and their main loop.

A worker computes everything that rank 0 computes. It ends with rank 0's process.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from regauge import accelerators
from regauge.inference.backends._model_parallel.group import LostRankError, RankGroup, connect_store
from regauge.inference.backends._model_parallel.shard import (
    Parallelism,
    all_named_tensors,
    build_shard,
    group_tied_names,
    num_bytes,
    set_tied_tensor,
)
from regauge.system.children import FunctionProcess, start_function
from regauge.system.errors import (
    RegaugeError,
    SettingsError,
    TransientError,
    describe_error,
    first_line,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import nn

    from regauge.accelerators import Accelerator, Precision

WORKER = "regauge.inference.backends._model_parallel.worker:run_worker"
START_TIMEOUT_SECONDS = 300.0
"""Includes the import of the libraries from a slow disk on a loaded machine."""
GRACE_SECONDS = 2.0
"""Seconds for a worker to report an error, or to exit."""
RETRY_REMEDY = "run the same command again"


@dataclass(frozen=True)
class ParallelConfig:
    """How a program is split over devices."""

    num_devices: int
    parallelism: Parallelism
    timeout_seconds: float
    """Maximum seconds to wait for another rank."""


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank's process needs to build the shard."""

    rank: int
    config: ParallelConfig
    program: nn.Module
    """The program on the meta device."""
    accelerator: Accelerator
    precision: Precision
    device_index: int
    threads: int
    """CPU threads of the process."""
    port: int
    """Store port through which the ranks connect."""


@dataclass(frozen=True)
class RankWorker:
    """Another rank's process, as rank 0 uses it."""

    name: str
    child: FunctionProcess

    def send(self, message: Any) -> None:
        """Send a message; raises LostRankError if it is not received in time.

        Raises SettingsError if the message cannot be pickled, for example a module with a lambda.
        """
        try:
            self.child.pipe.send(message)
        except OSError as error:
            raise LostRankError(f"{self.name} is lost: {error}", RETRY_REMEDY) from None
        except Exception as error:  # pickling errors have no common base class
            problem = f"the program cannot be pickled for {self.name}: {first_line(error)}"
            raise SettingsError(problem, "set devices = 1") from error

    def receive(
        self,
        seconds: float = START_TIMEOUT_SECONDS,
        timeout_seconds: float = START_TIMEOUT_SECONDS,
    ) -> Any:
        """Return the worker's next message.

        Waits for `seconds`, which are the rest of `timeout_seconds`. Raises the worker's own error
        if it failed, and TransientError if it ended or did not respond.
        """
        try:
            event, message = self.child.receive(seconds)
        except TimeoutError:
            problem = f"{self.name} has not responded for {timeout_seconds:g} s"
            raise TransientError(problem, RETRY_REMEDY) from None
        except EOFError:
            problem = f"{self.name} ended with exit code {self.child.wait(GRACE_SECONDS)}"
            raise TransientError(problem, RETRY_REMEDY) from None
        if event == "failed":
            raise message
        return message


def start_worker(rank: int, config: ParallelConfig) -> RankWorker:
    """Start a rank's process, which dies with this process."""
    child = start_function(
        WORKER,
        config.timeout_seconds,
        stdout=subprocess.DEVNULL,  # only rank 0 prints results
        new_session=True,  # a terminal's Ctrl-C is for rank 0
    )
    return RankWorker(f"rank {rank} of {config.num_devices}", child)


def run_worker(pipe: Connection) -> None:
    """Run a rank in this process until rank 0 closes the pipe or dies."""
    try:
        _run_rank(pipe)
    except (EOFError, ConnectionError):
        pass
    except LostRankError as error:
        _report(pipe, "lost", str(error))
    except BaseException as error:  # noqa: BLE001 - every error is reported to rank 0
        is_known = isinstance(error, RegaugeError)
        _report(pipe, "failed", error if is_known else RuntimeError(describe_error(error)[0]))
    os._exit(0)  # gloo may abort if the interpreter exits normally


@torch.no_grad()
def _run_rank(pipe: Connection) -> None:
    pipe.send(("started", None))
    spec: RankSpec = pipe.recv()
    device = accelerators.claim_device(spec.accelerator, spec.device_index, spec.threads)
    spec.accelerator.set_precision(spec.precision)
    config = spec.config
    group = RankGroup(spec.rank, config.num_devices, config.timeout_seconds)
    shard = build_shard(spec.program, group, config.parallelism)
    pipe.send(("claimed", None))
    store = connect_store(spec.port, START_TIMEOUT_SECONDS)
    group.join(spec.accelerator.distributed_backend(), store)
    tensors = all_named_tensors(shard)
    for name, names in group_tied_names(shard).items():
        value = torch.empty_like(tensors[name], device=device, requires_grad=False)
        group.receive_weight(value)
        set_tied_tensor(shard, names, value)
    pipe.send(("ready", num_bytes(shard)))
    while True:
        layouts: list[tuple[torch.Size, torch.dtype]] = pipe.recv()
        inputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in layouts]
        for value in inputs:
            group.broadcast(value)
        shard(*inputs)
        spec.accelerator.end_microbatch()


def _report(pipe: Connection, event: str, message: Any) -> None:
    with suppress(OSError):
        pipe.send((event, message))
