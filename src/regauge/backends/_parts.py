"""The other parts of a divided program: how their processes are started, and what they do.

They compute whatever the first part computes, for as long as its process lives, and not longer.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from regauge import accelerators, choices, processes
from regauge.backends import _group, _shares
from regauge.backends._group import Group, LostError
from regauge.errors import RegaugeError, SettingsError, TransientError, explain, plain

if TYPE_CHECKING:
    from torch import nn

    from regauge.accelerators import Accelerator, Precision

FOLLOW = (
    "import sys; sys.path[:] = sys.argv[2:]\n"
    "from regauge.backends._parts import follow; follow(int(sys.argv[1]))"
)
"""Not multiprocessing's spawn, which would run a user's script again up to where it loads."""
START_SECONDS = 300.0
"""For the libraries to be imported, from a slow disk on a machine that has other work."""
GRACE_SECONDS = 2.0
"""To say why it ends, for a part that another one has left waiting."""
AGAIN = "run the same command again"
ENDED = (EOFError, ConnectionResetError, BrokenPipeError)


@dataclass(frozen=True)
class Sharing:
    """How a program is divided."""

    parts: int
    share: _shares.Share
    seconds: float
    """The longest wait for another part."""


@dataclass(frozen=True)
class Part:
    """What a process is told of its part."""

    number: int
    sharing: Sharing
    program: nn.Module
    """Without weights."""
    accelerator: Accelerator
    precision: Precision
    index: int
    """Of its device."""
    threads: int
    port: int
    """Where the parts meet."""


@dataclass(frozen=True)
class Follower:
    """A process of another part, as the first one sees it."""

    name: str
    process: subprocess.Popen[bytes]
    pipe: Connection

    def say(self, message: Any) -> None:
        """Send a message; raises LostError where nobody takes it in time.

        Raises SettingsError for one that cannot be sent, as a module can be that holds a lambda.
        """
        try:
            self.pipe.send(message)
        except OSError as error:
            raise LostError(f"{self.name} is lost: {error}", AGAIN) from None
        except Exception as error:  # there is no one kind of what pickles raise
            problem = f"another process cannot be told the program: {plain(error)}"
            raise SettingsError(problem, "set parts = 1") from error

    def hear(self, seconds: float = START_SECONDS, limit: float = START_SECONDS) -> Any:
        """Return what it says within some seconds, the last ones of a limit.

        Raises what it failed with, and TransientError where it ends or says nothing.
        """
        try:
            if not self.pipe.poll(max(0.0, seconds)):
                raise TransientError(f"{self.name} has not answered for {limit:g} s", AGAIN)
            event, what = self.pipe.recv()
        except ENDED:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)
            problem = f"{self.name} ended with code {self.process.returncode}"
            raise TransientError(problem, AGAIN) from None
        if event == "failed":
            raise what
        return what

    def end(self) -> None:
        """End it: what it holds lies elsewhere, too."""
        self.pipe.close()
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # where the kernel cannot end it
            self.process.wait(GRACE_SECONDS)


def started(number: int, sharing: Sharing) -> Follower:
    """Start the process of a part, which dies with this one."""
    ours, theirs = socket.socketpair()
    whole = int(sharing.seconds)
    limit = struct.pack("ll", whole, int((sharing.seconds - whole) * 1e6))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    with theirs:
        handle = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", FOLLOW, str(handle), *sys.path],
            env={**os.environ, **choices.places()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the answer that this process prints is not theirs
            pass_fds=(handle,),
            preexec_fn=processes.die_with_parent,  # noqa: PLW1509 - it takes no lock
            start_new_session=True,  # a terminal's Ctrl-C is for the first part
        )
    name = f"part {number + 1} of {sharing.parts}"
    return Follower(name, process, Connection(ours.detach()))


def follow(handle: int) -> None:
    """Be one of the other parts, in a process of its own, until the first one is done or gone."""
    pipe = Connection(handle)
    try:
        _follow(pipe)
    except ENDED:
        pass
    except LostError as error:
        _say(pipe, "lost", str(error))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the first part hears it
        known = error if isinstance(error, RegaugeError) else RuntimeError(explain(error)[0])
        _say(pipe, "failed", known)
    os._exit(0)  # gloo may abort where an interpreter ends by itself


@torch.no_grad()
def _follow(pipe: Connection) -> None:
    pipe.send(("here", None))
    part: Part = pipe.recv()
    device = accelerators.take(part.accelerator, part.index, part.threads)
    part.accelerator.use(part.precision)
    sharing = part.sharing
    group = Group(part.number, sharing.parts, sharing.seconds)
    program = _shares.shared(part.program, group, sharing.share)
    pipe.send(("claimed", None))
    group.join(part.accelerator.collectives(), _group.found(part.port, START_SECONDS))
    every = _shares.stored(program)
    for name, names in _shares.places(program).items():
        value = torch.empty_like(every[name], device=device, requires_grad=False)
        group.receive(value)
        _shares.place(program, names, value)
    pipe.send(("ready", _shares.size(program)))
    while True:
        forms: list[tuple[torch.Size, torch.dtype]] = pipe.recv()
        inputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]
        for value in inputs:
            group.tell(value)
        program(*inputs)
        part.accelerator.end_microbatch()


def _say(pipe: Connection, event: str, what: Any) -> None:
    with suppress(OSError):
        pipe.send((event, what))
