"""The removal of a cluster: its commands, and the audit of a simulated account."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regauge.cli import main
from regauge.config import build
from regauge.jobs.clusters.removal import find_leftovers, list_removal_commands
from regauge.jobs.clusters.settings import Cluster, ClusterSettings

TABLE: dict[str, Any] = {
    "name": "trainers",
    "zones": ["us-east-1a", "us-east-1b"],
    "node_groups": [{"name": "cpu", "instance": "c7i.xlarge"}],
}
OWNED = {"Key": "kubernetes.io/cluster/trainers", "Value": "owned"}
TAG = {"Key": "regauge/cluster", "Value": "trainers"}


def build_cluster(**changes: Any) -> Cluster:
    tables = {"cluster": {**TABLE, **changes}}
    return build(ClusterSettings, json.loads(json.dumps(tables))).cluster


def test_claims_and_load_balancers_are_removed_before_the_cluster() -> None:
    commands = list_removal_commands(build_cluster(), Path("out"))
    assert [command[0] for command in commands] == ["aws", "kubectl", "kubectl", "eksctl"]
    assert "spec.type=LoadBalancer" in commands[1]
    assert "persistentvolumeclaims" in commands[2]
    assert "out/eksctl/cluster.yaml" in commands[3]
    commands = list_removal_commands(build_cluster(tool="terraform"), Path("out"))
    assert commands[-1] == ["terraform", "-chdir=out/terraform", "destroy", "-auto-approve"]


def test_claims_of_other_clusters_are_not_removed() -> None:
    """Kubectl would use its current context, which may be another cluster."""
    select, *deletions, _ = list_removal_commands(build_cluster(), Path("out"))
    assert select[:3] == ["aws", "eks", "update-kubeconfig"]
    file = select[select.index("--kubeconfig") + 1]
    assert select[select.index("--name") + 1] == "trainers"
    assert all(command[:3] == ["kubectl", "--kubeconfig", file] for command in deletions)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module boto3, connected to a simulated account."""
    boto3 = pytest.importorskip("boto3", reason="no boto3: the audit of a cluster is not proved")
    moto = pytest.importorskip("moto")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with moto.mock_aws():
        yield boto3


def create_leftovers(boto3: Any, tag: dict[str, str], owned: dict[str, str], name: str) -> None:
    """Create a volume, a load balancer, file systems, a machine and a log group."""
    ec2 = boto3.client("ec2", region_name="us-east-1")
    tags = [{"ResourceType": "volume", "Tags": [owned]}]
    ec2.create_volume(AvailabilityZone="us-east-1a", Size=50, TagSpecifications=tags)
    tags = [{"ResourceType": "instance", "Tags": [tag]}]
    ec2.run_instances(
        ImageId="ami-12c6146b",
        MinCount=1,
        MaxCount=1,
        InstanceType="p5.48xlarge",
        TagSpecifications=tags,
    )
    subnets = [item["SubnetId"] for item in ec2.describe_subnets()["Subnets"][:2]]
    elb = boto3.client("elbv2", region_name="us-east-1")
    elb.create_load_balancer(Name=f"svc-{name}", Subnets=subnets, Tags=[owned])
    efs = boto3.client("efs", region_name="us-east-1")
    efs.create_file_system(CreationToken=name, Tags=[tag])
    fsx = boto3.client("fsx", region_name="us-east-1")
    fsx.create_file_system(
        FileSystemType="LUSTRE", StorageCapacity=1200, SubnetIds=subnets[:1], Tags=[tag]
    )
    logs = boto3.client("logs", region_name="us-east-1")
    logs.create_log_group(logGroupName=f"/aws/eks/{name}/cluster")


def test_the_audit_lists_what_the_cluster_left_and_nothing_else(account: Any) -> None:
    cluster = build_cluster()
    assert find_leftovers(cluster, Path("out")) == []
    other = {"Key": "kubernetes.io/cluster/other", "Value": "owned"}
    create_leftovers(account, {"Key": "regauge/cluster", "Value": "other"}, other, "other")
    assert find_leftovers(cluster, Path("out")) == []
    create_leftovers(account, TAG, OWNED, "trainers")
    leftovers = {item.reason: item for item in find_leftovers(cluster, Path("out"))}
    assert sorted(leftovers) == [
        "EBS volume of 50 GiB of a claim",
        "EFS file system with data",
        "FSx file system with data",
        "load balancer of a service",
        "log group of the control plane",
        "machine of type p5.48xlarge",
    ]
    for item in leftovers.values():
        assert item.remedy.startswith("aws ")
        assert "--region us-east-1" in item.remedy
    volume = leftovers["EBS volume of 50 GiB of a claim"]
    ec2 = account.client("ec2", region_name="us-east-1")
    ec2.delete_volume(VolumeId=volume.remedy.rpartition(" ")[2])
    assert volume not in find_leftovers(cluster, Path("out"))


def write_program(folder: Path, name: str, code: int) -> None:
    """Write a program that records its arguments and ends with an exit code."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$0 $*" >> {folder}/calls\nexit {code}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(("code", "calls"), [(0, 4), (9, 2)])
def test_delete_runs_the_commands_until_one_fails(
    code: int,
    calls: int,
    account: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    create_leftovers(account, TAG, OWNED, "trainers")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_program(tmp_path, "aws", 0)
    write_program(tmp_path, "kubectl", code)
    write_program(tmp_path, "eksctl", 0)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"cluster": TABLE}))
    command = ["cluster", "delete", str(path), "--to", str(tmp_path / "out"), "--json"]
    assert main(command) == code
    answer = json.loads(capsys.readouterr().out)
    assert len((tmp_path / "calls").read_text().splitlines()) == calls
    if code:
        assert "ended with exit code 9" in answer["error"]
    else:
        assert len(answer["leftovers"]) == 6


def test_a_dry_run_prints_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"cluster": TABLE}))
    assert main(["cluster", "delete", str(path), "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["commands"][-1].startswith("eksctl delete cluster --config-file")
    assert answer["audit"][0].startswith("aws ec2 describe-volumes --region us-east-1")


def test_a_missing_client_is_refused_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_program(tmp_path, "aws", 0)
    write_program(tmp_path, "kubectl", 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"cluster": TABLE}))
    assert main(["cluster", "delete", str(path)]) == 76
    assert "'eksctl' is not installed here; install eksctl" in capsys.readouterr().err
    assert not (tmp_path / "calls").exists()
