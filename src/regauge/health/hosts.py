"""What differs between the hosts of a run: clocks and versions."""

from __future__ import annotations

import socket
import time
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from regauge.health.findings import Finding

MOST_SKEW_SECONDS = 1.0
PACKAGES = ("regauge", "torch", "transformers")


def check_hosts(size: int) -> list[Finding]:
    """Return what the processes' hosts say of themselves, the same on every process."""
    dist.barrier()
    own = {
        "host": socket.gethostname(),
        "time": time.time(),
        "versions": {name: version(name) for name in PACKAGES},
    }
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, own)
    return [_clocks(everyone), _versions(everyone)]


def _clocks(everyone: list[dict[str, Any]]) -> Finding:
    first = min(everyone, key=lambda one: one["time"])
    last = max(everyone, key=lambda one: one["time"])
    skew = last["time"] - first["time"]
    value = f"{skew:.3f} s apart"
    if skew > MOST_SKEW_SECONDS:
        return Finding.bad("clocks", last["host"], f"ahead of {first['host']}", value)
    return Finding("clocks", "all hosts", value)


def _versions(everyone: list[dict[str, Any]]) -> Finding:
    first = everyone[0]
    for one in everyone:
        if one["versions"] != first["versions"]:
            problem = f"{one['versions']}, and {first['host']} has {first['versions']}"
            return Finding.bad("versions", one["host"], problem)
    told = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    return Finding("versions", "all hosts", told)
