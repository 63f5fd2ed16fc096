"""SkyPilot: a task file, which `sky jobs launch` runs on the cloud with the lowest price.

`launch` writes the file and nothing else: SkyPilot has the credentials and knows the job's state.
Task file: https://docs.skypilot.co/en/latest/reference/yaml-spec.html.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from pydantic import Field, field_validator

from regauge import __version__
from regauge.jobs.targets import (
    COMMON_FIELDS,
    SEPARATOR,
    Document,
    Handle,
    JobEvent,
    JobSpec,
    JobStatus,
    Launcher,
    LaunchPlan,
    Leftover,
    LogRequest,
    is_local_folder,
)
from regauge.jobs.targets._nodes import relocate_command
from regauge.system.errors import RESTART_CODES, SettingsError
from regauge.system.files import write_atomic

ENVIRONMENT = "~/regauge"
"""Virtual environment on a node."""
PORT = 29400
"""The first node's rendezvous port."""
GRACE_SECONDS = 60
"""Time to save a checkpoint at the time limit."""
UNUSED = {"max_attempts", "rendezvous", "rendezvous_endpoint"}


class SkyPilot(Launcher):
    """A SkyPilot task file, for a managed job on any cloud."""

    folder: str = "out/skypilot"
    """Folder for the task files."""
    working_dir: str = "."
    """Folder with the run file, which SkyPilot copies to the nodes without git-ignored files."""
    infra: str | None = None
    """Cloud, region and zone, such as `aws/us-east-1`; by default the cheapest."""
    accelerators: str | None = None
    """Accelerators per node in SkyPilot's words, such as `H100:8`; by default the machine type."""
    disk_gib: int | None = Field(default=None, ge=1)
    """Disk size per node in GiB."""
    storage: Mapping[str, str] = {}
    """Mount path -> bucket, such as `s3://bucket/runs`, or SkyPilot volume name."""
    packages: tuple[str, ...] = (f"regauge[s3]=={__version__}",)
    """Python packages to install on each node."""

    @field_validator("storage")
    @classmethod
    def _check_storage(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for path in value:
            if not path.startswith("/"):
                raise ValueError(f"{path!r} is not an absolute path; begin it with /")
        return value

    def plan(self, job: JobSpec) -> LaunchPlan:
        self._check_output(job)
        for name, reference in job.secrets.items():
            if reference != f"env:{name}":
                problem = f"launch.secrets.{name} is not a reference of this target"
                remedy = f"set it to env:{name}, a variable in the shell of 'sky jobs launch'"
                raise SettingsError(problem, remedy)
        name = f"{job.name}.yaml"
        command = ["sky", "jobs", "launch", "--yes", "--detach-run"]
        for secret in sorted(job.secrets):
            command += ["--secret", secret]
        codes = ", ".join(map(str, RESTART_CODES[:-1]))
        return LaunchPlan(
            job,
            documents=(Document(name, self._build_task(job)),),
            commands=((*command, str(Path(self.folder) / name)),),
            notes=("SkyPilot runs the job: launch writes the task file for the command above.",),
            restart_policy="SkyPilot replaces lost nodes without limit, and starts all nodes "
            f"again after the exit codes {codes} and {RESTART_CODES[-1]}.",
            used=(COMMON_FIELDS | {"spot"})
            - UNUSED
            - ({"machine"} if self.accelerators else set()),
        )

    def _check_output(self, job: JobSpec) -> None:
        """Raise SettingsError for an output folder that a lost node loses, or nodes do not share.

        A mounted bucket shows a node's writes to the other nodes later, and a volume at once.
        """
        if not is_local_folder(job.output):
            return
        output = PurePosixPath(job.output)
        source = next((s for path, s in self.storage.items() if output.is_relative_to(path)), None)
        if source is None:
            problem = f"output.folder = '{job.output}' is lost with its node"
            raise SettingsError(problem, "set it to a folder below a path in storage of the target")
        if job.max_nodes > 1 and SEPARATOR in source:
            problem = f"{job.max_nodes} nodes write to output.folder, and a bucket is not shared"
            raise SettingsError(problem, "mount a SkyPilot volume there, by its name in storage")

    def _build_task(self, job: JobSpec) -> dict[str, Any]:
        by_instance = self.accelerators is None and job.machine is not None
        resources = {
            "infra": self.infra or ("aws" if by_instance else None),
            "accelerators": self.accelerators,
            "instance_type": job.machine.name if by_instance and job.machine else None,
            "use_spot": job.spot or None,
            "disk_size": self.disk_gib,
            "labels": dict(job.labels) or None,
            "job_recovery": {"recover_on_exit_codes": list(RESTART_CODES)},
        }
        buckets = {path: source for path, source in self.storage.items() if SEPARATOR in source}
        packages = shlex.join(self.packages)
        task = {
            "name": job.name,
            "num_nodes": job.max_nodes,
            "workdir": str(Path(self.working_dir).resolve()),
            "resources": {name: value for name, value in resources.items() if value is not None},
            "envs": dict(job.environment),
            "secrets": dict.fromkeys(sorted(job.secrets)),
            "file_mounts": {
                path: {"source": source, "mode": "MOUNT_CACHED"} for path, source in buckets.items()
            },
            "volumes": {
                path: source for path, source in self.storage.items() if path not in buckets
            },
            "setup": 'export PATH="$HOME/.local/bin:$PATH"\n'
            f"uv venv --python 3.12 {ENVIRONMENT}\n"
            f"uv pip install --python {ENVIRONMENT}/bin/python {packages}\n",
            "run": "\n".join(self._list_run_lines(job)) + "\n",
        }
        return {name: value for name, value in task.items() if value != {}}

    def _list_run_lines(self, job: JobSpec) -> Iterator[str]:
        """Yield a node's shell lines: torchrun's variables, then the command."""
        if job.max_nodes > 1:
            yield "export PET_NNODES=$SKYPILOT_NUM_NODES PET_RDZV_BACKEND=c10d"
            yield f'export PET_RDZV_ENDPOINT=$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}'
            yield "export PET_RDZV_ID=$SKYPILOT_TASK_ID"
        seconds, limit = job.limit_seconds, ""
        if seconds is not None:
            limit = f"timeout --kill-after={GRACE_SECONDS} {seconds} "
        command = relocate_command(job.command, self.working_dir)
        yield f"exec {limit}{ENVIRONMENT}/bin/{shlex.join(command)}"

    def submit(self, plan: LaunchPlan) -> Handle:
        """Write the task file, and replace an earlier one."""
        document = plan.documents[0]
        path = Path(self.folder).resolve() / document.name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, document.text, durable=False)
        return Handle(self.kind, "task", str(path))

    def find_status(self, handle: Handle) -> JobStatus:
        _refuse(handle, "queue")

    def list_events(self, handle: Handle) -> list[JobEvent]:
        _refuse(handle, "queue")

    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        del request
        _refuse(handle, f"logs --name {_find_name(handle)}")

    def cancel(self, handle: Handle) -> None:
        _refuse(handle, f"cancel --name {_find_name(handle)}")

    def clean_up(self, handle: Handle) -> list[Leftover]:
        """Remove the task file; SkyPilot removes its machines when a job ends."""
        Path(handle.job_id).unlink(missing_ok=True)
        return []


def _find_name(handle: Handle) -> str:
    return Path(handle.job_id).stem


def _refuse(handle: Handle, command: str) -> NoReturn:
    problem = f"{handle} is a task file, and SkyPilot knows the state of its job"
    raise SettingsError(problem, f"run: sky jobs {command}")
