"""The processes of a run: who this one is, and starting the others on this machine.

No torch here: the parent of local processes only starts them, waits, and stops what is left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from regauge import choices, timing
from regauge.errors import SettingsError
from regauge.slurm import torchrun_variables

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher sets for each process, in torchrun's names."""

SUPERVISED = "REGAUGE_SUPERVISED"
"""Set by our own launcher: the folder where a process finds its orders and leaves signs of life."""
DEVICE = "REGAUGE_DEVICE"
"""Set by our own launcher where devices are left out: the index of the one that a process takes."""
RECORDER: Mapping[str, str] = MappingProxyType({"TORCH_FR_BUFFER_SIZE": "256"})
"""Collectives that torch's flight recorder keeps for the supervisor, where the backend has one."""
NOTHING: Mapping[str, str] = MappingProxyType({})
INHERITED: Mapping[str, str] = MappingProxyType(dict(os.environ))
"""The environment that this process was started with; libraries add to it when imported."""

PR_SET_PDEATHSIG = 1
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
"""Looked up once: between fork and exec nothing is loaded."""
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.05


class Child(Protocol):
    """A process that was started, with the methods that subprocess.Popen has."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[list[str], Path | None, Mapping[str, str]], Child]
"""Starts a command with a log, or in this terminal, and more environment variables."""


@dataclass(frozen=True)
class World:
    """This process among all processes of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process speaks for the run."""
        return self.rank == 0

    @property
    def device(self) -> int:
        """Index of this process's device: its own number on its machine where none is left out."""
        return int(os.environ.get(DEVICE, self.local_rank))


@dataclass(frozen=True)
class Seats:
    """Where the processes of this machine stand among all, and where these meet."""

    size: int
    """Processes of all machines."""
    port: int
    first: int = 0
    """Rank of this machine's first process."""
    address: str = "127.0.0.1"
    devices: tuple[int, ...] = ()
    """Of this machine's processes, where some are left out."""


def launched() -> bool:
    """Return whether a launcher (torchrun, srun, ours) started this process as one of several.

    A node's only process, as the Kubeflow training operator starts it, starts those of the run;
    `srun` tells how many tasks its step has.
    """
    if "PET_NNODES" in os.environ and "LOCAL_RANK" not in os.environ:
        return False
    several = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or several


def supervised() -> bool:
    """Return whether our own supervisor started this process: it answers for it, too."""
    return SUPERVISED in os.environ


def world() -> World:
    """Return this process's place as its launcher set it; alone where no launcher did."""
    if not launched():
        return World()
    if "RANK" not in os.environ:
        os.environ.update(torchrun_variables(os.environ))
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise SettingsError(
            f"the launcher set RANK but not {', '.join(missing)}", "start it with torchrun"
        )
    size = int(os.environ["WORLD_SIZE"])
    return World(
        rank=int(os.environ["RANK"]),
        size=size,
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )


def available_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_of_cores(world: World) -> int:
    """Return how many of this machine's cores each of its processes can have, 1 at least."""
    return max(1, available_cores() // world.local_size)


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], size: int, logs: Path) -> int:
    """Run a command as `size` local processes; return 0, or the code of the first that failed.

    When one fails, the others are told to stop and killed after ten seconds.
    """
    with started(command, size, logs) as children:
        return _awaited(children)


@contextmanager
def started(
    command: list[str],
    size: int,
    logs: Path,
    variables: Mapping[str, str] = NOTHING,
    *,
    quiet: bool = False,
    seats: Seats | None = None,
    start: Start | None = None,
) -> Iterator[list[Child]]:
    """Start a command as `size` local processes, all there are where no seats are given.

    Rank 0 keeps this terminal unless it shall be quiet; the others write `<logs>/<rank>.log`. They
    die with this process, and are killed at the end of the block. Signals of the terminal reach
    this process alone where it has variables for them: then it is their supervisor.
    """
    seats = seats or Seats(size, free_port())
    if seats.size > 1 or quiet:
        logs.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    try:
        for number in range(size):
            rank = seats.first + number
            own = {**_place(number, size, seats), **variables}
            log = logs / f"{rank}.log" if rank or quiet else None
            children.append((start or spawn)(command, log, own))
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def start_beside(commands: list[list[str]], logs: Path, variables: Mapping[str, str]) -> int:
    """Run commands that know nothing of each other at once, with more environment variables.

    The output of each is in `<logs>/<number>.log`; failures are as in `start`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    return _awaited(
        [
            spawn(command, logs / f"{number}.log", variables)
            for number, command in enumerate(commands, start=1)
        ]
    )


def _place(number: int, size: int, seats: Seats) -> dict[str, str]:
    device = {DEVICE: str(seats.devices[number])} if seats.devices else {}
    return {
        **device,
        "RANK": str(seats.first + number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(seats.size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": seats.address,
        "MASTER_PORT": str(seats.port),
    }


@contextmanager
def own_environment() -> Iterator[None]:
    """Let what a block, or a library in it, sets in the environment end with the block."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def spawn(
    command: list[str],
    log: Path | None,
    variables: Mapping[str, str],
    *,
    own_session: bool = False,
) -> Child:
    """Start a command with a log, or in this terminal, and more environment variables.

    Signals of the terminal do not reach a command with a session of its own; it leads the group of
    the processes that it starts.
    """
    with log.open("ab") if log else nullcontext() as file:
        return subprocess.Popen(
            command,
            env={**os.environ, **choices.places(), **variables},
            stdout=file,
            stderr=file,
            # Only the child can ask this; it takes no lock that a thread of the parent may hold.
            preexec_fn=die_with_parent,  # noqa: PLW1509
            start_new_session=own_session or SUPERVISED in variables,
        )


def _awaited(children: list[Child]) -> int:
    try:
        return _wait(children)
    except KeyboardInterrupt:
        return _wait(children)
    finally:
        _stop(children)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, where it can."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_code(children: Sequence[Child]) -> int | None:
    """Return the code of the first process that failed, 0 if all ended well, otherwise None."""
    codes = [child.poll() for child in children]
    failed = next((code for code in codes if code), None)
    return 0 if failed is None and None not in codes else failed


def _wait(children: list[Child]) -> int:
    timing.wait_for(lambda: exit_code(children) is not None, poll_seconds=POLL_SECONDS)
    code = exit_code(children) or 0
    return code if code >= 0 else 128 - code


def _stop(children: list[Child]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
