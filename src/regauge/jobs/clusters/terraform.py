"""The Terraform configuration of a cluster: fixed files, and the values of their variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.jobs.clusters.eksctl import list_addons
from regauge.jobs.clusters.facts import FOLDER, NodeFacts, find_node_facts

if TYPE_CHECKING:
    from regauge.jobs.clusters.settings import Cluster

FILES = ("main.tf", "variables.tf", "nodeadm.tftpl")
"""Files for provider hashicorp/aws 5.79 or later of major version 5."""


def read_configuration() -> dict[str, str]:
    """Return the text of the fixed files by name."""
    folder = FOLDER / "terraform"
    return {name: (folder / name).read_text(encoding="utf-8") for name in FILES}


def build_variables(cluster: Cluster) -> dict[str, Any]:
    """Return the content of `terraform.tfvars.json`, the values of the variables."""
    nodes = {group.name: find_node_facts(group) for group in cluster.node_groups}
    zone = find_file_zone(cluster)
    return {
        "name": cluster.name,
        "region": cluster.region,
        "zones": list(cluster.zones),
        "kubernetes_version": cluster.kubernetes_version,
        "addons": list_addons(cluster),
        "node_groups": {name: _build_node_group(node, cluster) for name, node in nodes.items()},
        "lustre": {
            item.name: {"size_gib": item.size_gib, "zone": zone}
            for item in cluster.file_systems
            if item.kind == "fsx"
        },
        "efs": [item.name for item in cluster.file_systems if item.kind == "efs"],
        "tags": cluster.all_tags,
    }


def find_file_zone(cluster: Cluster) -> str:
    """Return the zone of the file systems: that of the first group with a zone."""
    zones = (group.zone for group in cluster.node_groups)
    return next(filter(None, zones), cluster.zones[0])


def _build_node_group(node: NodeFacts, cluster: Cluster) -> dict[str, Any]:
    group = node.group
    reservation = group.capacity_reservation
    is_group = reservation is not None and reservation.startswith("arn:")
    return {
        "instance": group.instance,
        "count": group.count,
        "min_count": group.minimum,
        "max_count": group.maximum,
        "market": group.market,
        "zones": list(cluster.zones) if group.zone is None else [group.zone],
        "capacity_reservation": None if is_group else reservation,
        "reservation_group": reservation if is_group else None,
        "placement_group": group.placement_group,
        "ami": group.ami,
        "ami_type": node.support.terraform_ami_type,
        "volume_gib": group.volume_gib,
        "efa_interfaces": node.efa_interfaces,
        "labels": node.labels,
        "taint": node.support.taint or None,
    }
