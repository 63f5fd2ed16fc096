"""Kubernetes versions and vendor components on EKS, and what node groups need from them.

The data is in `kubernetes.csv` and `vendors.csv` in this folder, each row with a source.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from regauge.jobs.clusters.settings import ClusterNodes
from regauge.machines.catalog import (
    NO_VENDOR,
    Instance,
    find_efa_interfaces,
    find_instance,
    find_vendor,
    load_instances,
)
from regauge.system.files import read_csv_rows

FOLDER = Path(__file__).parent
_CPU_MACHINE = re.compile(r"[acmrt]\d[a-z-]*\.(small|medium|large|\d*xlarge)")
"""EC2 machine types without accelerators."""


class VersionSupport(NamedTuple):
    """How long EKS supports a Kubernetes version."""

    standard_until: dt.date
    extended_until: dt.date
    """End of extended support, which costs more per hour."""


class VendorSupport(NamedTuple):
    """Machine image, device plugin and taint for a vendor's accelerators on EKS."""

    vendor: str
    terraform_ami_type: str
    """EKS machine image type; `CUSTOM` without one."""
    plugin: str
    """Device plugin file; empty if the chips do not need one."""
    eksctl_option: str
    """eksctl option that omits eksctl's own device plugin; empty without one."""
    taint: str
    """Taint key on these machines; empty without a taint."""
    needs_ami: str
    """`yes` if `ami` must be set, because EKS machine images lack the driver."""
    source: str


@dataclass(frozen=True)
class NodeFacts:
    """A machine group with facts about the machine type."""

    group: ClusterNodes
    instance: Instance
    support: VendorSupport
    efa_interfaces: int
    """EFA interfaces per machine in the cluster; 0 without EFA."""

    @property
    def usd_per_hour(self) -> float | None:
        """On-demand price per hour for the group; None if unknown."""
        price = self.instance.usd_per_hour
        return None if price is None else price * self.group.count

    @property
    def labels(self) -> dict[str, str]:
        """Node labels, selected by device plugins."""
        stem = self.support.plugin.partition(".")[0]
        labels = {"regauge/vendor": stem} if stem else {}
        return labels | ({"regauge/efa": "true"} if self.efa_interfaces else {})


@cache
def load_kubernetes_versions() -> Mapping[str, VersionSupport]:
    """Return version name, such as `1.35` -> support dates."""
    return {
        row["version"]: VersionSupport(
            dt.date.fromisoformat(row["standard_until"]),
            dt.date.fromisoformat(row["extended_until"]),
        )
        for row in read_csv_rows(FOLDER / "kubernetes.csv")
    }


@cache
def load_vendors() -> Mapping[str, VendorSupport]:
    rows = read_csv_rows(FOLDER / "vendors.csv")
    return {row["vendor"]: VendorSupport(**row) for row in rows}


def find_node_facts(group: ClusterNodes) -> NodeFacts:
    """Return a node group's facts; raises SettingsError for an unknown machine type.

    The catalog has machine types for training. The price of others without accelerators, as for
    system pods, is unknown.
    """
    if _CPU_MACHINE.fullmatch(group.instance) and group.instance not in load_instances():
        instance = Instance(group.instance, chip="")
    else:
        instance = find_instance(group.instance, f"cluster.node_groups '{group.name}'.instance")
    support = load_vendors().get(find_vendor(instance), load_vendors()[NO_VENDOR])
    has_efa = bool(instance.chips) if group.efa is None else group.efa
    interfaces = find_efa_interfaces(group.instance) if has_efa else 0
    return NodeFacts(group, instance, support, interfaces)
