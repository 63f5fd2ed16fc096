"""A job's volumes: claims, file systems behind static persistent volumes, and the run file."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from regauge.jobs.targets import SHARED_MEMORY_SHARE, JobSpec, Volume
from regauge.jobs.targets._lustre import LustreSource
from regauge.jobs.targets._templates import render_documents
from regauge.system.errors import SettingsError

SHARED_MEMORY = "shared-memory"
SHARED_MEMORY_MOUNT = "/dev/shm"  # noqa: S108 - the mount of POSIX shared memory
RUN_FILE = "run-file"
RESERVED_NAMES = (SHARED_MEMORY, RUN_FILE)
MAX_CONFIG_MAP_BYTES = 1 << 20
"""Maximum ConfigMap size, https://kubernetes.io/docs/concepts/configuration/configmap."""
DRIVERS = {"fsx": "fsx.csi.aws.com", "efs": "efs.csi.aws.com", "ebs": "ebs.csi.aws.com"}
"""File system kind -> CSI driver (kubernetes-sigs/aws-*-csi-driver)."""
DELETE_COMMANDS = {
    "fsx.csi.aws.com": "aws fsx delete-file-system --file-system-id {}",
    "efs.csi.aws.com": "aws efs delete-file-system --file-system-id {}",
    "ebs.csi.aws.com": "aws ec2 delete-volume --volume-id {}",
}
"""CSI driver -> command that deletes a static volume's file system."""
_TEMPLATES = Path(__file__).with_name("templates")
_SOURCE_PATTERNS = {"efs": re.compile(r"fs-[0-9a-f]+"), "ebs": re.compile(r"vol-[0-9a-f]+")}
_CONFIG_MAP_KEY = re.compile(r"[-._a-zA-Z0-9]+")


def name_config_map(job: JobSpec) -> str:
    """Return the ConfigMap name; a server's changed run file gets another one, so pods change."""
    digest = hashlib.sha256(job.run_file_text.encode()).hexdigest()[:10] if job.server else ""
    return "-".join(filter(None, (job.name, "run-file", digest)))


def build_config_map(job: JobSpec, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the ConfigMap with the run file; raises SettingsError if it cannot contain it."""
    if len(job.run_file_text.encode()) >= MAX_CONFIG_MAP_BYTES:
        raise SettingsError("the run file is larger than 1 MiB", "move its data into files")
    name = job.run_file.name
    if not _CONFIG_MAP_KEY.fullmatch(name):
        problem = f"'{name}' cannot be a key of a ConfigMap"
        raise SettingsError(problem, "name the run file with letters, digits, '-', '_' and '.'")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "name": name_config_map(job)},
        "data": {name: job.run_file_text},
        "immutable": True,
    }


def build_volumes(job: JobSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a pod's volumes and mounts.

    The run file is mounted as one file, so that other files in the image's folder stay visible.
    """
    shared_memory: dict[str, Any] = {"medium": "Memory"}
    if size := find_shared_memory_gib(job):
        shared_memory["sizeLimit"] = f"{size:g}Gi"
    volumes: list[dict[str, Any]] = [{"name": SHARED_MEMORY, "emptyDir": shared_memory}]
    mounts: list[dict[str, Any]] = [{"name": SHARED_MEMORY, "mountPath": SHARED_MEMORY_MOUNT}]
    if job.run_file_text:
        path = job.run_file
        volumes.append({"name": RUN_FILE, "configMap": {"name": name_config_map(job)}})
        mounts.append({"name": RUN_FILE, "mountPath": str(path), "subPath": path.name})
    for volume in job.volumes:
        _check_volume(volume, job)
        volumes.append({"name": volume.name, **_build_source(volume, job)})
        mount: dict[str, Any] = {"name": volume.name, "mountPath": volume.mount}
        mounts.append({**mount, "readOnly": True} if volume.read_only else mount)
    return volumes, mounts


def find_shared_memory_gib(job: JobSpec) -> float | None:
    """Return the /dev/shm size in GiB; None if the machine memory is unknown."""
    if job.shared_memory_gib is not None:
        return job.shared_memory_gib
    memory = job.machine.memory_gib if job.machine else None
    return None if memory is None else max(1, int(memory * SHARED_MEMORY_SHARE))


def build_claims(
    job: JobSpec, metadata: dict[str, Any], region: str | None
) -> list[dict[str, Any]]:
    """Return a static volume and its claim for each file system; deleting them keeps the files."""
    volumes = [volume for volume in job.volumes if volume.kind in DRIVERS]
    pairs = (_build_claim(volume, job, metadata, region) for volume in volumes)
    return [document for pair in pairs for document in pair]


def _build_claim(
    volume: Volume, job: JobSpec, metadata: dict[str, Any], region: str | None
) -> list[dict[str, Any]]:
    metadata = {**metadata, "name": name_claim(volume, job)}
    return render_documents(
        _TEMPLATES / "volume.yaml.jinja",
        metadata=metadata,
        cluster_metadata={key: value for key, value in metadata.items() if key != "namespace"},
        mode="ReadWriteOnce" if volume.kind == "ebs" else "ReadWriteMany",
        csi=_build_csi(volume, region),
    )


def name_claim(volume: Volume, job: JobSpec) -> str:
    """Return a volume's claim name: an existing claim, or this job's."""
    return volume.source if volume.kind == "claim" else f"{job.name}-{volume.name}"


def _build_source(volume: Volume, job: JobSpec) -> dict[str, Any]:
    if volume.kind == "host":
        return {"hostPath": {"path": volume.source}}
    claim: dict[str, Any] = {"claimName": name_claim(volume, job)}
    return {"persistentVolumeClaim": {**claim, "readOnly": True} if volume.read_only else claim}


def _build_csi(volume: Volume, region: str | None) -> dict[str, Any]:
    """Return a static volume's CSI source; raises SettingsError for another form."""
    driver = DRIVERS[volume.kind]
    if volume.kind == "fsx":
        source = LustreSource.parse(volume)
        if region is None:
            problem = f"launch.volumes: the region of '{volume.name}' is not set"
            raise SettingsError(problem, "set launch.target.region")
        return {
            "driver": driver,
            "volumeHandle": source.file_system_id,
            "volumeAttributes": {
                "dnsname": source.find_host_name(region),
                "mountname": source.mount_name,
            },
        }
    if not _SOURCE_PATTERNS[volume.kind].fullmatch(volume.source):
        problem = f"launch.volumes: '{volume.source}' is not the id of a file system or volume"
        raise SettingsError(problem, "write its id: fs-… for efs, vol-… for ebs")
    handle = {"driver": driver, "volumeHandle": volume.source}
    return {**handle, "fsType": "ext4"} if volume.kind == "ebs" else handle


def _check_volume(volume: Volume, job: JobSpec) -> None:
    """Raise SettingsError for a volume that a job's pods cannot mount."""
    if volume.name in RESERVED_NAMES:
        problem = f"launch.volumes: the name '{volume.name}' is reserved"
        raise SettingsError(problem, "choose another name")
    if volume.kind == "ebs" and max(job.max_nodes, job.jobs) > 1:
        problem = f"launch.volumes: '{volume.name}' is an EBS volume, which one node can mount"
        raise SettingsError(problem, "use kind 'fsx' or 'efs' for several nodes")
