"""The ClusterConfig of eksctl (v1alpha5) for a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.jobs.clusters.facts import NodeFacts, find_node_facts

if TYPE_CHECKING:
    from regauge.jobs.clusters.settings import Cluster

ADDONS = ("vpc-cni", "coredns", "kube-proxy", "eks-pod-identity-agent", "aws-ebs-csi-driver")
FILE_SYSTEM_ADDONS = {"fsx": "aws-fsx-csi-driver", "efs": "aws-efs-csi-driver"}
CLOUDWATCH_ADDON = "amazon-cloudwatch-observability"
"""Container Insights. Source: https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/
install-CloudWatch-Observability-EKS-addon.html."""
AMI_FAMILY = "AmazonLinux2023"


def list_addons(cluster: Cluster) -> list[str]:
    """Return the add-ons of EKS that a cluster needs."""
    kinds = dict.fromkeys(item.kind for item in cluster.file_systems)
    insights = [CLOUDWATCH_ADDON] if "cloudwatch" in cluster.monitoring else []
    return [*ADDONS, *(FILE_SYSTEM_ADDONS[kind] for kind in kinds), *insights]


def build_cluster_config(cluster: Cluster) -> dict[str, Any]:
    """Return the ClusterConfig, as a JSON-ready document.

    Source: eksctl-io/eksctl, pkg/apis/eksctl.io/v1alpha5/assets/schema.json.
    """
    tags = cluster.all_tags
    return {
        "apiVersion": "eksctl.io/v1alpha5",
        "kind": "ClusterConfig",
        "metadata": {
            "name": cluster.name,
            "region": cluster.region,
            "version": cluster.kubernetes_version,
            "tags": tags,
        },
        "availabilityZones": list(cluster.zones),
        "upgradePolicy": {"supportType": "STANDARD"},
        "iam": {"withOIDC": True},
        "addonsConfig": {"autoApplyPodIdentityAssociations": True},
        "addons": [{"name": name} for name in list_addons(cluster)],
        "managedNodeGroups": [
            _build_node_group(find_node_facts(group), tags) for group in cluster.node_groups
        ],
    }


def _build_node_group(node: NodeFacts, tags: dict[str, str]) -> dict[str, Any]:
    group, taint = node.group, node.support.taint
    document: dict[str, Any] = {
        "name": group.name,
        "instanceType": group.instance,
        "amiFamily": AMI_FAMILY,
        "desiredCapacity": group.count,
        "minSize": group.minimum,
        "maxSize": group.maximum,
        "privateNetworking": True,
        "volumeSize": group.volume_gib,
        "volumeType": "gp3",
        "volumeEncrypted": True,
        "tags": dict(tags),
    }
    if node.labels:
        document["labels"] = node.labels
    if taint:
        document["taints"] = [{"key": taint, "value": "present", "effect": "NoSchedule"}]
    if group.ami is not None:
        document["ami"] = group.ami
    if group.zone is not None:
        document["availabilityZones"] = [group.zone]
    if node.efa_interfaces:
        document["efaEnabled"] = True
    if group.market == "spot":
        document["spot"] = True
    if group.market == "capacity-block":
        document["instanceMarketOptions"] = {"marketType": "capacity-block"}
    if group.capacity_reservation is not None:
        document["capacityReservation"] = {
            "capacityReservationTarget": build_reservation_target(group.capacity_reservation)
        }
    if group.placement_group is not None:
        document["placement"] = {"groupName": group.placement_group}
    return document


def build_reservation_target(identifier: str) -> dict[str, str]:
    """Return the target of a reservation, or of a resource group of reservations."""
    if identifier.startswith("arn:"):
        return {"capacityReservationResourceGroupARN": identifier}
    return {"capacityReservationID": identifier}
