"""Extended resources by which pods request accelerators, read from `devices.csv`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system.errors import SettingsError
from regauge.system.files import read_csv_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

EFA_RESOURCE = "vpc.amazonaws.com/efa"
"""Resource of the EFA device plugin: one per network interface."""


def find_device_resource(vendor: str) -> str:
    """Return the resource of a vendor's accelerators; raises SettingsError for unknown vendors."""
    if vendor not in load_device_resources():
        problem = f"no Kubernetes resource is known for accelerators of {vendor}"
        raise SettingsError(problem, "choose another launch.instance")
    return load_device_resources()[vendor]


@cache
def load_device_resources() -> Mapping[str, str]:
    """Return the resource of each vendor's device plugin."""
    rows = read_csv_rows(Path(__file__).with_name("devices.csv"))
    return {row["vendor"]: row["resource"] for row in rows}
