"""Checks for cluster settings; each finding names a source."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterator

from regauge.jobs.clusters.facts import find_node_facts, load_kubernetes_versions
from regauge.jobs.clusters.settings import Cluster, ClusterNodes
from regauge.jobs.lints import Lint, build_lint, raise_errors

FIRST_ETCD_WITHOUT_V2 = (3, 6)
WARNING_DAYS = 60
"""Report a version from this many days before standard support ends."""


def check_cluster(cluster: Cluster, today: dt.date) -> list[Lint]:
    """Return a cluster's warnings; raises SettingsError for the first error."""
    lints = list(find_lints(cluster, today))
    raise_errors(lints)
    return lints


def find_lints(cluster: Cluster, today: dt.date) -> Iterator[Lint]:
    yield from _check_kubernetes_version(cluster.kubernetes_version, today)
    for group in cluster.node_groups:
        yield from _check_group(group, cluster.zones)
    etcd = cluster.etcd
    if etcd is not None and tuple(map(int, etcd.split("."))) >= FIRST_ETCD_WITHOUT_V2:
        yield build_lint("etcd-v2", version=etcd)


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
        values = {"version": version, "problem": problem, "supported": " or ".join(supported)}
        yield build_lint("kubernetes-version", **values)._replace(is_error=is_error)


def _check_group(group: ClusterNodes, zones: Collection[str]) -> Iterator[Lint]:
    """Report node group settings that contradict each other, or that EKS does not have."""
    node, values = find_node_facts(group), {"group": group.name, "machine": group.instance}
    if group.zone is not None and group.zone not in zones:
        problem = f": cluster.zones does not contain {group.zone}"
        remedy = f"add {group.zone} to cluster.zones, or correct its zone"
        yield build_lint("reservation-zone", group=group.name, problem=problem, remedy=remedy)
    if group.zone is None and group.capacity_reservation is not None:
        problem = " has a reservation in one zone, but subnets in all zones"
        remedy = "set its zone to the zone of the reservation"
        yield build_lint("reservation-zone", group=group.name, problem=problem, remedy=remedy)
    if group.efa and not node.efa_interfaces:
        yield build_lint("efa-instance", **values)
    if node.efa_interfaces and group.zone is None:
        yield build_lint("efa-zone", **values)
    if group.placement_group is not None and group.capacity_reservation is not None:
        yield build_lint("placement-group", **values)
    if node.support.needs_ami == "yes" and group.ami is None:
        yield build_lint("machine-image", source=node.support.source, **values)
