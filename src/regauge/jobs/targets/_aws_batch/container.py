"""A node's container: image, command, devices, volumes, limits and secrets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from regauge.jobs.targets import SHARED_MEMORY_SHARE, JobSpec, Machine, Volume
from regauge.jobs.targets._aws_batch.settings import BatchSettings
from regauge.jobs.targets._lustre import LustreSource
from regauge.jobs.targets._templates import render_document
from regauge.system.errors import SettingsError
from regauge.system.files import read_csv_rows

TEMPLATES = Path(__file__).with_name("templates")
MEMORY_SHARE = 0.9
"""Container share of the machine memory; the rest is for the system and the agent."""
MIB_PER_GIB = 1024
EFA_DEVICE = "/dev/infiniband/uverbs"
HOST_MOUNTS = "/mnt"
RUN_FILE_VARIABLE = "REGAUGE_RUN_FILE"
WRITE_RUN_FILE = (
    'mkdir -p "${0%/*}" && file=$(mktemp "$0.XXXXXX")'
    f' && printf %s "${RUN_FILE_VARIABLE}" >"$file" && mv "$file" "$0"'
    f' && unset {RUN_FILE_VARIABLE} && exec "$@"'
)
"""Script that writes a variable to the path `$0`, and becomes the command in its arguments.

Nodes may share that folder, so the file appears at once.
"""
RESERVED_PREFIX = "AWS_BATCH"
"""Prefix of variables set by Batch itself; a job definition must not use it."""


@dataclass(frozen=True)
class BatchDevices:
    """How a container gets a vendor's accelerators."""

    requirement: str
    """Type in `resourceRequirements`; empty if the devices are listed."""
    globs: tuple[str, ...]
    """Device files; `*` stands for the accelerator number."""
    environment: dict[str, str]
    efa_environment: dict[str, str]
    image_type: str
    """Machine image type, `imageType`."""
    image_parameter: str
    """SSM parameter with the machine image; empty for the default image of `image_type`."""


@cache
def find_batch_devices(vendor: str) -> BatchDevices:
    """Return a vendor's devices; raises SettingsError if Batch does not have any."""
    rows = {row["vendor"]: row for row in read_csv_rows(Path(__file__).with_name("devices.csv"))}
    if vendor not in rows:
        problem = f"AWS Batch does not offer machines with {vendor} accelerators"
        raise SettingsError(problem, "set launch.instance to another machine type")
    row = rows[vendor]
    return BatchDevices(
        row["requirement"],
        tuple(row["devices"].split()),
        _parse_variables(row["environment"]),
        _parse_variables(row["efa_environment"]),
        row["image_type"],
        row["image_parameter"],
    )


def _parse_variables(text: str) -> dict[str, str]:
    return dict(variable.split("=", 1) for variable in text.split())


def require_machine(
    job: JobSpec, service: str = "AWS Batch", example: str = "c7i.4xlarge"
) -> Machine:
    """Return a job's machine type; raises SettingsError if none is set."""
    if job.machine is None:
        problem = f"launch.instance is not set, and {service} needs the machine type"
        raise SettingsError(problem, f"set it, such as launch.instance = '{example}'")
    return job.machine


def build_container(job: JobSpec, target: BatchSettings) -> dict[str, Any]:
    """Return `containerProperties`, by default with all vCPUs and most of the machine's memory.

    Raises SettingsError for settings that it cannot express.
    """
    machine = require_machine(job)
    if job.image is None:
        remedy = "set it to an image in a registry, with a tag or digest"
        raise SettingsError("launch.image is not set, and AWS Batch runs containers", remedy)
    vcpus = target.vcpus or machine.vcpus
    if vcpus is None:
        raise _build_size_error(machine, "vCPUs", "vcpus")
    memory_mib = _find_memory_mib(machine, target)
    whole_gib = machine.memory_gib or memory_mib / MIB_PER_GIB
    shared_gib = job.shared_memory_gib or whole_gib * SHARED_MEMORY_SHARE
    return render_document(
        TEMPLATES / "container.yaml.jinja",
        job=job,
        command=list(build_command(job)),
        target=target,
        machine=machine,
        vcpus=vcpus,
        memory_mib=memory_mib,
        shared_mib=int(shared_gib * MIB_PER_GIB),
        requirement=find_batch_devices(machine.vendor).requirement,
        devices=_list_device_paths(job, machine),
        environment=_collect_environment(job, machine),
        volumes=[{"name": volume.name, **_build_volume(volume)} for volume in job.volumes],
    )


def build_command(job: JobSpec) -> tuple[str, ...]:
    """Return the container's command, which writes the run file before it becomes the job's.

    So a changed run file does not need another image.
    """
    if not job.run_file_text:
        return job.command
    return ("/bin/sh", "-c", WRITE_RUN_FILE, str(job.run_file), *job.command)


def _find_memory_mib(machine: Machine, target: BatchSettings) -> int:
    if target.memory_gib is not None:
        return int(target.memory_gib * MIB_PER_GIB)
    if machine.memory_gib is None:
        raise _build_size_error(machine, "memory", "memory_gib")
    return int(machine.memory_gib * MIB_PER_GIB * MEMORY_SHARE)


def _build_size_error(machine: Machine, noun: str, key: str) -> SettingsError:
    problem = f"the catalog does not contain the {noun} of {machine.name}"
    return SettingsError(problem, f"set {key} in [[launch.target]] of kind aws-batch")


def _list_device_paths(job: JobSpec, machine: Machine) -> list[str]:
    """Return a node's device files: accelerators, and EFA if there are several nodes."""
    globs = find_batch_devices(machine.vendor).globs
    paths = [glob.replace("*", str(index)) for glob in globs for index in range(machine.chips)]
    count = machine.efa_interfaces if job.uses_efa else 0
    return paths + [f"{EFA_DEVICE}{index}" for index in range(count)]


def _collect_environment(job: JobSpec, machine: Machine) -> dict[str, str]:
    """Return a node's environment variables, with the run file; the user's take precedence."""
    for name in (*job.environment, *job.secrets):
        if name.startswith(RESERVED_PREFIX):
            problem = f"launch.environment has {name}, and only AWS Batch sets {RESERVED_PREFIX}…"
            raise SettingsError(problem, "rename that variable")
    devices = find_batch_devices(machine.vendor)
    defaults = devices.environment | (devices.efa_environment if job.uses_efa else {})
    run_file = {RUN_FILE_VARIABLE: job.run_file_text} if job.run_file_text else {}
    return defaults | dict(job.environment) | run_file


def _build_volume(volume: Volume) -> dict[str, Any]:
    if volume.kind == "efs":
        file_system = {"fileSystemId": volume.source, "rootDirectory": "/"}
        return {"efsVolumeConfiguration": {**file_system, "transitEncryption": "ENABLED"}}
    if volume.kind == "fsx":
        LustreSource.parse(volume)
        return {"host": {"sourcePath": f"{HOST_MOUNTS}/{volume.name}"}}
    if volume.kind == "host":
        return {"host": {"sourcePath": volume.source}}
    problem = f"launch.volumes: '{volume.name}' has kind '{volume.kind}', which AWS Batch lacks"
    raise SettingsError(problem, "set its kind to efs, fsx or host")
