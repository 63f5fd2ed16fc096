"""The container of a node: image, command, devices, volumes, limits and secrets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.jobs.targets import SHARED_MEMORY_SHARE, JobSpec, Machine
from regauge.jobs.targets._lustre import LustreSource
from regauge.system.errors import SettingsError
from regauge.system.files import read_csv_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.jobs.targets import Volume

MEMORY_SHARE = 0.9
"""Share of the memory of a machine for the container; the rest is for its system and its agent."""
MIB_PER_GIB = 1024
EFA_DEVICE = "/dev/infiniband/uverbs"
DEVICE_PERMISSIONS = ["READ", "WRITE", "MKNOD"]
HOST_MOUNTS = "/mnt"
"""Folder of a machine that its file systems are mounted in."""
RESERVED_PREFIX = "AWS_BATCH"
"""Prefix of environment variables that Batch sets itself; a job definition must not use it."""
DEFAULT_LOG_GROUP = "/aws/batch/job"
"""Log group that Batch creates itself."""
ULIMITS = (("memlock", -1), ("nofile", 1_048_576), ("stack", 67_108_864))
"""Limits of a process: locked memory for RDMA, open files, and bytes of the stack."""


@dataclass(frozen=True)
class BatchDevices:
    """How the accelerators of a vendor are given to a container."""

    requirement: str
    """Type in `resourceRequirements`; empty if the devices are listed."""
    globs: tuple[str, ...]
    """Device files; `*` is the number of the accelerator."""
    environment: dict[str, str]
    efa_environment: dict[str, str]
    """Environment variables of jobs that use EFA."""
    image_type: str
    """Type of the machine image, `imageType`."""
    image_parameter: str
    """SSM parameter with the machine image; empty for the default image of `image_type`."""


@cache
def find_batch_devices(vendor: str) -> BatchDevices:
    """Return the devices of a vendor; raises SettingsError if Batch has none of this vendor."""
    rows = {row["vendor"]: row for row in read_csv_rows(Path(__file__).with_name("devices.csv"))}
    if vendor not in rows:
        problem = f"AWS Batch has no machines with accelerators of {vendor}"
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


@dataclass(frozen=True)
class ContainerOptions:
    """The settings of the target that a container needs."""

    region: str
    job_role: str | None
    execution_role: str | None
    log_group: str
    vcpus: int | None
    memory_gib: float | None


def require_machine(job: JobSpec) -> Machine:
    """Return the machine type of a job; raises SettingsError if none is set."""
    if job.machine is None:
        problem = "launch.instance is not set, and AWS Batch needs the machine type"
        raise SettingsError(problem, "set it, such as launch.instance = 'c7i.4xlarge'")
    return job.machine


def build_container(job: JobSpec, options: ContainerOptions) -> dict[str, Any]:
    """Return `containerProperties` of a job; raises SettingsError for settings it cannot express.

    Format: https://docs.aws.amazon.com/batch/latest/APIReference/API_ContainerProperties.html.
    """
    machine = require_machine(job)
    if job.image is None:
        remedy = "set it to an image in a registry, with a tag or digest"
        raise SettingsError("launch.image is not set, and AWS Batch runs containers", remedy)
    container: dict[str, Any] = {"image": job.image, "command": list(job.command)}
    roles = {"jobRoleArn": options.job_role, "executionRoleArn": options.execution_role}
    container |= {key: role for key, role in roles.items() if role is not None}
    if job.max_nodes > 1:
        container["instanceType"] = machine.name
    container["resourceRequirements"] = _build_requirements(machine, options)
    container["linuxParameters"] = _build_linux_parameters(job, machine, options)
    container["ulimits"] = [
        {"name": name, "softLimit": limit, "hardLimit": limit} for name, limit in ULIMITS
    ]
    container["environment"] = _list_pairs(_collect_environment(job, machine), "value")
    if job.secrets:
        container["secrets"] = _list_pairs(job.secrets, "valueFrom")
    if job.volumes:
        container["volumes"] = [_build_volume(volume) for volume in job.volumes]
        container["mountPoints"] = [
            {
                "sourceVolume": volume.name,
                "containerPath": volume.mount,
                "readOnly": volume.read_only,
            }
            for volume in job.volumes
        ]
    container["logConfiguration"] = _build_log_configuration(job, options)
    return container


def _list_pairs(values: Mapping[str, str], key: str) -> list[dict[str, str]]:
    return [{"name": name, key: value} for name, value in sorted(values.items())]


def _build_requirements(machine: Machine, options: ContainerOptions) -> list[dict[str, str]]:
    """Return vCPUs, memory in MiB and accelerators; by default all of the machine."""
    vcpus = options.vcpus or machine.vcpus
    if vcpus is None:
        raise _build_size_error(machine, "vCPUs", "vcpus")
    requirements = [
        {"type": "VCPU", "value": str(vcpus)},
        {"type": "MEMORY", "value": str(_find_memory_mib(machine, options))},
    ]
    requirement = find_batch_devices(machine.vendor).requirement
    if requirement:
        requirements.append({"type": requirement, "value": str(machine.chips)})
    return requirements


def _find_memory_mib(machine: Machine, options: ContainerOptions) -> int:
    if options.memory_gib is not None:
        return int(options.memory_gib * MIB_PER_GIB)
    if machine.memory_gib is None:
        raise _build_size_error(machine, "memory", "memory_gib")
    return int(machine.memory_gib * MIB_PER_GIB * MEMORY_SHARE)


def _build_size_error(machine: Machine, noun: str, key: str) -> SettingsError:
    problem = f"the catalog does not contain the {noun} of {machine.name}"
    return SettingsError(problem, f"set {key} in [[launch.target]] of kind aws-batch")


def _build_linux_parameters(
    job: JobSpec, machine: Machine, options: ContainerOptions
) -> dict[str, Any]:
    """Return the devices, the size of /dev/shm in MiB, and an init process.

    The init process forwards the stop signal, so that the run saves a checkpoint.
    """
    memory_gib = _find_memory_mib(machine, options) / MIB_PER_GIB
    shared_gib = job.shared_memory_gib or (machine.memory_gib or memory_gib) * SHARED_MEMORY_SHARE
    parameters: dict[str, Any] = {
        "initProcessEnabled": True,
        "sharedMemorySize": int(shared_gib * MIB_PER_GIB),
    }
    paths = list_device_paths(job)
    if paths:
        parameters["devices"] = [
            {"hostPath": path, "containerPath": path, "permissions": DEVICE_PERMISSIONS}
            for path in paths
        ]
    return parameters


def list_device_paths(job: JobSpec) -> list[str]:
    """Return the device files of a node: accelerators, and EFA if there are several nodes."""
    machine = require_machine(job)
    globs = find_batch_devices(machine.vendor).globs
    paths = [glob.replace("*", str(index)) for glob in globs for index in range(machine.chips)]
    if job.uses_efa:
        paths += [f"{EFA_DEVICE}{index}" for index in range(machine.efa_interfaces)]
    return paths


def _collect_environment(job: JobSpec, machine: Machine) -> dict[str, str]:
    """Return the environment variables of a node; variables of the user take precedence."""
    for name in (*job.environment, *job.secrets):
        if name.startswith(RESERVED_PREFIX):
            problem = f"launch.environment has {name}, and only AWS Batch sets {RESERVED_PREFIX}…"
            raise SettingsError(problem, "rename that variable")
    devices = find_batch_devices(machine.vendor)
    defaults = devices.environment | (devices.efa_environment if job.uses_efa else {})
    return defaults | dict(job.environment)


def _build_volume(volume: Volume) -> dict[str, Any]:
    if volume.kind == "efs":
        configuration = {
            "fileSystemId": volume.source,
            "rootDirectory": "/",
            "transitEncryption": "ENABLED",
        }
        return {"name": volume.name, "efsVolumeConfiguration": configuration}
    if volume.kind == "fsx":
        LustreSource.parse(volume)
        return {"name": volume.name, "host": {"sourcePath": f"{HOST_MOUNTS}/{volume.name}"}}
    if volume.kind == "host":
        return {"name": volume.name, "host": {"sourcePath": volume.source}}
    problem = f"launch.volumes: '{volume.name}' has kind '{volume.kind}', which AWS Batch lacks"
    raise SettingsError(problem, "set its kind to efs, fsx or host")


def _build_log_configuration(job: JobSpec, options: ContainerOptions) -> dict[str, Any]:
    return {
        "logDriver": "awslogs",
        "options": {
            "awslogs-group": options.log_group,
            "awslogs-region": options.region,
            "awslogs-stream-prefix": job.name,
        },
    }
