"""The manifests of a cluster: device plugins, operators of jobs, etcd and file systems."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.jobs.clusters.facts import FOLDER, find_node_facts
from regauge.jobs.targets._kubernetes.volumes import DRIVERS
from regauge.monitoring.bundle import list_exporters, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.jobs.clusters.settings import Cluster, ClusterFiles

OPERATORS = {
    "training_operator": "github.com/kubeflow/training-operator.git/manifests/overlays/standalone",
    "trainer": "github.com/kubeflow/trainer.git/manifests/overlays/manager",
}
"""Address of an operator by the setting with its version. Sources: https://www.kubeflow.org/docs/
components/trainer/legacy-v1/installation/ and .../trainer/operator-guides/installation/."""
EFA_PLUGIN = "efa.yaml"


def build_manifests(cluster: Cluster) -> dict[str, str]:
    """Return the text of each manifest by its file name."""
    nodes = [find_node_facts(group) for group in cluster.node_groups]
    plugins = dict.fromkeys(node.support.plugin for node in nodes if node.support.plugin)
    names = [*plugins, *([EFA_PLUGIN] if any(node.efa_interfaces for node in nodes) else [])]
    manifests = {f"device-plugin-{name}": _read(name) for name in names}
    if cluster.etcd is not None:
        manifests["etcd.yaml"] = _read("etcd.yaml").replace("{version}", cluster.etcd)
    for setting, address in OPERATORS.items():
        if version := getattr(cluster, setting):
            manifests[f"{setting.replace('_', '-')}/kustomization.yaml"] = _dump(
                {
                    "apiVersion": "kustomize.config.k8s.io/v1beta1",
                    "kind": "Kustomization",
                    "resources": [f"{address}?ref=v{version}"],
                }
            )
    if "exporters" in cluster.monitoring:
        manifests |= _build_monitoring(plugins)
    if cluster.file_systems:
        documents = [item for files in cluster.file_systems for item in _build_files(files)]
        manifests["file-systems.yaml"] = _dump(*documents)
    return manifests


def _build_monitoring(plugins: Iterable[str]) -> dict[str, str]:
    """Return htop, and the exporters of the vendors with these device plugins."""
    names = ["htop.yaml", *(name for plugin in plugins for name in list_exporters(plugin))]
    return {f"monitoring-{name}": read_manifest(name) for name in names}


def _build_files(files: ClusterFiles) -> list[dict[str, Any]]:
    """Return the volume and the claim of a file system; `envsubst` inserts its identifiers."""
    prefix = build_variable_prefix(files)
    source: dict[str, Any] = {"driver": DRIVERS[files.kind], "volumeHandle": f"${{{prefix}_ID}}"}
    if files.kind == "fsx":
        source["volumeAttributes"] = {
            "dnsname": f"${{{prefix}_DNS}}",
            "mountname": f"${{{prefix}_MOUNT}}",
        }
    capacity = {"storage": f"{files.size_gib}Gi"}
    volume = {
        "capacity": capacity,
        "volumeMode": "Filesystem",
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "csi": source,
        "claimRef": {"namespace": "default", "name": files.name},
    }
    if files.kind == "fsx":
        volume["mountOptions"] = ["flock"]
    claim = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "volumeName": files.name,
        "resources": {"requests": capacity},
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": files.name},
            "spec": volume,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": files.name, "namespace": "default"},
            "spec": claim,
        },
    ]


def build_variable_prefix(files: ClusterFiles) -> str:
    """Return the prefix of the variables with the identifiers of a file system."""
    return files.name.upper().replace("-", "_")


def _read(name: str) -> str:
    return (FOLDER / "manifests" / name).read_text(encoding="utf-8")


def _dump(*documents: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump_all(documents, sort_keys=False, width=100))
