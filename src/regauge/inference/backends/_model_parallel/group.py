"""Process group for a program's ranks, separate from torch's default group.

A process that serves a model may also train one, so torch's default group is not used. The group is
the one torch creates for an accelerator's collectives, and the store is on loopback.
"""

from __future__ import annotations

import datetime as dt
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from regauge.system import timing
from regauge.system.errors import SettingsError, TransientError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LOOPBACK_HOST = "127.0.0.1"
GROUP_ID = "model-parallel"
"""Group name, for libraries that need one."""
WEIGHT_TAG = 1
"""Message tag for sending weights to one rank."""
DEVICE_QUERY_SECONDS = 2e-4
"""Seconds between checks for finished device work: less than a forward pass."""


class LostRankError(TransientError):
    """Another rank did not respond. The process that started the ranks finds out which one."""


class RankGroup:
    """A program's process group, as one rank uses it."""

    def __init__(self, rank: int, world_size: int, timeout_seconds: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._timeout = dt.timedelta(seconds=timeout_seconds)
        self._group: Any = None

    def join(self, distributed_backend: str, store: dist.Store) -> None:
        """Connect to the other ranks, which must call this at the same time."""
        create_group = find_group_creator(distributed_backend)
        if create_group is None:
            problem = f"torch has no process group for '{distributed_backend}'"
            raise SettingsError(problem, "set devices = 1")
        self._group = self._run(
            lambda: create_group(store, self.rank, self.world_size, self._timeout)
        )

    def all_reduce_sum(self, value: Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        self._run(lambda: self._group.allreduce([value]).wait())

    def broadcast(self, value: Tensor, source: int = 0) -> None:
        """Replace a tensor by rank `source`'s, on all ranks."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._run(lambda: self._group.broadcast([value], options).wait())

    def send_weight(self, value: Tensor, rank: int) -> None:
        self._run(lambda: self._group.send([value], rank, WEIGHT_TAG).wait())

    def receive_weight(self, value: Tensor) -> None:
        """Replace a tensor by the one from rank 0."""
        self._run(lambda: self._group.recv([value], 0, WEIGHT_TAG).wait())

    def synchronize(self, device: torch.device, has_ended: Callable[[], bool]) -> None:
        """Wait for an asynchronous device; raise LostRankError after the timeout.

        The wait also ends when `has_ended` returns True. On a CPU each operation has already
        waited.
        """
        if device.type == "cpu":
            return
        event = torch.Event(device.type)
        event.record()
        timing.wait_for(
            lambda: event.query() or has_ended(),
            self._timeout_seconds,
            poll_seconds=DEVICE_QUERY_SECONDS,
        )
        if not event.query():
            raise LostRankError("the device waits for another rank", "find out which rank ended")

    def abort(self) -> None:
        """Leave the group and cancel pending operations."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _run(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as error:
            problem = f"a rank is lost: {first_line(error)}"
            raise LostRankError(problem, "find out which rank ended") from None


def find_group_creator(distributed_backend: str) -> Callable[..., Any] | None:
    """Return the function that creates torch's process group for a backend such as `gloo`.

    The arguments are the store, the rank, the number of ranks and the timeout. Returns None if
    torch does not have such a group, and no package has registered one.
    """
    class_name = f"processgroup{distributed_backend}".lower()
    names = (name for name in dir(distributed_c10d) if name.lower() == class_name)
    group_class: Callable[..., Any] | None = next(
        (getattr(distributed_c10d, name) for name in names), None
    )
    if group_class is not None:
        return group_class
    plugins = dist.Backend._plugins  # noqa: SLF001 - the registry of other packages has no public name
    plugin = plugins.get(distributed_backend.upper())
    if plugin is None:
        return None
    return (
        partial(_create_extended, plugin.creator_fn) if plugin.extended_api else plugin.creator_fn
    )


def _create_extended(
    create: Callable[..., Any],
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: dt.timedelta,
) -> Any:
    """Create a group from a package that registered it with `extended_api`."""
    options = distributed_c10d._DistributedBackendOptions()  # noqa: SLF001 - part of that interface
    options.store, options.timeout = store, timeout
    options.group_rank, options.group_size = rank, world_size
    options.group_id, options.global_ranks_in_group = GROUP_ID, list(range(world_size))
    return create(options, None)


def create_store(timeout_seconds: float) -> tuple[dist.Store, int]:
    """Create a store for this machine only; return it and the port."""
    server = socket.create_server((LOOPBACK_HOST, 0))
    port: int = server.getsockname()[1]
    options = {"is_master": True, "master_listen_fd": server.detach()}
    return _build_store(port, timeout_seconds, **options), port


def connect_store(port: int, timeout_seconds: float) -> dist.Store:
    """Connect to the store at a port on this machine."""
    return _build_store(port, timeout_seconds, is_master=False)


def _build_store(port: int, timeout_seconds: float, **options: Any) -> dist.Store:
    timeout = dt.timedelta(seconds=timeout_seconds)
    return dist.TCPStore(LOOPBACK_HOST, port, timeout=timeout, wait_for_workers=False, **options)
