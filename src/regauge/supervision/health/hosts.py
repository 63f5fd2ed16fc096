"""Checks a run's hosts against each other: clocks and versions."""

from __future__ import annotations

import socket
import time
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from regauge.accelerators import wait_for_all
from regauge.supervision.health.findings import Finding

MAX_SKEW_SECONDS = 1.0
PACKAGES = ("regauge", "torch", "transformers")


def check_hosts(size: int) -> list[Finding]:
    """Return findings about all hosts, the same on every process."""
    wait_for_all()
    local = {
        "host": socket.gethostname(),
        "time": time.time(),
        "versions": {name: version(name) for name in PACKAGES},
    }
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, local)
    return [_check_clocks(hosts), _check_versions(hosts)]


def _check_clocks(hosts: list[dict[str, Any]]) -> Finding:
    earliest = min(hosts, key=lambda host: host["time"])
    latest = max(hosts, key=lambda host: host["time"])
    skew = latest["time"] - earliest["time"]
    value = f"{skew:.3f} s apart"
    if skew > MAX_SKEW_SECONDS:
        return Finding.bad("clocks", latest["host"], f"ahead of {earliest['host']}", value)
    return Finding("clocks", "all hosts", value, numbers={"skew_seconds": skew})


def _check_versions(hosts: list[dict[str, Any]]) -> Finding:
    first = hosts[0]
    for host in hosts:
        if host["versions"] != first["versions"]:
            problem = f"{host['versions']}, but {first['host']} has {first['versions']}"
            return Finding.bad("versions", host["host"], problem)
    value = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    return Finding("versions", "all hosts", value)
