"""Checks of the settings of a cluster; each finding names its source."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator

from regauge.jobs.clusters.facts import find_node_facts, load_kubernetes_versions
from regauge.jobs.clusters.settings import Cluster
from regauge.jobs.lints import Lint
from regauge.machines.catalog import find_efa_interfaces
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
"""Days before the end of standard support from which a version is reported."""

ClusterCheck = Callable[[Cluster, dt.date], Iterator[Lint]]


def check_kubernetes_version(cluster: Cluster, today: dt.date) -> Iterator[Lint]:
    """Report a version that EKS does not support, or supports at a higher price."""
    code, versions = "kubernetes-version", load_kubernetes_versions()
    version = versions.get(cluster.kubernetes_version)
    supported = [name for name, item in versions.items() if item.standard_until > today]
    remedy = f"set cluster.kubernetes_version to {' or '.join(supported)}"
    name = f"Kubernetes {cluster.kubernetes_version}"
    if version is None:
        yield Lint(code, f"{name} is not a known version of EKS", remedy, EKS_VERSIONS)
    elif version.extended_until <= today:
        problem = f"{name} is not supported since {version.extended_until}"
        yield Lint(code, problem, remedy, EKS_VERSIONS)
    elif version.standard_until <= today:
        problem = f"{name} left standard support on {version.standard_until}, and costs more"
        yield Lint(code, problem, remedy, EKS_VERSIONS, is_error=False)
    elif (version.standard_until - today).days < WARNING_DAYS:
        problem = f"{name} leaves standard support on {version.standard_until}"
        yield Lint(code, problem, remedy, EKS_VERSIONS, is_error=False)


def check_reservation_zone(cluster: Cluster, _: dt.date) -> Iterator[Lint]:
    """Report groups whose machines may start outside of the zone of their reservation."""
    for group in cluster.node_groups:
        label = f"node group '{group.name}'"
        if group.zone is not None and group.zone not in cluster.zones:
            problem = f"{label}: zone {group.zone} has no subnet"
            remedy = f"add {group.zone} to cluster.zones, or correct its zone"
            yield Lint("reservation-zone", problem, remedy, RESERVATION_ZONES)
        elif group.zone is None and group.capacity_reservation is not None:
            problem = f"{label} has a reservation in one zone, but subnets in all zones"
            remedy = "set its zone to the zone of the reservation"
            yield Lint("reservation-zone", problem, remedy, RESERVATION_ZONES)


def check_efa(cluster: Cluster, _: dt.date) -> Iterator[Lint]:
    """Report groups with EFA whose machine type has none."""
    for group in cluster.node_groups:
        if group.efa and not find_efa_interfaces(group.instance):
            problem = f"node group '{group.name}': {group.instance} has no EFA interface"
            yield Lint("efa-instance", problem, "remove efa, or change instance", EFA_INSTANCES)


def check_efa_zone(cluster: Cluster, _: dt.date) -> Iterator[Lint]:
    """Report groups with EFA in several zones, between which EFA has no traffic."""
    for group in cluster.node_groups:
        if find_node_facts(group).efa_interfaces and group.zone is None:
            problem = f"node group '{group.name}' has EFA, whose traffic stays in one zone"
            yield Lint("efa-zone", problem, "set its zone", EFA_INSTANCES)


def check_placement_group(cluster: Cluster, _: dt.date) -> Iterator[Lint]:
    """Report groups with a placement group and a reservation that may be outside of it."""
    for group in cluster.node_groups:
        if group.placement_group is not None and group.capacity_reservation is not None:
            problem = f"node group '{group.name}' has a placement group and a reservation"
            remedy = "remove placement_group, because the reservation places its machines"
            yield Lint("placement-group", problem, remedy, PLACEMENT_GROUPS)


def check_etcd(cluster: Cluster, _: dt.date) -> Iterator[Lint]:
    """Report a version of etcd without version 2 of its API, which torch's client needs."""
    if cluster.etcd is None:
        return
    major, minor, _patch = map(int, cluster.etcd.split("."))
    if (major, minor) >= FIRST_ETCD_WITHOUT_V2:
        problem = f"etcd {cluster.etcd} has no --enable-v2, which the rendezvous needs"
        yield Lint("etcd-v2", problem, "set cluster.etcd to 3.5.25", ETCD_UPGRADE)


def check_machine_image(cluster: Cluster, _: dt.date) -> Iterator[Lint]:
    """Report groups whose chips need a machine image that EKS does not have."""
    for group in cluster.node_groups:
        support = find_node_facts(group).support
        if support.needs_ami and group.ami is None:
            problem = f"node group '{group.name}': EKS has no machine image with its driver"
            remedy = "set ami to an image of Amazon Linux 2023 with that driver"
            yield Lint("machine-image", problem, remedy, support.source)


CHECKS: tuple[ClusterCheck, ...] = (
    check_kubernetes_version,
    check_reservation_zone,
    check_efa,
    check_efa_zone,
    check_placement_group,
    check_etcd,
    check_machine_image,
)


def check_cluster(cluster: Cluster, today: dt.date) -> list[Lint]:
    """Return the warnings about a cluster; raises SettingsError for the first error."""
    lints = [lint for check in CHECKS for lint in check(cluster, today)]
    for lint in lints:
        if lint.is_error:
            raise SettingsError(f"{lint.problem} ({lint.code})", lint.remedy)
    return lints
