"""Simulated nodes: the command of a node as a local process, with the variables of its scheduler.

The launcher `local`, rehearsals and tests of other schedulers use them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system.files import open_in_place
from regauge.system.processes import (
    LAUNCHER_VARIABLES,
    SUPERVISED_VARIABLE,
    convert_return_code,
    die_with_parent,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regauge.jobs.targets import JobSpec, LeaderAddress

SCHEDULER_PREFIXES = ("AWS_BATCH_", "JOB_COMPLETION_", "PET_", "SLURM_", "TORCHELASTIC_")
"""Prefixes of the variables by which schedulers describe a job to its processes."""
TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING = "0A"
"""State of a listening socket in these tables (include/net/tcp_states.h of Linux)."""


class NodeProcess:
    """The command of a node, in a separate session.

    It dies with the thread that started it, and writes its output to the end of a log file.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folder: Path | None = None,
    ) -> None:
        """Start the command with exactly this environment, in a working folder."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab", opener=open_in_place) as file:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - it takes no lock
                start_new_session=True,
            )
        self.log = log

    @property
    def pid(self) -> int:
        """Process id of the command."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code as in shells, 128 plus the signal that ended it; None if it runs."""
        code = self._process.poll()
        return None if code is None else convert_return_code(code)

    def terminate(self) -> None:
        """Send SIGTERM to the command, as a scheduler does before it stops a node."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the command and its process group, as the loss of a machine does, and wait."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end of the command; return its exit code, or None after these seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_code


def clear_scheduler_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a scheduler that started this process."""
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
    """Return torchrun's variables for a number of nodes and a c10d rendezvous on the leader."""
    return {
        "PET_NNODES": node_range,
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{leader.host}:{leader.port}",
        "PET_RDZV_ID": leader.run_id,
    }


def is_listening(port: int) -> bool:
    """Return whether a process of this machine listens on a TCP port; nothing connects to it."""
    address = f":{port:04X} "
    for table in TCP_TABLES:
        with suppress(OSError):
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == LISTENING and f"{local} ".endswith(address):
                    return True
    return False
