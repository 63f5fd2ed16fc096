"""Processes of a run: the rank of this process, and child processes on this machine.

This module does not import torch: a parent process only starts its children, waits for them, and
stops them.
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
from multiprocessing import resource_tracker
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Literal, NamedTuple, Protocol

from regauge.system import choices, stop_signals, timing
from regauge.system.errors import FIRST_SIGNAL_CODE, SettingsError
from regauge.system.files import open_in_place
from regauge.system.host.cgroups import read_cpu_quota
from regauge.system.host.slurm import build_torchrun_variables
from regauge.system.log import logger

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a launcher sets for each process, with torchrun's names."""

SUPERVISED_VARIABLE = "REGAUGE_SUPERVISED"
"""Set by the supervisor: the scratch folder with the attempt's specification and heartbeats."""
DEVICE_VARIABLE = "REGAUGE_DEVICE"
"""Set by the supervisor if it excludes devices: the index of the device of a process."""
FLIGHT_RECORDER_VARIABLES: Mapping[str, str] = MappingProxyType({"TORCH_FR_BUFFER_SIZE": "256"})
"""Number of collectives that torch's flight recorder keeps, if the backend has a recorder."""
SPIN_VARIABLES: Mapping[str, str] = MappingProxyType({"GOMP_SPINCOUNT": "3000"})
"""Rounds that an idle OpenMP thread spins before it sleeps: about the time of a wake-up."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
INHERITED_ENVIRONMENT: Mapping[str, str] = MappingProxyType(dict(os.environ))
"""The environment at the start of this process; imported libraries may change it later."""

PR_SET_PDEATHSIG = 1
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
"""Loaded at import, because nothing may be loaded between fork and exec."""
GRACE_SECONDS = 10.0
STATE_FIELD, RESIDENT_FIELD = 0, 21
"""Fields of `/proc/<pid>/stat` after the name: proc(5) numbers them from 3."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
POLL_SECONDS = 0.05


class Child(Protocol):
    """A child process, with the methods of subprocess.Popen."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


SpawnFunction = Callable[[list[str], Path | None, Mapping[str, str]], Child]
"""Starts a command, with a log file (None: this terminal) and additional variables."""


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main_process(self) -> bool:
        """Whether this process has rank 0, which writes the output of the run."""
        return self.rank == 0

    @property
    def device_index(self) -> int:
        """Index of this process's device; its local rank unless devices are excluded."""
        return int(os.environ.get(DEVICE_VARIABLE, self.local_rank))


@dataclass(frozen=True)
class RankLayout:
    """The ranks of this machine's processes, and the address of the rendezvous."""

    world_size: int
    """Number of processes on all machines."""
    port: int
    first_rank: int = 0
    """Rank of the first process of this machine."""
    address: str = "127.0.0.1"
    devices: tuple[int, ...] = ()
    """Device index of each process of this machine; empty if no device is excluded."""


def is_launched() -> bool:
    """Return whether a launcher (torchrun, srun or the supervisor) started the ranks of the run.

    The Kubeflow training operator starts one process per node, which then starts the ranks: returns
    False for that process. `srun` is a launcher only if its step has several tasks.
    """
    if "PET_NNODES" in os.environ and "LOCAL_RANK" not in os.environ:
        return False
    has_several_tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or has_several_tasks


def is_supervised() -> bool:
    """Return whether Regauge's supervisor started this process."""
    return SUPERVISED_VARIABLE in os.environ


def detect_world(requested: int | Literal["auto"] = "auto") -> World:
    """Return the rank of this process from its launcher's variables; rank 0 of 1 without them.

    Logs a warning if `requested`, the number of processes per node, is not that of the launcher.
    Raises SettingsError if the launcher set only some of the variables.
    """
    if not is_launched():
        return World()
    if "RANK" not in os.environ:
        os.environ.update(build_torchrun_variables(os.environ))
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise SettingsError(
            f"the launcher set RANK but not {', '.join(missing)}", "start it with torchrun"
        )
    size = int(os.environ["WORLD_SIZE"])
    world = World(
        rank=int(os.environ["RANK"]),
        size=size,
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )
    if world.rank == 0 and not is_supervised() and requested not in {"auto", world.local_size}:
        logger.warning(
            "RANK and WORLD_SIZE are set: a node has %d processes, not execution.processes = %d;"
            " unset these variables to start processes here",
            world.local_size,
            requested,
        )
    return world


def available_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    The limits are the affinity of the process and the CPU quota of its control group.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = read_cpu_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def available_threads() -> int:
    """Return the CPU threads of a single process: its cores, or fewer by OMP_NUM_THREADS.

    Ranks of a run do not read this variable, because torchrun sets it to 1.
    """
    text = INHERITED_ENVIRONMENT.get("OMP_NUM_THREADS", "")
    limit = int(text) if text.isascii() and text.isdigit() else 0
    return min(available_cores(), limit) if limit else available_cores()


def cores_per_process(world: World) -> int:
    """Return the number of CPU cores for each process of this machine, at least 1."""
    return max(1, available_cores() // world.local_size)


def find_free_port() -> int:
    """Return a TCP port that is currently free on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_processes(command: list[str], size: int, logs: Path, *, quiet: bool = False) -> int:
    """Run a command as `size` local processes; return 0 or the first nonzero exit code.

    If one fails, the others receive SIGTERM, and SIGKILL after ten seconds. With `quiet`, rank 0
    also writes to a log file.
    """
    with (
        stop_signals.record_signals(),
        start_processes(command, size, logs, quiet=quiet) as children,
    ):
        return _wait_and_stop(children)


@contextmanager
def start_processes(
    command: list[str],
    size: int,
    logs: Path,
    variables: Mapping[str, str] = NO_VARIABLES,
    *,
    quiet: bool = False,
    layout: RankLayout | None = None,
    spawn_function: SpawnFunction | None = None,
) -> Iterator[list[Child]]:
    """Start a command as `size` local processes; they are killed at the end of the block.

    They also die with this process. Without a layout they are all processes of the run. Rank 0
    prints to this terminal unless `quiet`; the other ranks write `<logs>/<rank>.log`. If the
    variables name a supervisor, signals of the terminal do not reach the processes.
    """
    layout = layout or RankLayout(size, find_free_port())
    if layout.world_size > 1 or quiet:
        logs.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    try:
        for local_rank in range(size):
            rank = layout.first_rank + local_rank
            rank_variables = {**_build_rank_variables(local_rank, size, layout), **variables}
            log = logs / f"{rank}.log" if rank or quiet else None
            children.append((spawn_function or spawn)(command, log, rank_variables))
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def run_commands(commands: list[list[str]], logs: Path, variables: Mapping[str, str]) -> int:
    """Run independent commands at the same time, with additional environment variables.

    The output of command n, counted from 1, is in `<logs>/<n>.log`. Returns as `run_processes`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with stop_signals.record_signals():
        return _wait_and_stop(
            [
                spawn(command, logs / f"{number}.log", variables)
                for number, command in enumerate(commands, start=1)
            ]
        )


def _build_rank_variables(local_rank: int, size: int, layout: RankLayout) -> dict[str, str]:
    device = {DEVICE_VARIABLE: str(layout.devices[local_rank])} if layout.devices else {}
    return {
        **device,
        "RANK": str(layout.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": layout.address,
        "MASTER_PORT": str(layout.port),
    }


@contextmanager
def restore_environment() -> Iterator[None]:
    """Restore the environment variables of this process at the end of the block."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def limit_spinning() -> None:
    """Let idle OpenMP threads of this process and its children sleep soon, unless the user decides.

    By default they spin for milliseconds. If another program needs the core, the thread that they
    wait for is not scheduled until they sleep, and each small operation takes that long. Spinning
    as long as a wake-up takes costs at most twice the best time (Karlin et al., 1991, "Empirical
    studies of competitive spinning for a shared-memory multiprocessor"). Call it before torch is
    imported.
    """
    if os.environ.keys().isdisjoint({"OMP_WAIT_POLICY", *SPIN_VARIABLES}):
        os.environ.update(SPIN_VARIABLES)


def spawn(
    command: list[str],
    log: Path | None,
    variables: Mapping[str, str],
    *,
    new_session: bool = False,
) -> Child:
    """Start a command, with a log file (None: this terminal) and additional variables.

    With `new_session`, signals of the terminal do not reach the command, and it leads the process
    group of its children.
    """
    with open(log, "ab", opener=open_in_place) if log else nullcontext() as file:
        return subprocess.Popen(
            command,
            env={**os.environ, **choices.module_folders_environment(), **variables},
            stdout=file,
            stderr=file,
            # Only the child can request this. It takes no lock that a parent thread may hold.
            preexec_fn=die_with_parent,  # noqa: PLW1509
            start_new_session=new_session or SUPERVISED_VARIABLE in variables,
        )


@contextmanager
def hide_main_module() -> Iterator[None]:
    """Hide the main module while a process is spawned.

    multiprocessing imports the main module of its parent in each spawned process. Without this, a
    script that calls Regauge would need `if __name__ == "__main__":`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def start_resource_tracker() -> None:
    """Start the resource tracker of multiprocessing so that no stop signal ends it.

    It removes the semaphores of ended processes. By itself it ignores SIGINT and SIGTERM only.
    """
    with stop_signals.block_signals():
        resource_tracker.ensure_running()


def _wait_and_stop(children: list[Child]) -> int:
    try:
        return _wait_for_exit(children)
    finally:
        stop_processes(children)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; only Linux can."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


def convert_return_code(code: int) -> int:
    """Return the exit code as in shells: 128 plus the number of the signal for a negative code."""
    return code if code >= 0 else FIRST_SIGNAL_CODE - code


def find_exit_code(children: Sequence[Child]) -> int | None:
    """Return the first nonzero exit code, 0 if all processes succeeded, or None if some still run.

    A code is negative if a signal ended the process.
    """
    codes = [child.poll() for child in children]
    failed = next((code for code in codes if code), None)
    return 0 if failed is None and None not in codes else failed


def _wait_for_exit(children: list[Child]) -> int:
    timing.wait_for(lambda: find_exit_code(children) is not None, poll_seconds=POLL_SECONDS)
    return convert_return_code(find_exit_code(children) or 0)


class ProcessFacts(NamedTuple):
    """A process as the kernel of this machine lists it."""

    state: str
    """Letter of its state, such as `R` or `T` (proc(5)); empty if there is no such process."""
    resident_bytes: int
    """Resident memory; 0 if there is no such process."""


NO_PROCESS = ProcessFacts("", 0)


def inspect_process(pid: int) -> ProcessFacts:
    """Return the state and the memory of a process of this machine."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return NO_PROCESS
    fields = text.rpartition(")")[2].split()
    return ProcessFacts(fields[STATE_FIELD], int(fields[RESIDENT_FIELD]) * PAGE_BYTES)


def stop_processes(children: list[Child]) -> None:
    """Send SIGTERM to child processes, and SIGKILL to those that still run after ten seconds."""
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
