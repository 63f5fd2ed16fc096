"""This process's rank, its share of the machine, and what the kernel knows about others.

A container may use fewer cores than it sees: control groups limit its CPU time. Slurm's variables
follow the srun manual, section "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from regauge.system.errors import SettingsError
from regauge.system.log import logger

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables a launcher sets for each process, with torchrun's names."""

SUPERVISED_VARIABLE = "REGAUGE_SUPERVISED"
"""Set by the supervisor: the scratch folder with the attempt's specification and heartbeats."""
DEVICE_VARIABLE = "REGAUGE_DEVICE"
"""Set by the supervisor if it excludes devices: the process's device index."""
FLIGHT_RECORDER_VARIABLES: Mapping[str, str] = MappingProxyType({"TORCH_FR_BUFFER_SIZE": "256"})
"""How many collectives torch's flight recorder keeps, if the backend has one."""
SPIN_VARIABLES: Mapping[str, str] = MappingProxyType({"GOMP_SPINCOUNT": "3000"})
"""How many rounds an idle OpenMP thread spins before it sleeps: about as long as a wake-up."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
INHERITED_ENVIRONMENT: Mapping[str, str] = MappingProxyType(dict(os.environ))
"""The environment at the start of this process; imported libraries may change it later."""

STATE_FIELD, RESIDENT_FIELD = 0, 21
"""Fields in `/proc/<pid>/stat` after the name: proc(5) numbers them from 3."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class World:
    """This process's rank, and the run's process count."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main_process(self) -> bool:
        """Whether this process has rank 0, which writes the run's output."""
        return self.rank == 0

    @property
    def device_index(self) -> int:
        """This process's device index: its local rank unless devices are excluded."""
        return int(os.environ.get(DEVICE_VARIABLE, self.local_rank))


@dataclass(frozen=True)
class RankLayout:
    """Ranks of this machine's processes, and the rendezvous address."""

    world_size: int
    """Number of processes on all machines."""
    port: int
    first_rank: int = 0
    """Rank of this machine's first process."""
    address: str = "127.0.0.1"
    devices: tuple[int, ...] = ()
    """Local process -> device index; empty unless devices are excluded."""


def is_launched() -> bool:
    """Return whether a launcher (torchrun, srun or the supervisor) started the run's ranks.

    The Kubeflow training operator starts one process per node, which then starts the ranks: returns
    False for that process. `srun` is a launcher only in a step with several tasks.
    """
    if "PET_NNODES" in os.environ and "LOCAL_RANK" not in os.environ:
        return False
    has_several_tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or has_several_tasks


def is_supervised() -> bool:
    """Return whether Regauge's supervisor started this process."""
    return SUPERVISED_VARIABLE in os.environ


def detect_world(requested: int | Literal["auto"] = "auto") -> World:
    """Return this process's rank from launcher variables; rank 0 of 1 without them.

    Logs a warning if `requested`, the number of processes per node, differs from the launcher's.
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
    """Return how many CPU cores this process may use, at least 1.

    Limited by the process's affinity and the CPU quota of its control group.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = read_cpu_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def available_threads() -> int:
    """Return a single process's CPU threads: its cores, or fewer by OMP_NUM_THREADS.

    Ranks ignore this variable, because torchrun sets it to 1.
    """
    text = INHERITED_ENVIRONMENT.get("OMP_NUM_THREADS", "")
    limit = int(text) if text.isascii() and text.isdigit() else 0
    return min(available_cores(), limit) if limit else available_cores()


def cores_per_process(world: World) -> int:
    """Return the CPU cores per local process, at least 1."""
    return max(1, available_cores() // world.local_size)


def find_free_port() -> int:
    """Return a TCP port currently free on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def restore_environment() -> Iterator[None]:
    """Restore this process's environment variables at the end of the block."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def limit_spinning() -> None:
    """Make idle OpenMP threads of this process and its children sleep soon.

    Variables set by the user take precedence. By default, threads spin for milliseconds. If another
    program needs the core, the thread they wait for is not scheduled until they sleep, and each
    small operation takes that long. Spinning as long as a wake-up takes costs at most twice the
    best time (Karlin et al., 1991, "Empirical studies of competitive spinning for a shared-memory
    multiprocessor"). Call it before torch is imported.
    """
    if os.environ.keys().isdisjoint({"OMP_WAIT_POLICY", *SPIN_VARIABLES}):
        os.environ.update(SPIN_VARIABLES)


class ProcessFacts(NamedTuple):
    """A process as listed by the kernel."""

    state: str
    """State letter, such as `R` or `T` (proc(5)); empty if the process does not exist."""
    resident_bytes: int
    """Resident memory; 0 if the process does not exist."""


NO_PROCESS = ProcessFacts("", 0)


STOPPED_STATES = ("T", "t")
"""States of a process that a signal or a debugger has stopped (proc(5))."""


def inspect_process(pid: int) -> ProcessFacts:
    """Return the state and memory of a local process."""
    fields = read_process_fields(pid)
    if not fields:
        return NO_PROCESS
    return ProcessFacts(fields[STATE_FIELD], int(fields[RESIDENT_FIELD]) * PAGE_BYTES)


def read_process_fields(pid: int) -> list[str]:
    """Return the fields in `/proc/<pid>/stat` after the name; empty without the process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""One line per hierarchy: id, controllers and path; version 2 has the id 0 and no controllers."""
UNLIMITED = "max"


def read_cpu_quota(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Return how many cores' time this process may use, or None without a limit.

    The limit is the smallest quota / period in its control group and the groups above it, for
    versions 1 and 2 (kernel documentation, "Control Group v2" and "CFS Bandwidth Control").
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    quotas = [quota for line in lines for quota in _read_hierarchy(root, line)]
    return min(quotas, default=None)


def _read_hierarchy(root: Path, line: str) -> Iterator[float]:
    """Yield the quotas in one hierarchy, in cores."""
    hierarchy, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if hierarchy == "0":
        for folder in _list_groups((root, root / "unified"), path):
            yield from _parse_quota(*_read_words(folder / "cpu.max"))
    elif "cpu" in controllers.split(","):
        for folder in _list_groups((root / "cpu", root / controllers), path):
            quota, period = (
                _read_words(folder / f"cpu.cfs_{name}_us")[:1] for name in ("quota", "period")
            )
            yield from _parse_quota(*quota, *period)


def _list_groups(mounts: tuple[Path, ...], path: str) -> Iterator[Path]:
    """Yield the folders of a control group and the groups above it.

    In a container the path may belong to the host. The group is then the root of the mount.
    """
    relative = Path(path.lstrip("/"))
    for mount in mounts:
        yield from (mount / group for group in (relative, *relative.parents))


def _read_words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _parse_quota(quota: str = UNLIMITED, period: str = "") -> Iterator[float]:
    """Yield quota / period, unless unlimited."""
    if quota != UNLIMITED and period and int(quota) > 0:
        yield int(quota) / int(period)


FIRST_PORT, NUM_PORTS = 20000, 20000
"""Range of the rendezvous port, which is computed from the job and the step."""


def _find_address(node: str) -> str:
    """Return a Slurm node's name, or `NodeAddr` if the name does not resolve, as in clouds."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        import subprocess

        command = ("scontrol", "--oneliner", "show", "node", node)
        with suppress(OSError):
            record = subprocess.run(command, capture_output=True, check=False).stdout
            address = re.search(rb" NodeAddr=(\S+)", record)
            return address[1].decode() if address else node
    return node


def build_torchrun_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a Slurm task; the first node of the step is the master."""
    nodes = slurm["SLURM_STEP_NODELIST"]
    prefix, bracket, rest = nodes.partition(",")[0].partition("[")
    first_node = prefix + re.split(r"[-,\]]", rest)[0] if bracket else prefix
    job, step = int(slurm["SLURM_JOB_ID"]), int(slurm["SLURM_STEP_ID"])
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": re.split(r"[(,]", slurm["SLURM_STEP_TASKS_PER_NODE"])[0],
        "MASTER_ADDR": _find_address(first_node),
        "MASTER_PORT": str(FIRST_PORT + (job * 31 + step) % NUM_PORTS),
    }
