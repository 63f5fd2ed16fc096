"""Remove a cluster, and find resources that remain in the account."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from regauge.jobs.clusters.rendering import render_commands
from regauge.jobs.clusters.settings import CLUSTER_TAG, Cluster
from regauge.jobs.targets import Leftover
from regauge.jobs.targets._clients import find_client
from regauge.system.errors import ChildError, PreflightError, TransientError, first_line

INSTALL_COMMAND = "pip install 'regauge[aws]'"


def list_removal_commands(cluster: Cluster, folder: Path) -> list[list[str]]:
    return [shlex.split(line) for line in render_commands("delete", cluster, folder)]


def list_audit_commands(cluster: Cluster, folder: Path) -> list[str]:
    """Return the commands that list resources possibly left by a cluster."""
    return render_commands("audit", cluster, folder)


def remove_cluster(cluster: Cluster, folder: Path) -> list[Leftover]:
    """Remove a cluster; return the resources that still exist.

    Raises PreflightError without the clients, and ChildError with a failed command's exit code.
    """
    commands = list_removal_commands(cluster, folder)
    packages = {"aws": "the AWS CLI", "terraform": "Terraform"}
    for name in dict.fromkeys(command[0] for command in commands):
        find_client(name, packages.get(name, name))
    client = _load_client_factory(cluster.region)
    for command in commands:
        code = subprocess.run(command, check=False).returncode
        if code:
            problem = f"'{shlex.join(command)}' ended with exit code {code}"
            raise ChildError(code, f"{problem}; correct the cause, and run this command again")
    return find_leftovers(cluster, folder, client)


def find_leftovers(
    cluster: Cluster, folder: Path, client: Callable[[str], Any] | None = None
) -> list[Leftover]:
    """Return a cluster's remaining resources, each with the command that removes it.

    `client` maps a service name to a boto3 client. Raises PreflightError without boto3, and
    TransientError if the account cannot be read.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    client = client or _load_client_factory(cluster.region)
    try:
        return [
            Leftover(name, reason, f"aws {command} --region {cluster.region} {option} {identifier}")
            for find in FINDERS
            for name, reason, command, option, identifier in find(cluster, client)
        ]
    except (BotoCoreError, ClientError) as error:
        commands = "; ".join(list_audit_commands(cluster, folder))
        problem = f"the account cannot be read: {first_line(error)}"
        raise TransientError(problem, f"check the credentials, then run: {commands}") from None


def _load_client_factory(region: str) -> Callable[[str], Any]:
    """Return a factory for boto3 clients; raises PreflightError without boto3."""
    try:
        import boto3
    except ImportError:
        raise PreflightError("the audit of a cluster needs boto3", INSTALL_COMMAND) from None

    def load(service: str) -> Any:
        return boto3.client(service, region_name=region)

    return load


Resource = tuple[str, str, str, str, str]
"""Name, reason, and the parts of the removal command: operation, option, identifier."""


def _list_items(client: Any, operation: str, key: str, **request: Any) -> Iterator[dict[str, Any]]:
    for page in client.get_paginator(operation).paginate(**request):
        yield from page[key]


def _find_instances(cluster: Cluster, client: Callable[[str], Any]) -> Iterator[Resource]:
    states = ["pending", "running", "stopping", "stopped"]
    filters = [
        {"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster.name]},
        {"Name": "instance-state-name", "Values": states},
    ]
    ec2 = client("ec2")
    for reservation in _list_items(ec2, "describe_instances", "Reservations", Filters=filters):
        for instance in reservation["Instances"]:
            name, kind = instance["InstanceId"], instance["InstanceType"]
            command = "ec2 terminate-instances"
            yield name, f"machine of type {kind}", command, "--instance-ids", name


def _find_volumes(cluster: Cluster, client: Callable[[str], Any]) -> Iterator[Resource]:
    filters = [{"Name": f"tag:kubernetes.io/cluster/{cluster.name}", "Values": ["owned"]}]
    for volume in _list_items(client("ec2"), "describe_volumes", "Volumes", Filters=filters):
        name, reason = volume["VolumeId"], f"EBS volume of {volume['Size']} GiB of a claim"
        yield name, reason, "ec2 delete-volume", "--volume-id", name


def _find_load_balancers(cluster: Cluster, client: Callable[[str], Any]) -> Iterator[Resource]:
    service, command = client("elbv2"), "elbv2 delete-load-balancer"
    for balancer in _list_items(service, "describe_load_balancers", "LoadBalancers"):
        arn, name = balancer["LoadBalancerArn"], balancer["LoadBalancerName"]
        tags = service.describe_tags(ResourceArns=[arn])["TagDescriptions"][0]["Tags"]
        values = {tag["Key"]: tag["Value"] for tag in tags}
        is_owned = values.get(f"kubernetes.io/cluster/{cluster.name}") == "owned"
        if is_owned or values.get("elbv2.k8s.aws/cluster") == cluster.name:
            yield name, "load balancer of a service", command, "--load-balancer-arn", arn


def _find_file_systems(cluster: Cluster, client: Callable[[str], Any]) -> Iterator[Resource]:
    for service in ("efs", "fsx"):
        for system in _list_items(client(service), "describe_file_systems", "FileSystems"):
            if {"Key": CLUSTER_TAG, "Value": cluster.name} in system.get("Tags", []):
                name, reason = system["FileSystemId"], f"{NAMES[service]} file system with data"
                yield name, reason, f"{service} delete-file-system", "--file-system-id", name


def _find_log_groups(cluster: Cluster, client: Callable[[str], Any]) -> Iterator[Resource]:
    request = {"logGroupNamePrefix": f"/aws/eks/{cluster.name}/"}
    for group in _list_items(client("logs"), "describe_log_groups", "logGroups", **request):
        name, reason = group["logGroupName"], "log group of the control plane"
        yield name, reason, "logs delete-log-group", "--log-group-name", name


NAMES = {"efs": "EFS", "fsx": "FSx"}
FINDERS = (
    _find_instances,
    _find_volumes,
    _find_load_balancers,
    _find_file_systems,
    _find_log_groups,
)
