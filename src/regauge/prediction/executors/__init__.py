"""Who answers the shards of a job: one choice per file.

An executor is told which shards there may be and yields a line for each that is committed; it
starts what computes them, and gives a shard to another where one is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.config import Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.prediction.shard_queue import Tickets
    from regauge.prediction.worker import Order

    Told = Callable[[str, dict[str, Any]], None]


class Executor(Choice):
    """A way to have shards computed."""

    def run(self, order: Order, tickets: Tickets) -> Iterator[dict[str, Any]]:
        """Yield what happens: the line of each shard once its files lie in their place.

        What else is said has the name of what it is under `event`: "ready", "sign", "lost", or
        "look" where nothing has happened for a second. Whoever reads may stop at any line; what
        computes is then ended.
        """
        raise NotImplementedError
