"""Runs one worker in this process, one shard after the other; nothing replaces a lost worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.inference.predict.executors import Executor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.inference.predict.shard_queue import ShardQueue
    from regauge.inference.predict.worker import WorkerSpec


class Inline(Executor):
    """For small jobs, and for debugging."""

    def run(self, spec: WorkerSpec, shard_queue: ShardQueue) -> Iterator[dict[str, Any]]:
        from regauge.inference.predict.worker import build_worker

        worker = build_worker(spec, device=0)
        yield {"event": "ready", "worker": 0, "seconds": worker.ready_seconds}
        while (shard := shard_queue.claim(0)) is not None:
            line = worker.process_shard(shard)
            if line is None:
                shard_queue.mark_past_end(shard)
            else:
                yield {**line, "event": "shard"}
                shard_queue.finish(shard, is_last=line["is_last"])
