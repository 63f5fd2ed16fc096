"""Worlds of processes that many tests share, because starting one takes seconds.

`World(n)` starts n processes that rendezvous once. `run` calls a function of `jobs` on all of them
and returns their results. A process that dies fails the test that uses it. All are forked from one
process that has imported torch and transformers and has computed nothing.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
import warnings
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from distributed.runs import ACCELERATOR
from regauge.accelerators import init_process_group
from regauge.system import choices, processes
from regauge.system.processes import find_free_port

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PRELOADED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "regauge.training.run",
]
TIMEOUT_SECONDS = 1800
"""Timeout of a collective."""


class World:
    """Processes that wait for jobs."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = find_free_port()
        self.size = size
        self.is_complete = True
        """Whether all results were received; otherwise the next result would be of another job."""
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            pipe, worker_pipe = context.Pipe()
            process = context.Process(
                target=_serve, args=(worker_pipe, rank, size, port), daemon=True
            )
            process.start()
            worker_pipe.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, job: str, *arguments: Any) -> list[Any]:
        """Call `jobs.<job>` on every process; return the results in the order of ranks.

        Raises AssertionError at the first failure; other processes may wait for that one forever.
        """
        self.is_complete = False
        for pipe in self._pipes:
            pipe.send((job, arguments))
        results: dict[Connection, Any] = {}
        while len(results) < self.size:
            for pipe in connection.wait([pipe for pipe in self._pipes if pipe not in results]):
                has_failed, results[pipe] = pipe.recv()
                if has_failed:
                    raise AssertionError(results[pipe])
        self.is_complete = True
        return [results[pipe] for pipe in self._pipes]

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if self.is_complete:
                pipe.send(None)
            else:
                process.kill()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch.distributed as dist

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated")
    jobs = importlib.import_module("distributed.jobs")
    accelerator = choices.load("accelerators", ACCELERATOR)()
    accelerator.claim(rank, 1)
    init_process_group(accelerator, processes.detect_world(), TIMEOUT_SECONDS)
    while (request := pipe.recv()) is not None:
        name, arguments = request
        try:
            pipe.send((False, getattr(jobs, name)(*arguments)))
        except BaseException:  # noqa: BLE001 - sent to the test
            pipe.send((True, f"rank {rank}:\n{traceback.format_exc()}"))
    dist.destroy_process_group()
