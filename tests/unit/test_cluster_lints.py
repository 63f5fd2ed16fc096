"""Each lint of a cluster is triggered by one cluster, and not by another one."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from regauge.config import build
from regauge.jobs.clusters.cluster_lints import check_cluster, find_lints
from regauge.jobs.clusters.facts import FOLDER, load_kubernetes_versions, load_vendors
from regauge.jobs.clusters.settings import Cluster, ClusterSettings
from regauge.system.errors import SettingsError
from regauge.system.files import read_csv_rows

TODAY = dt.date(2026, 11, 26)
P5 = {"name": "p5", "instance": "p5.48xlarge", "zone": "us-east-1a"}
RESERVATION = {"capacity_reservation": "cr-0123456789abcdef0"}


def build_cluster(group: dict[str, Any], **changes: Any) -> Cluster:
    table = {"name": "a", "zones": ("us-east-1a", "us-east-1b"), "node_groups": (group,)}
    return build(ClusterSettings, {"cluster": table | changes}).cluster


def list_codes(cluster: Cluster, today: dt.date = TODAY) -> list[tuple[str, bool]]:
    """Return the codes of the findings, and whether each is an error."""
    lints = list(find_lints(cluster, today))
    assert all(lint.source.startswith("https://") and lint.remedy for lint in lints)
    return [(lint.code, lint.is_error) for lint in lints]


@pytest.mark.parametrize(
    ("group", "changes", "lints"),
    [
        (P5, {}, []),
        (P5, {"kubernetes_version": "1.31"}, [("kubernetes-version", True)]),
        (P5, {"kubernetes_version": "1.20"}, [("kubernetes-version", True)]),
        (P5, {"kubernetes_version": "1.33"}, [("kubernetes-version", False)]),
        (P5, {"kubernetes_version": "1.34"}, [("kubernetes-version", False)]),
        (P5, {"kubernetes_version": "1.36"}, []),
        (P5 | RESERVATION, {}, []),
        (P5 | RESERVATION | {"zone": "us-east-1c"}, {}, [("reservation-zone", True)]),
        (P5 | RESERVATION | {"zone": None, "efa": False}, {}, [("reservation-zone", True)]),
        ({"name": "c", "instance": "c7i.xlarge", "efa": True}, {}, [("efa-instance", True)]),
        ({"name": "c", "instance": "c7i.xlarge"}, {}, []),
        (P5 | {"zone": None}, {}, [("efa-zone", True)]),
        (P5 | {"zone": None, "efa": False}, {}, []),
        (P5 | RESERVATION | {"placement_group": "a"}, {}, [("placement-group", True)]),
        (P5 | {"placement_group": "a"}, {}, []),
        (P5, {"etcd": "3.6.0"}, [("etcd-v2", True)]),
        (P5, {"etcd": "3.5.25"}, []),
        (P5 | {"instance": "dl1.24xlarge"}, {}, [("machine-image", True)]),
        (P5 | {"instance": "dl1.24xlarge", "ami": "ami-0123456789abcdef0"}, {}, []),
    ],
)
def test_lints(
    group: dict[str, Any], changes: dict[str, Any], lints: list[tuple[str, bool]]
) -> None:
    assert list_codes(build_cluster(group, **changes)) == lints


def test_a_version_is_supported_until_the_day_before_its_end() -> None:
    cluster = build_cluster(P5, kubernetes_version="1.31")
    assert list_codes(cluster, dt.date(2026, 11, 25)) == [("kubernetes-version", False)]
    assert list_codes(cluster, dt.date(2026, 11, 26)) == [("kubernetes-version", True)]
    default = build_cluster(P5)
    assert list_codes(default, dt.date(2027, 1, 1)) == []
    assert list_codes(default, dt.date(2027, 3, 1)) == [("kubernetes-version", False)]
    assert list_codes(default, dt.date(2028, 3, 27)) == [("kubernetes-version", True)]


def test_an_error_names_its_remedy() -> None:
    with pytest.raises(SettingsError, match=r"1.29 is not supported since 2026-03-23.*1.35"):
        check_cluster(build_cluster(P5, kubernetes_version="1.29"), TODAY)
    assert check_cluster(build_cluster(P5), TODAY) == []


def test_the_tables_are_consistent() -> None:
    rows = read_csv_rows(FOLDER / "kubernetes.csv")
    assert [row["version"] for row in rows] == list(load_kubernetes_versions())
    assert all(row["released"] < row["standard_until"] < row["extended_until"] for row in rows)
    assert all(row["source"] for row in rows)
    assert all(item.source.startswith("https://") for item in load_vendors().values())
