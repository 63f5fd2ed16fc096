"""Runs workers on a Ray cluster with Ray Data; all machines must share the output folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import Field

from regauge.inference.predict.executors import Executor
from regauge.inference.predict.shard_queue import ShardId
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.inference.predict.shard_queue import ShardQueue
    from regauge.inference.predict.worker import WorkerSpec

INSTALL_COMMAND = "pip install 'regauge[ray]'"


class Ray(Executor):
    """Each source piece is a task; Ray retries a lost worker's task."""

    address: str | None = None
    """Cluster address; by default the running cluster, else this machine."""
    workers: int = Field(default=1, ge=1)
    """How many actors to start; each loads the artifact."""
    cpus: float = Field(default=1, gt=0)
    """CPUs per actor."""
    gpus: float = Field(default=0, ge=0)
    """Accelerators per actor that Ray counts as GPUs."""
    resources: dict[str, float] = {}
    """Other resources per actor, by their cluster names, such as `{neuron_cores = 1}`."""

    def run(self, spec: WorkerSpec, shard_queue: ShardQueue) -> Iterator[dict[str, Any]]:
        """Yield all shards' lines; raises SettingsError if Ray is not installed."""
        ray = _import_ray()
        if not ray.is_initialized():
            ray.init(address=self.address, log_to_driver=False, logging_level="warning")
        tasks = [
            {"piece": piece, "finished": sorted(shard_queue.finished_parts(piece))}
            for piece in shard_queue.unfinished_pieces
        ]
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        rows = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
            PieceWorker,
            fn_constructor_args=(spec,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(self.workers, len(tasks))),
            num_cpus=self.cpus,
            num_gpus=self.gpus or None,
            **({"resources": self.resources} if self.resources else {}),
        )
        for row in rows.iter_rows():
            line: dict[str, Any] = json.loads(row["line"])
            yield {**line, "event": "shard"}
            shard_queue.finish(ShardId(line["piece"], line["part"]), is_last=line["is_last"])


class PieceWorker:
    """A Ray actor: a worker for pieces and their shards."""

    def __init__(self, spec: WorkerSpec) -> None:
        from regauge.inference.predict.worker import build_worker

        self._worker = build_worker(spec, device=0)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the ledger line of each unfinished shard in a piece, as JSON."""
        for piece, finished_parts in zip(batch["piece"], batch["finished"], strict=True):
            finished, part, is_last = set(map(int, finished_parts)), 0, False
            while not is_last:
                shard = ShardId(int(piece), part)
                line = None if part in finished else self._worker.process_shard(shard)
                if line is None and part not in finished:
                    break
                if line is not None:
                    is_last = bool(line["is_last"])
                    yield {"line": [json.dumps(line)]}
                part += 1


def _import_ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError:
        problem = "executor 'ray' needs Ray, which is not installed"
        raise SettingsError(problem, INSTALL_COMMAND) from None
    return ray
