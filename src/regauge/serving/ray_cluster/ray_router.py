"""How Ray Serve's proxies select a replica; Ray imports this module in each proxy."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ray.serve.request_router import FIFOMixin, RequestRouter

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica


class BalancedRouter(FIFOMixin, RequestRouter):
    """Sends a request to the less busy of two random replicas.

    Ray's router prefers replicas on the proxy's machine as long as they accept requests. Ours
    accept all of them, so the replicas on other machines would be idle.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        del pending_request
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
