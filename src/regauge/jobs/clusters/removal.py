"""The commands that remove a cluster, and the audit of resources that the account still has."""

from __future__ import annotations

import shlex
import subprocess
from typing import TYPE_CHECKING, Any

from regauge.jobs.clusters.rendering import EKSCTL_FILE, TERRAFORM_FOLDER
from regauge.jobs.clusters.settings import CLUSTER_TAG
from regauge.jobs.targets import Leftover
from regauge.jobs.targets._clients import find_client
from regauge.system.errors import ChildError, PreflightError, TransientError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from regauge.jobs.clusters.settings import Cluster

KUBECTL_FILE = "kubectl.yaml"
"""Configuration of kubectl that `delete` writes into the folder of the cluster."""
INSTALL_COMMAND = "pip install 'regauge[aws]'"


def list_removal_commands(cluster: Cluster, folder: Path) -> list[list[str]]:
    """Return the command lines that remove a cluster, in order.

    Services of type LoadBalancer and claims are removed first: their resources outlive the nodes.
    A separate configuration of kubectl contains this cluster alone, so no other one is changed.
    """
    config = str(folder / KUBECTL_FILE)
    select = ["--region", cluster.region, "--name", cluster.name, "--kubeconfig", config]
    kubectl = ["kubectl", "--kubeconfig", config]
    delete = [*kubectl, "delete", "--ignore-not-found", "--all-namespaces"]
    commands = [
        ["aws", "eks", "update-kubeconfig", *select],
        [*delete, "services", "--field-selector", "spec.type=LoadBalancer"],
        [*delete, "persistentvolumeclaims", "--all"],
    ]
    if cluster.tool == "eksctl":
        file = str(folder / EKSCTL_FILE)
        remove = ["eksctl", "delete", "cluster", "--config-file", file, "--wait"]
        return [*commands, [*remove, "--disable-nodegroup-eviction"]]
    chdir = f"-chdir={folder / TERRAFORM_FOLDER}"
    return [*commands, ["terraform", chdir, "destroy", "-auto-approve"]]


def list_audit_commands(cluster: Cluster) -> list[list[str]]:
    """Return the command lines by which a user lists the resources that a cluster may leave."""
    region = ["--region", cluster.region]
    volume_filter = f"Name=tag:kubernetes.io/cluster/{cluster.name},Values=owned"
    tag_filter = f"Key={CLUSTER_TAG},Values={cluster.name}"
    return [
        ["aws", "ec2", "describe-volumes", *region, "--filters", volume_filter],
        ["aws", "elbv2", "describe-load-balancers", *region],
        ["aws", "resourcegroupstaggingapi", "get-resources", *region, "--tag-filters", tag_filter],
    ]


def remove_cluster(cluster: Cluster, folder: Path) -> list[Leftover]:
    """Run the commands that remove a cluster; return the resources that still exist.

    Raises PreflightError without the clients, and ChildError with the exit code of a command that
    failed.
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
    return find_leftovers(cluster, client)


def find_leftovers(cluster: Cluster, client: Callable[[str], Any] | None = None) -> list[Leftover]:
    """Return the resources of a cluster that still exist, each with the command that removes it.

    `client` returns the boto3 client of a service. Raises PreflightError without boto3, and
    TransientError if the account cannot be read.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    client = client or _load_client_factory(cluster.region)
    try:
        return [leftover for find in FINDERS for leftover in find(cluster, client)]
    except (BotoCoreError, ClientError) as error:
        commands = "; ".join(shlex.join(command) for command in list_audit_commands(cluster))
        problem = f"the account cannot be read: {first_line(error)}"
        raise TransientError(problem, f"check the credentials, then run: {commands}") from None


def _load_client_factory(region: str) -> Callable[[str], Any]:
    """Return a function that creates boto3 clients; raises PreflightError without boto3."""
    try:
        import boto3
    except ImportError:
        raise PreflightError("the audit of a cluster needs boto3", INSTALL_COMMAND) from None

    def load(service: str) -> Any:
        return boto3.client(service, region_name=region)

    return load


def _find_volumes(cluster: Cluster, client: Callable[[str], Any]) -> Iterator[Leftover]:
    key = f"tag:kubernetes.io/cluster/{cluster.name}"
    pages = client("ec2").get_paginator("describe_volumes")
    for page in pages.paginate(Filters=[{"Name": key, "Values": ["owned"]}]):
        for volume in page["Volumes"]:
            name, size = volume["VolumeId"], volume["Size"]
            remedy = f"aws ec2 delete-volume --region {cluster.region} --volume-id {name}"
            yield Leftover(name, f"EBS volume of {size} GiB of a claim", remedy)


def _find_load_balancers(cluster: Cluster, client: Callable[[str], Any]) -> Iterator[Leftover]:
    service = client("elbv2")
    for page in service.get_paginator("describe_load_balancers").paginate():
        for balancer in page["LoadBalancers"]:
            arn = balancer["LoadBalancerArn"]
            tags = service.describe_tags(ResourceArns=[arn])["TagDescriptions"][0]["Tags"]
            values = {tag["Key"]: tag["Value"] for tag in tags}
            is_owned = values.get(f"kubernetes.io/cluster/{cluster.name}") == "owned"
            if is_owned or values.get("elbv2.k8s.aws/cluster") == cluster.name:
                command = f"aws elbv2 delete-load-balancer --region {cluster.region}"
                remedy = f"{command} --load-balancer-arn {arn}"
                yield Leftover(balancer["LoadBalancerName"], "load balancer of a service", remedy)


def _find_file_systems(cluster: Cluster, client: Callable[[str], Any]) -> Iterator[Leftover]:
    region = f"--region {cluster.region}"
    for page in client("efs").get_paginator("describe_file_systems").paginate():
        for system in page["FileSystems"]:
            if _has_tag(system.get("Tags", []), cluster):
                name = system["FileSystemId"]
                remedy = f"aws efs delete-file-system {region} --file-system-id {name}"
                yield Leftover(name, "EFS file system with data", remedy)
    for page in client("fsx").get_paginator("describe_file_systems").paginate():
        for system in page["FileSystems"]:
            if _has_tag(system.get("Tags", []), cluster):
                name = system["FileSystemId"]
                remedy = f"aws fsx delete-file-system {region} --file-system-id {name}"
                yield Leftover(name, "FSx file system with data", remedy)


def _find_instances(cluster: Cluster, client: Callable[[str], Any]) -> Iterator[Leftover]:
    states = ["pending", "running", "stopping", "stopped"]
    filters = [
        {"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster.name]},
        {"Name": "instance-state-name", "Values": states},
    ]
    for page in client("ec2").get_paginator("describe_instances").paginate(Filters=filters):
        for reservation in page["Reservations"]:
            for instance in reservation["Instances"]:
                name = instance["InstanceId"]
                command = f"aws ec2 terminate-instances --region {cluster.region}"
                reason = f"machine of type {instance['InstanceType']}"
                yield Leftover(name, reason, f"{command} --instance-ids {name}")


def _find_log_groups(cluster: Cluster, client: Callable[[str], Any]) -> Iterator[Leftover]:
    prefix = f"/aws/eks/{cluster.name}/"
    pages = client("logs").get_paginator("describe_log_groups")
    for page in pages.paginate(logGroupNamePrefix=prefix):
        for group in page["logGroups"]:
            name = group["logGroupName"]
            command = f"aws logs delete-log-group --region {cluster.region}"
            remedy = f"{command} --log-group-name {name}"
            yield Leftover(name, "log group of the control plane", remedy)


def _has_tag(tags: list[dict[str, str]], cluster: Cluster) -> bool:
    return {"Key": CLUSTER_TAG, "Value": cluster.name} in tags


FINDERS = (
    _find_instances,
    _find_volumes,
    _find_load_balancers,
    _find_file_systems,
    _find_log_groups,
)
