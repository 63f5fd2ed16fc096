"""Extended resources by which pods request accelerators, read from `devices.csv`."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.errors import SettingsError

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
    path = Path(__file__).with_name("devices.csv")
    with path.open(newline="", encoding="utf-8") as file:
        return {row["vendor"]: row["resource"] for row in csv.DictReader(file)}
