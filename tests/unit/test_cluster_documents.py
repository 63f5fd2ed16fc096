"""Files of clusters: eksctl, Terraform variables, manifests, commands and prices."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from architecture.tree import ROOT
from launch.eksctl_schemas import find_eksctl_problems
from launch.schemas import find_core_problems
from regauge.cli import main
from regauge.config import build
from regauge.jobs.clusters.facts import find_node_facts
from regauge.jobs.clusters.rendering import (
    build_manifests,
    build_variables,
    describe_cluster_price,
    list_creation_commands,
    render_files,
)
from regauge.jobs.clusters.settings import Cluster, ClusterSettings
from regauge.system.errors import SettingsError

GOLDEN = Path(__file__).parent / "golden"
RESERVATION = "cr-0123456789abcdef0"
RESERVED = {"count": 16, "zone": "us-east-1b", "capacity_reservation": RESERVATION}
ZONE = {"zone": "us-east-1a"}
GROUPS: dict[str, dict[str, Any]] = {
    "p4de": {"instance": "p4de.24xlarge", **RESERVED},
    "p5": {"instance": "p5.48xlarge", "market": "capacity-block", **RESERVED},
    "trn1": {"instance": "trn1.32xlarge", "count": 2, "placement_group": "trainers", **ZONE},
    "dl1": {"instance": "dl1.24xlarge", "count": 16, "ami": "ami-0123456789abcdef0", **ZONE},
    "cpu": {"instance": "c7i.4xlarge", "count": 2, "max_count": 8, "market": "spot"},
}


def build_cluster(*groups: str, **changes: Any) -> Cluster:
    table = {
        "name": "trainers",
        "zones": ("us-east-1a", "us-east-1b"),
        "etcd": "3.5.25",
        "node_groups": tuple({"name": name, **GROUPS[name]} for name in groups),
        "file_systems": ({"name": "data"}, {"name": "home", "kind": "efs"}),
        **changes,
    }
    return build(ClusterSettings, {"cluster": table}).cluster


def build_cluster_config(cluster: Cluster) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(render_files(cluster)["eksctl/cluster.yaml"])
    return document


@pytest.mark.parametrize("group", GROUPS)
def test_a_cluster_config_is_strictly_valid(group: str) -> None:
    assert find_eksctl_problems(build_cluster_config(build_cluster(group))) == []


def test_an_unknown_field_is_a_problem() -> None:
    document = build_cluster_config(build_cluster("p5"))
    document["managedNodeGroups"][0]["efa"] = True
    assert find_eksctl_problems(document)


def test_the_files_equal_the_golden_files() -> None:
    cluster = build_cluster(*GROUPS)
    files = render_files(cluster)
    golden = {
        "cluster_eksctl.yaml": files["eksctl/cluster.yaml"],
        "cluster_terraform.json": files["terraform/terraform.tfvars.json"],
        "cluster_file_systems.yaml": files["manifests/file-systems.yaml"],
        "cluster_commands.txt": "\n".join(list_creation_commands(cluster, Path("out"))) + "\n",
    }
    assert golden == {name: (GOLDEN / name).read_text(encoding="utf-8") for name in golden}
    assert render_files(cluster) == files


def find_group(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(group for group in document["managedNodeGroups"] if group["name"] == name)


def test_a_group_of_reservations_is_an_arn() -> None:
    arn = "arn:aws:resource-groups:us-east-1:123456789012:group/p5"
    groups = ({"name": "p5", **GROUPS["p5"], "capacity_reservation": arn},)
    cluster = build_cluster(node_groups=groups)
    group = find_group(build_cluster_config(cluster), "p5")
    target = group["capacityReservation"]["capacityReservationTarget"]
    assert target == {"capacityReservationResourceGroupARN": arn}
    assert group["instanceMarketOptions"] == {"marketType": "capacity-block"}
    values = build_variables(cluster)["node_groups"]["p5"]
    assert (values["reservation_group"], values["capacity_reservation"]) == (arn, None)


def test_container_insights_is_an_addon_with_permissions() -> None:
    cluster = build_cluster("p5", monitoring=("cloudwatch",))
    document = build_cluster_config(cluster)
    assert find_eksctl_problems(document) == []
    name = "amazon-cloudwatch-observability"
    (addon,) = [addon for addon in document["addons"] if addon["name"] == name]
    config = json.loads(addon["configurationValues"])["agent"]["config"]
    assert config["logs"]["metrics_collected"]["kubernetes"] == {
        "enhanced_container_insights": True,
        "accelerated_compute_metrics": True,
    }
    assert build_variables(cluster)["addon_values"] == {name: addon["configurationValues"]}
    assert {"name": "vpc-cni"} in document["addons"]
    assert document["addonsConfig"] == {"autoApplyPodIdentityAssociations": True}
    assert name in build_variables(cluster)["addons"]
    terraform = render_files(cluster)["terraform/main.tf"]
    assert f'"{name}" = {{\n      account = "cloudwatch-agent"' in terraform
    assert "configuration_values = lookup(var.addon_values, each.value, null)" in terraform
    assert name not in build_variables(build_cluster("p5"))["addons"]


def test_a_device_has_one_reader() -> None:
    cluster = build_cluster("p5", monitoring=("exporters", "cloudwatch"))
    (config,) = build_variables(cluster)["addon_values"].values()
    assert '"accelerated_compute_metrics": false' in config
    assert '"enhanced_container_insights": true' in config


@pytest.mark.parametrize("version", ["1.34", "1.36"])
def test_exporters_run_on_the_nodes_with_their_devices(version: str) -> None:
    manifests = build_manifests(build_cluster(*GROUPS, monitoring=("exporters",)))
    names = {name for name in manifests if name.startswith("monitoring-")}
    exporters = {"dcgm-exporter", "neuron-monitor", "gaudi-exporter", "htop", "nvtop"}
    assert names == {f"monitoring-{name}.yaml" for name in exporters}
    for name in names:
        for document in yaml.safe_load_all(manifests[name]):
            assert find_core_problems(document, version) == [], name
    cpu = build_manifests(build_cluster("cpu", monitoring=("exporters",)))
    assert {name for name in cpu if name.startswith("monitoring-")} == {"monitoring-htop.yaml"}


@pytest.mark.parametrize("version", ["1.34", "1.36"])
def test_every_manifest_is_strictly_valid(version: str) -> None:
    manifests = build_manifests(build_cluster(*GROUPS))
    plugins = {f"device-plugin-{name}" for name in ("nvidia", "neuron", "gaudi", "efa")}
    operators = {"training-operator/kustomization", "trainer/kustomization"}
    expected = {*plugins, *operators, "etcd", "file-systems"}
    assert {name.partition(".")[0] for name in manifests} == expected
    for name, text in manifests.items():
        for document in yaml.safe_load_all(text):
            if document["kind"] != "Kustomization":
                assert find_core_problems(document, version) == [], name


def test_images_are_pinned() -> None:
    manifests = build_manifests(build_cluster(*GROUPS))
    images = [
        line.partition("image: ")[2]
        for text in manifests.values()
        for line in text.splitlines()
        if "image: " in line and not line.lstrip().startswith("#")
    ]
    assert len(images) == 5
    assert all(":" in image and not image.endswith(":latest") for image in images)
    assert "quay.io/coreos/etcd:v3.5.25" in images
    operator = yaml.safe_load(manifests["training-operator/kustomization.yaml"])
    assert operator["resources"][0].endswith("?ref=v1.9.3")
    trainer = yaml.safe_load(manifests["trainer/kustomization.yaml"])
    assert trainer["resources"][0].endswith("trainer.git/manifests/overlays/manager?ref=v2.2.1")


def test_the_example_meets_at_the_etcd_of_the_manifests() -> None:
    text = build_manifests(build_cluster("cpu"))["etcd.yaml"]
    _, service, deployment = yaml.safe_load_all(text)
    metadata, (port,) = service["metadata"], service["spec"]["ports"]
    endpoint = f"{metadata['name']}.{metadata['namespace']}:{port['port']}"
    run = tomllib.loads((ROOT / "runs" / "eks-llama2-7b.toml").read_text())
    assert run["execution"]["nodes"]["endpoint"] == endpoint
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"--advertise-client-urls=http://{endpoint}" in container["command"]
    assert deployment["metadata"]["namespace"] == metadata["namespace"]


def test_machines_of_system_pods_may_be_missing_in_the_catalog() -> None:
    group = {"name": "system", "instance": "c5.2xlarge", "count": 2}
    cluster = build_cluster("cpu", node_groups=[group])
    assert "c5.2xlarge" in describe_cluster_price(cluster)
    assert find_node_facts(cluster.node_groups[0]).labels == {}
    with pytest.raises(SettingsError, match=r"p5\.47xlarge"):
        describe_cluster_price(
            build_cluster("cpu", node_groups=[group | {"instance": "p5.47xlarge"}])
        )


def test_etcd_serves_version_2_only_if_it_is_chosen() -> None:
    assert "--enable-v2" in build_manifests(build_cluster("cpu"))["etcd.yaml"]
    assert "etcd.yaml" not in build_manifests(build_cluster("cpu", etcd=None))


def test_a_cpu_group_has_no_plugin_and_no_taint() -> None:
    cluster = build_cluster("cpu", file_systems=(), etcd=None, training_operator=None, trainer=None)
    assert build_manifests(cluster) == {}
    group = find_group(build_cluster_config(cluster), "cpu")
    assert "taints" not in group
    assert "efaEnabled" not in group
    assert group["spot"] is True
    assert (group["minSize"], group["desiredCapacity"], group["maxSize"]) == (2, 2, 8)


def test_the_price_has_a_date() -> None:
    price = describe_cluster_price(build_cluster("p4de", "cpu"))
    total = 16 * 27.44705 + 2 * 0.714 + 0.10
    assert price.startswith(f"{total:.2f} USD per hour on demand (EKS + 16 x p4de.24xlarge")
    assert price.endswith("us-east-1, 2026-07-20)")


def test_terraform_commands_replace_those_of_eksctl() -> None:
    commands = list_creation_commands(build_cluster("p5", tool="terraform"), Path("a b"))
    assert commands[0] == "terraform -chdir='a b/terraform' init"
    assert not [command for command in commands if command.startswith("eksctl")]


def write_run_file(folder: Path, **changes: Any) -> Path:
    groups = [{"name": "p5", **GROUPS["p5"]}]
    table = {"name": "trainers", "zones": ["us-east-1a", "us-east-1b"], "node_groups": groups}
    path = folder / "cluster.json"
    path.write_text(json.dumps({"cluster": {**table, **changes}}))
    return path


def test_files_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file, folder = write_run_file(tmp_path), tmp_path / "out"
    command = ["cluster", "render", str(run_file), "--to", str(folder), "--json"]
    assert main([*command, "--dry-run"]) == 0
    assert not folder.exists()
    capsys.readouterr()
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert all(Path(name).is_file() for name in answer["files"])
    assert main(command) == 2
    error = json.loads(capsys.readouterr().out)
    assert error["remedy"] == "name another folder, or add --overwrite"
    assert main([*command, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zones": ["us-east-1a"]}, "name at least two zones"),
        ({"zones": ["us-east-1a", "us-west-2b"]}, "is not a zone of region us-east-1"),
        ({"name": "Trainers"}, "not an RFC 1035 label"),
        ({"kubernetes_version": "1.29"}, "is not supported since 2026-03-23"),
        ({"etcd": "3.6.1"}, "does not support --enable-v2"),
        ({"etcd": "latest"}, "is not a version"),
        ({"node_groups": [{"name": "a", "instance": "p5.48xlarg"}]}, "did you mean 'p5.48xlarge'"),
        ({"node_groups": []}, "node_groups"),
        ({"node_groups": [{"name": "a", "instance": "x", "market": "capacity-block"}]}, "cap"),
        ({"node_groups": [{"name": "a", "instance": "x", "min_count": 3}]}, "change one of them"),
    ],
)
def test_bad_input_is_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = write_run_file(tmp_path, **changes)
    assert main(["cluster", "render", str(run_file), "--to", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert not (tmp_path / "out").exists()
