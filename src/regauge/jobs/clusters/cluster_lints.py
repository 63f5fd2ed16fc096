"""Checks for cluster settings; each finding names a source."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterator

from regauge.jobs.clusters.facts import find_node_facts, load_kubernetes_versions
from regauge.jobs.clusters.settings import Cluster, ClusterNodes
from regauge.jobs.lints import Lint
from regauge.system.errors import SettingsError

EKS_VERSIONS = "https://docs.aws.amazon.com/eks/latest/userguide/kubernetes-versions.html"
RESERVATION_ZONES = (
    "https://aws-ia.github.io/terraform-aws-eks-blueprints/patterns/machine-learning/targeted-odcr"
)
EFA_INSTANCES = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-instance-types"
PLACEMENT_GROUPS = (
    "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/limitations-placement-groups.html"
)
ETCD_UPGRADE = "https://etcd.io/docs/v3.6/upgrades/upgrade_3_6/"
FIRST_ETCD_WITHOUT_V2 = (3, 6)
WARNING_DAYS = 60
"""Report a version from this many days before standard support ends."""


def find_lints(cluster: Cluster, today: dt.date) -> Iterator[Lint]:
    yield from _check_kubernetes_version(cluster.kubernetes_version, today)
    for group in cluster.node_groups:
        label = f"node group '{group.name}'"
        for lint in _check_group(group, cluster.zones):
            yield lint._replace(problem=f"{label}{lint.problem}")
    if cluster.etcd is not None and _parse_version(cluster.etcd) >= FIRST_ETCD_WITHOUT_V2:
        problem = f"etcd {cluster.etcd} has no --enable-v2, which the rendezvous needs"
        yield Lint("etcd-v2", problem, "set cluster.etcd to 3.5.25", ETCD_UPGRADE)


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _check_kubernetes_version(version: str, today: dt.date) -> Iterator[Lint]:
    """Report a version that EKS does not support, or supports at a higher price."""
    versions = load_kubernetes_versions()
    supported = [name for name, support in versions.items() if support.standard_until > today]
    support, is_error, problem = versions.get(version), False, ""
    if support is None:
        problem, is_error = "is not a known version of EKS", True
    elif support.extended_until <= today:
        problem, is_error = f"is not supported since {support.extended_until}", True
    elif support.standard_until <= today:
        problem = f"left standard support on {support.standard_until}, and costs more"
    elif (support.standard_until - today).days < WARNING_DAYS:
        problem = f"leaves standard support on {support.standard_until}"
    if problem:
        remedy = f"set cluster.kubernetes_version to {' or '.join(supported)}"
        problem = f"Kubernetes {version} {problem}"
        yield Lint("kubernetes-version", problem, remedy, EKS_VERSIONS, is_error)


def _check_group(group: ClusterNodes, zones: Collection[str]) -> Iterator[Lint]:
    """Report node group settings that contradict each other, or that EKS does not have."""
    node = find_node_facts(group)
    if group.zone is not None and group.zone not in zones:
        problem = f": zone {group.zone} has no subnet"
        remedy = f"add {group.zone} to cluster.zones, or correct its zone"
        yield Lint("reservation-zone", problem, remedy, RESERVATION_ZONES)
    if group.zone is None and group.capacity_reservation is not None:
        problem = " has a reservation in one zone, but subnets in all zones"
        remedy = "set its zone to the zone of the reservation"
        yield Lint("reservation-zone", problem, remedy, RESERVATION_ZONES)
    if group.efa and not node.efa_interfaces:
        problem = f": {group.instance} has no EFA interface"
        yield Lint("efa-instance", problem, "remove efa, or change instance", EFA_INSTANCES)
    if node.efa_interfaces and group.zone is None:
        problem = " has EFA, whose traffic stays in one zone"
        yield Lint("efa-zone", problem, "set its zone", EFA_INSTANCES)
    if group.placement_group is not None and group.capacity_reservation is not None:
        problem = " has a placement group and a reservation"
        remedy = "remove placement_group, because the reservation places its machines"
        yield Lint("placement-group", problem, remedy, PLACEMENT_GROUPS)
    if node.support.needs_ami == "yes" and group.ami is None:
        problem = ": EKS has no machine image with its driver"
        remedy = "set ami to an image of Amazon Linux 2023 with that driver"
        yield Lint("machine-image", problem, remedy, node.support.source)


def check_cluster(cluster: Cluster, today: dt.date) -> list[Lint]:
    """Return a cluster's warnings; raises SettingsError for the first error."""
    lints = list(find_lints(cluster, today))
    for lint in lints:
        if lint.is_error:
            raise SettingsError(f"{lint.problem} ({lint.code})", lint.remedy)
    return lints
