"""Executors run a prediction job's workers. One file per choice.

An executor starts workers, gives them shards from a queue, and yields an event for each committed
shard. It gives a lost worker's shards to another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.config import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.inference.predict.shard_queue import ShardQueue
    from regauge.inference.predict.worker import WorkerSpec


class Executor(Choice):
    """A way to run workers."""

    def run(self, spec: WorkerSpec, shard_queue: ShardQueue) -> Iterator[dict[str, Any]]:
        """Yield events until the queue is empty; the key `event` has the kind.

        - `shard`: a shard's ledger line, after its files are in the output folder
        - `ready`: a worker has loaded the artifact (`worker`, `seconds`)
        - `progress`: more rows are computed (`rows`)
        - `lost`: a worker was replaced
        - `idle`: the workers were polled; sent about once a second

        The caller may stop at any event; the workers are then ended.
        """
        raise NotImplementedError
