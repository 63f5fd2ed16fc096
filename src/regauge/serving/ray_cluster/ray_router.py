"""How the proxies of Ray Serve select a replica; Ray imports this module in each proxy."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ray.serve.request_router import FIFOMixin, RequestRouter

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica


class BalancedRouter(FIFOMixin, RequestRouter):
    """Sends a request to the one of two random replicas that has fewer requests.

    The router of Ray prefers replicas on the machine of the proxy as long as they accept requests.
    Ours accept all of them, so the replicas on other machines would be idle.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        del pending_request
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
