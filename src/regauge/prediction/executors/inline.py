"""This very process, one shard after the other: nothing to start, nothing that replaces it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.prediction.executors import Executor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.prediction.shard_queue import Tickets
    from regauge.prediction.worker import Order


class Inline(Executor):
    """For small jobs, and to see where something fails."""

    def run(self, order: Order, tickets: Tickets) -> Iterator[dict[str, Any]]:
        from regauge.prediction.worker import worker

        work = worker(order, device=0)
        yield {"event": "ready", "worker": 0, "seconds": work.ready_seconds}
        while (shard := tickets.take(0)) is not None:
            line = work.answer(shard)
            if line is None:
                tickets.beyond(shard)
            else:
                yield {**line, "event": "shard"}
                tickets.finish(shard, last=line["last"])
