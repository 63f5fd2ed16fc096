"""A real Slurm on loopback: munged, slurmctld, and a slurmd for each of two nodes."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from regauge.system.children import die_with_parent
from regauge.system.processes import find_free_port
from regauge.system.timing import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
NODES = ("cloud-1", "cloud-2")
"""Names of the nodes, which do not resolve, as in clouds: only `NodeAddr` leads to them."""
CPUS = 2
REQUEUE_SECONDS = 10
"""Delay of a requeued job, which is the lifetime of credentials (slurm.conf manual, AuthInfo)."""
START_SECONDS, WAIT_SECONDS = 60.0, 300.0
CONFIGURATION = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire={requeue_seconds}
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdSpoolDir={root}/spool-%n
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=15
MinJobAge=300
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode={preempt_mode}
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=grace Nodes=ALL MaxTime=1:00:00 State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def find_missing() -> list[str]:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def require_slurm(proof: str) -> None:
    """Skip a test if Slurm is not installed or not startable here."""
    if missing := find_missing():
        pytest.skip(f"no {missing[0]} here (Debian's slurm-wlm and munge): {proof} is not proved")
    if os.geteuid() != 0:
        pytest.skip(f"the daemons of Slurm need root: {proof} is not proved")


@dataclass
class SlurmCluster:
    """Two nodes: jobs of the partition `high` preempt jobs of `low`, and of `grace` after 60 s."""

    root: Path
    name: str
    preempt_mode: str
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf"), "PATH": path}

    def run(self, *command: str, is_checked: bool = True) -> str:
        process = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        if is_checked:
            assert process.returncode == 0, f"{command}: {process.stderr}"
        return process.stdout.strip()

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        (self.root / "munge").mkdir(parents=True)
        (self.root / "munge").chmod(0o755)
        (self.root / "state").mkdir()
        ports = {name: find_free_port() for name in ("controller", *NODES)}
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
            f"Port={ports[node]} CPUs={CPUS} RealMemory=1000 State=UNKNOWN"
            for node in NODES
        )
        text = CONFIGURATION.format(
            name=self.name,
            host=socket.gethostname(),
            root=self.root,
            requeue_seconds=REQUEUE_SECONDS,
            controller_port=ports["controller"],
            preempt_mode=self.preempt_mode,
            nodes=nodes,
        )
        (self.root / "slurm.conf").write_text(text)
        self._start_munge()
        self._start_daemon("slurmctld", "slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)
        self.wait(self.is_idle, "idle nodes")

    def is_idle(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", is_checked=False)
        return {*states.split("\n")} == {f"{node} idle" for node in NODES}

    def start_node(self, node: str) -> None:
        self._start_daemon(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill everything on a node at once, and report it as down, as a health check does."""
        pids = self.list_node_pids(node)
        self.daemons[node].kill()
        self.daemons.pop(node).wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def list_node_pids(self, node: str) -> list[int]:
        """Return the processes of the jobs on a node: its step daemons and their descendants."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                parents[int(path.name)] = int(fields[1])
        marks = (f"SLURMD_NODENAME={node}\0".encode(), f"SLURM_CONF={self.root}".encode())
        pids = []
        for pid in parents:
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if all(mark in environment for mark in marks):
                    pids.append(pid)
        return [*{parents[pid] for pid in pids if _is_step_daemon(parents[pid])}, *pids]

    def wait(
        self, condition: Callable[[], object], name: str, seconds: float = WAIT_SECONDS
    ) -> None:
        has_come = wait_for(condition, seconds, poll_seconds=0.1, on_poll=self._check_daemons)
        assert has_come, f"{name} never came: {self.read_logs()}"

    def _check_daemons(self) -> None:
        for daemon, process in self.daemons.items():
            assert process.poll() is None, f"{daemon} has ended: {self.read_logs()}"

    def read_logs(self) -> str:
        """Return the ends of the logs of the daemons."""
        logs = sorted(self.root.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in logs)

    def stop(self) -> None:
        """Stop the daemons and every process of a job that is left."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root", is_checked=False)
        leftovers = [pid for node in NODES for pid in self.list_node_pids(node)]
        for process in reversed(self.daemons.values()):
            process.terminate()
        for process in reversed(self.daemons.values()):
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in leftovers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
        self._start_daemon(
            "munged", "munged", "--foreground", f"--socket={folder / 'socket'}", *files, "--force"
        )
        self.wait((folder / "socket").exists, "the socket of munged", START_SECONDS)

    def _start_daemon(self, name: str, *command: str) -> None:
        with (self.root / f"{re.sub('[^a-z0-9.]', '-', name)}.output.log").open("a") as log:
            self.daemons[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - an interrupted test leaves no daemon
            )


def _is_step_daemon(pid: int) -> bool:
    with suppress(OSError):
        return "slurmstepd" in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return False


@contextmanager
def start_slurm(root: Path, *, preempt_mode: str = "REQUEUE", proof: str) -> Iterator[SlurmCluster]:
    """Yield a running cluster; skip the test if Slurm is not installed."""
    require_slurm(proof)
    cluster = SlurmCluster(root, f"c{secrets.token_hex(3)}", preempt_mode)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
