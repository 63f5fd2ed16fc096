"""Workers of a Ray cluster, by Ray Data: on many machines that share the folder of the answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import Field

from regauge.errors import SettingsError
from regauge.prediction.executors import Executor
from regauge.prediction.shard_queue import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.prediction.shard_queue import Tickets
    from regauge.prediction.worker import Order

HOW = "pip install 'regauge[ray]'"


class Ray(Executor):
    """A piece of the source is a task; one whose worker is lost is computed again by another."""

    address: str | None = None
    """Where the cluster is; by default the one that there is, or this machine alone."""
    workers: int = Field(default=1, ge=1)
    """Actors, each with an artifact of its own."""
    cpus: float = Field(default=1, gt=0)
    """Processors of each."""
    gpus: float = Field(default=0, ge=0)
    """Accelerators of each that Ray counts as GPUs."""
    resources: dict[str, float] = {}
    """Other resources of each, by their names in the cluster, such as `{neuron_cores = 1}`."""

    def run(self, order: Order, tickets: Tickets) -> Iterator[dict[str, Any]]:
        """Yield the lines of all shards; raises SettingsError where Ray is not installed."""
        ray = _library()
        if not ray.is_initialized():
            ray.init(address=self.address, log_to_driver=False, logging_level="warning")
        found = [
            {"piece": piece, "done": sorted(tickets.done(piece))} for piece in tickets.unfinished
        ]
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        lines = ray.data.from_items(found, override_num_blocks=len(found)).map_batches(
            PieceWorker,
            fn_constructor_args=(order,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(self.workers, len(found))),
            num_cpus=self.cpus,
            num_gpus=self.gpus or None,
            **({"resources": self.resources} if self.resources else {}),
        )
        for row in lines.iter_rows():
            line = _line(row)
            yield {**line, "event": "shard"}
            tickets.finish(Shard(line["piece"], line["part"]), last=line["last"])


class PieceWorker:
    """An actor: a loaded artifact that answers the shards of pieces."""

    def __init__(self, order: Order) -> None:
        from regauge.prediction.worker import worker

        self._worker = worker(order, device=0)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the line of each shard of a piece that is not done, as JSON."""
        for piece, done in zip(batch["piece"], batch["done"], strict=True):
            finished, part, last = set(map(int, done)), 0, False
            while not last:
                shard = Shard(int(piece), part)
                line = None if part in finished else self._worker.answer(shard)
                if line is None and part not in finished:
                    break
                if line is not None:
                    last = bool(line["last"])
                    yield {"line": [json.dumps(line)]}
                part += 1


def _line(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(row["line"])
    return found


def _library() -> Any:
    """Return Ray; raises SettingsError where it is not installed."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise SettingsError("executor 'ray' needs Ray, which is not installed", HOW) from None
    return ray
