"""The [cluster] and [image] tables. This module does not import torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from regauge.config import Settings
from regauge.config.validation import require_pattern
from regauge.jobs.settings import Label, Launch

CLUSTER_TAG = "regauge/cluster"
"""Tag with the cluster name, on everything created for the cluster."""
Version = Annotated[str, require_pattern(r"\d+\.\d+\.\d+", "a version; write it as 1.9.3")]
_ZONE = re.compile(r"[a-z]{2}(-[a-z]+)+-\d[a-z]")


class ClusterNodes(Settings):
    """A node group: machines with the same type."""

    name: Label
    """Group name."""
    instance: str
    """Machine type, such as `p5.48xlarge`."""
    count: int = Field(default=1, ge=0)
    """Machines to start with the cluster."""
    min_count: int | None = Field(default=None, ge=0)
    """Minimum machine count; by default `count`."""
    max_count: int | None = Field(default=None, ge=1)
    """Maximum machine count; by default `count`, at least 1."""
    market: Literal["on-demand", "spot", "capacity-block"] = "on-demand"
    """How the machines are bought; a capacity block is a reservation for machine learning."""
    zone: str | None = None
    """Availability zone for the group; by default all cluster zones."""
    capacity_reservation: str | None = None
    """Capacity reservation identifier (`cr-…`), or ARN of a reservation group."""
    efa: bool | None = None
    """Whether the machines have EFA interfaces; by default if they have accelerators and EFA."""
    placement_group: str | None = None
    """Existing cluster placement group for the machines."""
    ami: str | None = None
    """Machine image based on Amazon Linux 2023; by default the EKS image for the chip."""
    volume_gib: int = Field(default=200, ge=20)
    """Root volume size per machine in GiB."""

    @model_validator(mode="after")
    def _check_counts(self) -> ClusterNodes:
        if not self.minimum <= self.count <= self.maximum:
            limits = f"min_count = {self.minimum} and max_count = {self.maximum}"
            raise ValueError(f"count = {self.count} is not between {limits}; change one of them")
        if self.market == "capacity-block" and self.capacity_reservation is None:
            raise ValueError("a capacity block has an identifier; set capacity_reservation")
        if self.market == "spot" and self.capacity_reservation is not None:
            raise ValueError("a reservation has no Spot machines; set market to on-demand")
        return self

    @property
    def minimum(self) -> int:
        return self.count if self.min_count is None else self.min_count

    @property
    def maximum(self) -> int:
        return max(self.count, 1) if self.max_count is None else self.max_count


class ClusterFiles(Settings):
    """A file system shared by a cluster's jobs, mounted as a claim with the same name."""

    name: Label
    """File system and claim name."""
    kind: Literal["fsx", "efs"] = "fsx"
    """FSx for Lustre, or EFS."""
    size_gib: int = Field(default=1200, ge=1200, multiple_of=1200)
    """Size in GiB, a multiple of 1200; EFS grows on demand."""


class ClusterComponents(Settings):
    """Software to install in a cluster."""

    etcd: Version | None = None
    """etcd server version for elastic jobs, such as `3.5.25`; by default not installed."""
    training_operator: Version | None = "1.9.3"
    """Kubeflow training operator version, for elastic jobs; unset leaves it out."""
    trainer: Version | None = "2.2.1"
    """Kubeflow Trainer version, for jobs with a fixed size; unset leaves it out."""
    monitoring: tuple[Literal["exporters", "cloudwatch"], ...] = ()
    """Machine metrics: device exporters with htop and nvtop, or CloudWatch Container Insights,
    which AWS charges for."""


class Cluster(ClusterComponents):
    """An EKS Kubernetes cluster."""

    name: Label
    """Cluster name."""
    folder: str = "out/cluster"
    """Folder for the cluster files."""
    region: str = "us-east-1"
    """AWS region."""
    zones: tuple[str, ...]
    """Availability zones with subnets; at least two."""
    kubernetes_version: str = "1.35"
    """Kubernetes version."""
    tool: Literal["eksctl", "terraform"] = "eksctl"
    """Tool that creates and deletes the cluster; the files for both tools are written."""
    node_groups: tuple[ClusterNodes, ...] = Field(min_length=1)
    """Node groups, each with one machine type."""
    file_systems: tuple[ClusterFiles, ...] = ()
    """File systems mounted by jobs."""
    tags: Mapping[str, str] = {}
    """Tags for all created resources."""

    @property
    def all_tags(self) -> dict[str, str]:
        """Tags for everything created, including the cluster name."""
        return {CLUSTER_TAG: self.name, **self.tags}

    @model_validator(mode="after")
    def _check_zones(self) -> Cluster:
        for zone in self.zones:
            if not _ZONE.fullmatch(zone) or not zone.startswith(self.region):
                remedy = f"write it as {self.region}a, or set region"
                raise ValueError(f"{zone!r} is not a zone of region {self.region}; {remedy}")
        if len(set(self.zones)) < 2:  # noqa: PLR2004 - a rule of EKS
            raise ValueError("EKS needs subnets in two zones; name at least two zones")
        names = [group.name for group in self.node_groups]
        names += [files.name for files in self.file_systems]
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"the name {repeated[0]!r} is used twice; rename one")
        return self


class ClusterSettings(Settings):
    """The table read by `cluster`."""

    cluster: Cluster


class Image(Settings):
    """A container image with Regauge and the run file."""

    variant: str = "cpu"
    """Base image kind: `cpu`, `cuda`, `neuron` or `gaudi`."""
    name: str | None = None
    """Image registry, repository and tag; by default `launch.image`."""
    base: str | None = None
    """Base image with a tag or, better, a digest, which never changes; by default the variant's."""
    compiler: bool = True
    """Whether the image has a C++ compiler, which torch.compile and some exports need."""
    constraints: str | None = None
    """pip constraints file that pins the packages; by default the versions installed here."""
    index: str | None = None
    """Address of a further package index, such as PyTorch's one for CPUs."""
    wheel: str | None = None
    """Local Regauge wheel; by default pip installs this version from a package index."""
    extras: tuple[str, ...] = ()
    """Regauge extras in addition to the variant's, such as `ray`."""
    files: tuple[str, ...] = ()
    """Other files for the working folder, such as custom code named in the run file."""
    folder: str = "out/image"
    """Folder for the Dockerfile and the files it copies."""
    tool: Literal["auto", "docker", "podman", "buildah"] = "auto"
    """Program that builds and pushes; by default the first one found to work here."""


class ImageSettings(Settings):
    """The tables read by `image`."""

    image: Image = Image()
    launch: Launch = Launch()
