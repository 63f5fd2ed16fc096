"""Environment for a node that runs as a local process, and its rendezvous."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath

from regauge.jobs.targets import JobSpec, LeaderAddress
from regauge.system.errors import SettingsError
from regauge.system.processes import LAUNCHER_VARIABLES, SUPERVISED_VARIABLE

SCHEDULER_PREFIXES = ("AWS_BATCH_", "JOB_COMPLETION_", "PET_", "SLURM_", "TORCHELASTIC_")
"""Prefixes of variables that describe a job to the scheduler's processes."""
TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING = "0A"
"""Listening socket state in these tables (include/net/tcp_states.h in Linux)."""


def clear_scheduler_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables of a scheduler that started this process."""
    names = {*LAUNCHER_VARIABLES, "LOCAL_WORLD_SIZE", SUPERVISED_VARIABLE}
    return {
        name: value
        for name, value in environment.items()
        if name not in names and not name.startswith(SCHEDULER_PREFIXES)
    }


def build_rendezvous_variables(job: JobSpec, leader: LeaderAddress) -> dict[str, str]:
    """Return torchrun's variables of a node, as the Kubeflow training operator sets them.

    Empty for a job with one node. `job.rendezvous_endpoint`, an etcd server, replaces the leader.
    """
    if job.max_nodes == 1:
        return {}
    variables = build_leader_variables(job.node_range, leader)
    variables["PET_RDZV_BACKEND"] = job.rendezvous
    if job.rendezvous_endpoint:
        variables["PET_RDZV_ENDPOINT"] = job.rendezvous_endpoint
    return variables


def build_leader_variables(node_range: str, leader: LeaderAddress) -> dict[str, str]:
    """Return torchrun's variables for a node range and a c10d rendezvous on the leader."""
    return {
        "PET_NNODES": node_range,
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{leader.host}:{leader.port}",
        "PET_RDZV_ID": leader.run_id,
    }


def relocate_command(command: tuple[str, ...], working_dir: str) -> list[str]:
    """Return a node's command for a copy of `working_dir`, with the run file relative to it.

    Raises SettingsError for a run file outside the folder.
    """
    folder, run_file = Path(working_dir).resolve(), PurePath(command[4])
    if not run_file.is_relative_to(folder):
        problem = f"the run file is not in working_dir = '{working_dir}'"
        raise SettingsError(problem, "set working_dir of the target to its folder")
    return ["python", *command[1:4], str(run_file.relative_to(folder)), *command[5:]]


def is_listening(port: int) -> bool:
    """Return whether a local process listens on a TCP port, without connecting to it."""
    for table in TCP_TABLES:
        with suppress(OSError):
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == LISTENING and local.endswith(f":{port:04X}"):
                    return True
    return False
