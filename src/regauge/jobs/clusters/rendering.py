"""Render a cluster folder, list the commands that create the cluster, and price it.

The Terraform configuration and most manifests are fixed files. The eksctl file uses the Terraform
variables' values, too.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from regauge.jobs.clusters.facts import FOLDER, NodeFacts, find_node_facts
from regauge.jobs.clusters.settings import Cluster
from regauge.jobs.targets import Document
from regauge.jobs.targets._kubernetes.documents import ETCD_ENDPOINT
from regauge.jobs.targets._kubernetes.volumes import DRIVERS
from regauge.jobs.targets._templates import build_environment, render_document, render_documents
from regauge.machines.catalog import REGION
from regauge.monitoring.bundle import list_exporters, read_manifest
from regauge.system.files import check_absent, write_atomic

TERRAFORM_FOLDER = "terraform"
ADDONS = ("vpc-cni", "coredns", "kube-proxy", "eks-pod-identity-agent", "aws-ebs-csi-driver")
FILE_SYSTEM_ADDONS = {"fsx": "aws-fsx-csi-driver", "efs": "aws-efs-csi-driver"}
CLOUDWATCH_ADDON = "amazon-cloudwatch-observability"
"""Container Insights. Source: https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/
install-CloudWatch-Observability-EKS-addon.html."""
OPERATORS = {
    "training_operator": "github.com/kubeflow/training-operator.git/manifests/overlays/standalone",
    "trainer": "github.com/kubeflow/trainer.git/manifests/overlays/manager",
}
"""Version setting -> operator address. Sources: https://www.kubeflow.org/docs/
components/trainer/legacy-v1/installation/ and .../trainer/operator-guides/installation/."""
CLUSTER_USD_PER_HOUR = 0.10
"""EKS cluster price in standard support. Source: https://aws.amazon.com/eks/pricing/."""


def render_text(template: str, **values: Any) -> str:
    """Render a template from `templates/`, such as a Dockerfile."""
    text = (FOLDER / "templates" / template).read_text(encoding="utf-8")
    return build_environment().from_string(text).render(values)


def render_commands(template: str, cluster: Cluster, folder: Path, **values: Any) -> list[str]:
    """Return a template's shell commands in order; one command may span several lines."""

    def quote_path(name: str) -> str:
        return shlex.quote(str(folder / name))

    text = render_text(f"{template}.sh.jinja", cluster=cluster, path=quote_path, **values)
    return [line.rstrip() for line in re.sub(r" *\\\n *", " ", text).splitlines()]


def render_files(cluster: Cluster) -> dict[str, str]:
    """Return path in the cluster folder -> file text."""
    variables = build_variables(cluster)
    eksctl = render_document(FOLDER / "templates" / "eksctl.yaml.jinja", **variables)
    terraform = {
        path.name: path.read_text(encoding="utf-8")
        for name in ("main.tf", "variables.tf", "nodeadm.tftpl")
        for path in [FOLDER / "terraform" / name]
    } | {"terraform.tfvars.json": json.dumps(variables, indent=2) + "\n"}
    return {
        "eksctl/cluster.yaml": Document("cluster.yaml", eksctl).text,
        **{f"{TERRAFORM_FOLDER}/{name}": text for name, text in terraform.items()},
        **{f"manifests/{name}": text for name, text in build_manifests(cluster).items()},
    }


def build_variables(cluster: Cluster) -> dict[str, Any]:
    """Return the variables' values, for `terraform.tfvars.json`."""
    nodes = {group.name: find_node_facts(group) for group in cluster.node_groups}
    zone = find_file_zone(cluster)
    kinds = dict.fromkeys(item.kind for item in cluster.file_systems)
    insights = _configure_insights(cluster)
    return {
        "name": cluster.name,
        "region": cluster.region,
        "zones": list(cluster.zones),
        "kubernetes_version": cluster.kubernetes_version,
        "addons": [*ADDONS, *(FILE_SYSTEM_ADDONS[kind] for kind in kinds), *insights],
        "addon_values": insights,
        "node_groups": {name: _describe_nodes(node, cluster) for name, node in nodes.items()},
        "lustre": {
            item.name: {"size_gib": item.size_gib, "zone": zone}
            for item in cluster.file_systems
            if item.kind == "fsx"
        },
        "efs": [item.name for item in cluster.file_systems if item.kind == "efs"],
        "tags": cluster.all_tags,
    }


def _configure_insights(cluster: Cluster) -> dict[str, str]:
    """Return add-on -> configuration in JSON for Container Insights; empty without it.

    A device has one reader: with the exporters, the add-on leaves the accelerators to them.
    """
    if "cloudwatch" not in cluster.monitoring:
        return {}
    has_exporters = "exporters" in cluster.monitoring
    kubernetes = {
        "enhanced_container_insights": True,
        "accelerated_compute_metrics": not has_exporters,
    }
    agent = {"config": {"logs": {"metrics_collected": {"kubernetes": kubernetes}}}}
    return {CLOUDWATCH_ADDON: json.dumps({"agent": agent})}


def find_file_zone(cluster: Cluster) -> str:
    """Return the zone for file systems: the first node group zone."""
    zones = (group.zone for group in cluster.node_groups)
    return next(filter(None, zones), cluster.zones[0])


def _describe_nodes(node: NodeFacts, cluster: Cluster) -> dict[str, Any]:
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


def build_manifests(cluster: Cluster) -> dict[str, str]:
    """Return file name -> manifest text, in creation order."""
    nodes = [find_node_facts(group) for group in cluster.node_groups]
    plugins = list(dict.fromkeys(node.support.plugin for node in nodes if node.support.plugin))
    names = [*plugins, *(["efa.yaml"] if any(node.efa_interfaces for node in nodes) else [])]
    manifests = {f"device-plugin-{name}": _read_manifest(name) for name in names}
    if cluster.etcd is not None:
        text = _read_manifest("etcd.yaml").replace("{endpoint}", ETCD_ENDPOINT)
        manifests["etcd.yaml"] = text.replace("{version}", cluster.etcd)
    for setting, address in OPERATORS.items():
        if version := getattr(cluster, setting):
            text = _read_manifest("kustomization.yaml").replace("{version}", version)
            name = f"{setting.replace('_', '-')}/kustomization.yaml"
            manifests[name] = text.replace("{address}", address)
    if "exporters" in cluster.monitoring:
        exporters = ["htop.yaml", *(name for plugin in plugins for name in list_exporters(plugin))]
        manifests |= {f"monitoring-{name}": read_manifest(name) for name in exporters}
    if cluster.file_systems:
        template, files = FOLDER / "templates" / "file_systems.yaml.jinja", cluster.file_systems
        documents = render_documents(template, file_systems=files, drivers=DRIVERS)
        manifests["file-systems.yaml"] = Document("file-systems.yaml", documents).text
    return manifests


def _read_manifest(name: str) -> str:
    return (FOLDER / "manifests" / name).read_text(encoding="utf-8")


def write_files(folder: Path, files: dict[str, str], *, overwrite: bool) -> None:
    """Write a cluster's files; raises SettingsError for an existing file unless overwriting."""
    check_absent((folder / name for name in files), overwrite=overwrite)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, text, durable=False)


def list_creation_commands(cluster: Cluster, folder: Path) -> list[str]:
    options = (find_node_facts(item).support.eksctl_option for item in cluster.node_groups)
    return render_commands(
        "create",
        cluster,
        folder,
        zone=find_file_zone(cluster),
        manifests=list(build_manifests(cluster)),
        plugin_options=" ".join(dict.fromkeys(filter(None, options))),
    )


def describe_cluster_price(cluster: Cluster) -> str:
    """Return the price in USD per hour with its date, as text.

    It includes the control plane and the machines, but no file systems, disks and traffic.
    """
    nodes = [find_node_facts(group) for group in cluster.node_groups]
    unknown = [node.group.instance for node in nodes if node.usd_per_hour is None]
    if unknown:
        return f"unknown: the catalog lacks a price for {unknown[0]}"
    total = sum(node.usd_per_hour or 0 for node in nodes) + CLUSTER_USD_PER_HOUR
    parts = " + ".join(f"{node.group.count} x {node.group.instance}" for node in nodes)
    dates = [node.instance.as_of.isoformat() for node in nodes if node.instance.as_of]
    date = f", {min(dates)}" if dates else ""
    return f"{total:.2f} USD per hour on demand (EKS + {parts}, {REGION}{date})"


def describe_cluster(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Return a cluster's files, commands and price as JSON-ready values."""
    return {
        "cluster": cluster.name,
        "files": [str(folder / name) for name in render_files(cluster)],
        "commands": list_creation_commands(cluster, folder),
        "price": describe_cluster_price(cluster),
    }
