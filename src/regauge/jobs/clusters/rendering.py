"""The folder of a cluster: its documents, the commands that create it, and its price."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from regauge.jobs.clusters import terraform
from regauge.jobs.clusters.eksctl import build_cluster_config
from regauge.jobs.clusters.facts import find_node_facts
from regauge.jobs.clusters.manifests import build_manifests, build_variable_prefix
from regauge.jobs.clusters.settings import CLUSTER_TAG
from regauge.machines.catalog import REGION
from regauge.system.files import check_absent, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.jobs.clusters.settings import Cluster, ClusterFiles

EKSCTL_FILE = "eksctl/cluster.yaml"
TERRAFORM_FOLDER = "terraform"
MANIFESTS = "manifests"
CLUSTER_USD_PER_HOUR = 0.10
"""Price of a cluster of EKS in standard support. Source: https://aws.amazon.com/eks/pricing/."""


def render_files(cluster: Cluster) -> dict[str, str]:
    """Return the text of every file of a cluster by its path in the folder."""
    import yaml

    config = yaml.safe_dump(build_cluster_config(cluster), sort_keys=False, width=100)
    variables = json.dumps(terraform.build_variables(cluster), indent=2) + "\n"
    configuration = terraform.read_configuration() | {"terraform.tfvars.json": variables}
    return {
        EKSCTL_FILE: str(config),
        **{f"{TERRAFORM_FOLDER}/{name}": text for name, text in configuration.items()},
        **{f"{MANIFESTS}/{name}": text for name, text in build_manifests(cluster).items()},
    }


def write_files(folder: Path, files: dict[str, str], *, overwrite: bool) -> None:
    """Write the files of a cluster; raises SettingsError if one exists and none is overwritten."""
    check_absent((folder / name for name in files), overwrite=overwrite)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, text, durable=False)


def list_creation_commands(cluster: Cluster, folder: Path) -> list[str]:
    """Return the shell commands that create a cluster from its folder, in order."""
    if cluster.tool == "eksctl":
        options = (find_node_facts(item).support.eksctl_option for item in cluster.node_groups)
        words = ["eksctl create cluster --config-file", _quote(folder / EKSCTL_FILE)]
        commands = [" ".join([*words, *dict.fromkeys(filter(None, options))])]
        files = [_list_eksctl_commands(cluster, item) for item in cluster.file_systems]
    else:
        directory = _quote(folder / TERRAFORM_FOLDER)
        update = f"aws eks update-kubeconfig --region {cluster.region} --name {cluster.name}"
        commands = [f"terraform -chdir={directory} init", f"terraform -chdir={directory} apply"]
        commands.append(update)
        files = [_list_terraform_commands(item, directory) for item in cluster.file_systems]
    manifests = folder / MANIFESTS
    commands += [line for lines in files for line in lines]
    for name in build_manifests(cluster):
        path = _quote(manifests / name)
        if name == "file-systems.yaml":
            commands.append(f"envsubst < {path} | kubectl apply -f -")
        elif name.endswith("kustomization.yaml"):
            commands.append(f"kubectl apply --server-side -k {_quote((manifests / name).parent)}")
        else:
            commands.append(f"kubectl apply -f {path}")
    return commands


def _list_eksctl_commands(cluster: Cluster, files: ClusterFiles) -> list[str]:
    """Return the commands that create a file system for a cluster of eksctl.

    eksctl creates no file systems. The variables have the identifiers for `envsubst`.
    """
    prefix, region = build_variable_prefix(files), f"--region {cluster.region}"
    zone = terraform.find_file_zone(cluster)
    subnet = (
        f"SUBNET=$(aws ec2 describe-subnets {region} --filters"
        f" Name=tag:alpha.eksctl.io/cluster-name,Values={cluster.name}"
        f" Name=availability-zone,Values={zone} Name=tag-key,Values=kubernetes.io/role/internal-elb"
        " --query 'Subnets[0].SubnetId' --output text)"
    )
    group = (
        f"GROUP=$(aws eks describe-cluster {region} --name {cluster.name}"
        " --query cluster.resourcesVpcConfig.clusterSecurityGroupId --output text)"
    )
    tags = f"--tags Key={CLUSTER_TAG},Value={cluster.name} Key=Name,Value={files.name}"
    if files.kind == "efs":
        create = (
            f"export {prefix}_ID=$(aws efs create-file-system {region} --encrypted {tags}"
            f" --creation-token {cluster.name}-{files.name} --query FileSystemId --output text)"
        )
        mount = (
            f"aws efs create-mount-target {region} --file-system-id ${prefix}_ID"
            " --subnet-id $SUBNET --security-groups $GROUP"
        )
        return [subnet, group, create, mount]
    read = f"aws fsx describe-file-systems {region} --file-system-ids ${prefix}_ID"
    query = "--query 'FileSystems[0]"
    create = (
        f"export {prefix}_ID=$(aws fsx create-file-system {region} --file-system-type LUSTRE"
        f" --storage-capacity {files.size_gib} --subnet-ids $SUBNET --security-group-ids $GROUP"
        " --lustre-configuration DeploymentType=PERSISTENT_2,PerUnitStorageThroughput=250"
        f" {tags} --query FileSystem.FileSystemId --output text)"
    )
    return [
        subnet,
        group,
        create,
        f"export {prefix}_DNS=$({read} {query}.DNSName' --output text)",
        f"export {prefix}_MOUNT=$({read} {query}.LustreConfiguration.MountName' --output text)",
    ]


def _list_terraform_commands(files: ClusterFiles, directory: str) -> list[str]:
    """Return the commands that read the identifiers of a file system from Terraform's outputs."""
    prefix = build_variable_prefix(files)
    if files.kind == "efs":
        key = f"'.\"{files.name}\"'"
        return [
            f"export {prefix}_ID=$(terraform -chdir={directory} output -json efs | jq -r {key})"
        ]
    fields = {"ID": "id", "DNS": "dns_name", "MOUNT": "mount_name"}
    read = f"terraform -chdir={directory} output -json lustre"
    return [
        f"export {prefix}_{suffix}=$({read} | jq -r '.\"{files.name}\".{field}')"
        for suffix, field in fields.items()
    ]


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def describe_cluster_price(cluster: Cluster) -> str:
    """Return the price in USD per hour with its date, as text.

    It includes the control plane and the machines, but no file systems, disks and traffic.
    """
    nodes = [find_node_facts(group) for group in cluster.node_groups]
    unknown = [node.group.instance for node in nodes if node.usd_per_hour is None]
    if unknown:
        return f"unknown: the catalog has no price of {unknown[0]}"
    total = sum(node.usd_per_hour or 0 for node in nodes) + CLUSTER_USD_PER_HOUR
    parts = " + ".join(f"{node.group.count} x {node.group.instance}" for node in nodes)
    dates = [node.instance.as_of.isoformat() for node in nodes if node.instance.as_of]
    date = f", {min(dates)}" if dates else ""
    return f"{total:.2f} USD per hour on demand (EKS + {parts}, {REGION}{date})"


def describe_cluster(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Return the files, the commands and the price of a cluster as JSON-ready values."""
    return {
        "cluster": cluster.name,
        "files": [str(folder / name) for name in render_files(cluster)],
        "commands": list_creation_commands(cluster, folder),
        "price": describe_cluster_price(cluster),
    }
