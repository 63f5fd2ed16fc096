"""The parts of a divided program among themselves: a process group that no other code knows.

torch's default group is left alone: a process that serves a model may train, too. It is made of
the class that torch itself makes for an accelerator's collectives, over a store on loopback.
"""

from __future__ import annotations

import datetime as dt
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge import timing
from regauge.errors import SettingsError, TransientError, plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HOST = "127.0.0.1"
WEIGHTS = 1
"""The tag of what one part alone is sent."""
POLL_SECONDS = 2e-4


class LostError(TransientError):
    """Another part did not answer; which one is found out by who started them."""


class Group:
    """One part among others."""

    def __init__(self, part: int, parts: int, seconds: float) -> None:
        self.part = part
        self.parts = parts
        self._seconds = seconds
        self._limit = dt.timedelta(seconds=seconds)
        self._group: Any = None

    def join(self, collectives: str, store: dist.Store) -> None:
        """Meet the others, who must be about to do the same."""
        kind = kind_of(collectives)
        if kind is None:
            problem = f"parts cannot meet over '{collectives}'"
            raise SettingsError(problem, "set parts = 1")
        self._group = self._tried(lambda: kind(store, self.part, self.parts, self._limit))

    def sum(self, value: Tensor) -> None:
        """Put the sum over all parts in the place of a value."""
        self._tried(lambda: self._group.allreduce([value]).wait())

    def tell(self, value: Tensor, owner: int = 0) -> None:
        """Put the owner's value in the place of everybody's."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = owner, 0
        self._tried(lambda: self._group.broadcast([value], options).wait())

    def send(self, value: Tensor, part: int) -> None:
        """Send a value to one part."""
        self._tried(lambda: self._group.send([value], part, WEIGHTS).wait())

    def receive(self, value: Tensor) -> None:
        """Put what the first part sends in the place of a value."""
        self._tried(lambda: self._group.recv([value], 0, WEIGHTS).wait())

    def settle(self, device: torch.device, ended: Callable[[], bool]) -> None:
        """Wait for a device that is told operations ahead of time; raise LostError past the limit.

        Not for a CPU: there each operation has waited by itself.
        """
        if device.type == "cpu":
            return
        done = torch.Event(device.type)
        done.record()
        timing.wait_for(lambda: done.query() or ended(), self._seconds, poll_seconds=POLL_SECONDS)
        if not done.query():
            raise LostError("the device waits for another part", "see which one ended")

    def leave(self) -> None:
        """Let go of the group; what still waits in it is given up."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _tried(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as error:
            raise LostError(f"a part is lost: {plain(error)}", "see which one ended") from None


def kind_of(collectives: str) -> Any:
    """Return torch's class of a group, which bears the name of its collectives; None for none."""
    from torch.distributed import distributed_c10d as known

    wanted = f"processgroup{collectives}".lower()
    return next((getattr(known, name) for name in dir(known) if name.lower() == wanted), None)


def opened(seconds: float) -> tuple[dist.Store, int]:
    """Return a store that only this machine reaches, and its port."""
    listening = socket.create_server((HOST, 0))
    port: int = listening.getsockname()[1]
    return _store(port, seconds, is_master=True, master_listen_fd=listening.detach()), port


def found(port: int, seconds: float) -> dist.Store:
    """Return the store at a port of this machine."""
    return _store(port, seconds, is_master=False)


def _store(port: int, seconds: float, **how: Any) -> dist.Store:
    limit = dt.timedelta(seconds=seconds)
    return dist.TCPStore(HOST, port, timeout=limit, wait_for_workers=False, **how)
