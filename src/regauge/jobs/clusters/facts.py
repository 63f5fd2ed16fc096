"""Versions of Kubernetes and vendors' components on EKS, and what node groups need of them.

The data is in `kubernetes.csv` and `vendors.csv` of this folder, each row with its source.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regauge.machines.catalog import NO_VENDOR, find_efa_interfaces, find_instance, find_vendor
from regauge.system.files import read_csv_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.jobs.clusters.settings import ClusterNodes
    from regauge.machines.catalog import Instance

FOLDER = Path(__file__).parent


class VersionSupport(NamedTuple):
    """The dates until which EKS supports a version of Kubernetes."""

    standard_until: dt.date
    extended_until: dt.date
    """End of extended support, which has a higher price per hour."""


class VendorSupport(NamedTuple):
    """The machine image, device plugin and taint for the accelerators of a vendor on EKS."""

    vendor: str
    terraform_ami_type: str
    """Type of the machine image of EKS; `CUSTOM` if there is none."""
    plugin: str
    """File of the device plugin; empty if the chips need none."""
    eksctl_option: str
    """Option of eksctl that omits its own device plugin; empty if it has none."""
    taint: str
    """Key of the taint of its machines; empty if they have none."""
    needs_ami: str
    """`yes` if `ami` must be set, because EKS has no machine image with the driver."""
    source: str


@dataclass(frozen=True)
class NodeFacts:
    """A group of machines with the facts of its machine type."""

    group: ClusterNodes
    instance: Instance
    support: VendorSupport
    efa_interfaces: int
    """EFA interfaces that each machine has in the cluster; 0 without EFA."""

    @property
    def usd_per_hour(self) -> float | None:
        """On-demand price of the group per hour; None if it is unknown."""
        price = self.instance.usd_per_hour
        return None if price is None else price * self.group.count

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the nodes, which device plugins select."""
        stem = self.support.plugin.partition(".")[0]
        labels = {"regauge/vendor": stem} if stem else {}
        return labels | ({"regauge/efa": "true"} if self.efa_interfaces else {})


@cache
def load_kubernetes_versions() -> Mapping[str, VersionSupport]:
    """Return the known versions of Kubernetes by name, such as `1.35`."""
    return {
        row["version"]: VersionSupport(
            dt.date.fromisoformat(row["standard_until"]),
            dt.date.fromisoformat(row["extended_until"]),
        )
        for row in read_csv_rows(FOLDER / "kubernetes.csv")
    }


@cache
def load_vendors() -> Mapping[str, VendorSupport]:
    """Return the support of EKS by vendor."""
    rows = read_csv_rows(FOLDER / "vendors.csv")
    return {row["vendor"]: VendorSupport(**row) for row in rows}


def find_node_facts(group: ClusterNodes) -> NodeFacts:
    """Return the facts of a node group; raises SettingsError for an unknown machine type."""
    instance = find_instance(group.instance, f"cluster.node_groups '{group.name}'.instance")
    support = load_vendors().get(find_vendor(instance), load_vendors()[NO_VENDOR])
    has_efa = bool(instance.chips) if group.efa is None else group.efa
    interfaces = find_efa_interfaces(group.instance) if has_efa else 0
    return NodeFacts(group, instance, support, interfaces)
