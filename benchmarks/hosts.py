"""Hosts of one machine: network namespaces on a bridge, whose links can be made slow.

Each host has an address of its own and one link to the bridge, shaped in both directions by a
token bucket (`tc tbf`). They share the machine's cores. Only root can make them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

BRIDGE = "regauge-hosts"
LINK = "eth0"
"""What a host calls its link."""
BURST_BYTES = 256 * 1024
LATENCY = "200ms"
"""Longest wait of a packet in the bucket's queue before it is dropped."""


def obstacle() -> str | None:
    """Return why there can be no hosts here, or None."""
    if os.geteuid():
        return "only root makes network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} of iproute2 are not installed" if missing else None


@contextmanager
def hosts(count: int, megabits: float | None) -> Iterator[list[str]]:
    """Make some hosts, whose links carry so much each way, and yield their names."""
    names = [f"regauge-host-{number}" for number in range(count)]
    with ExitStack() as stack:
        _do("ip", "link", "add", BRIDGE, "type", "bridge")
        stack.callback(_do, "ip", "link", "del", BRIDGE)
        _do("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate(names):
            _do("ip", "netns", "add", name)
            stack.callback(_do, "ip", "netns", "del", name)
            outer = f"regauge-{number}"
            inside = ("netns", name)
            _do("ip", "link", "add", outer, "type", "veth", "peer", "name", LINK, *inside)
            stack.callback(_do, "ip", "link", "del", outer)  # a host's own end goes too late
            _do("ip", "link", "set", outer, "master", BRIDGE, "up")
            own = ("ip", "-n", name)
            _do(*own, "addr", "add", f"{address(number)}/24", "dev", LINK)
            for link in ("lo", LINK):
                _do(*own, "link", "set", link, "up")
            if megabits is not None:
                bucket = ("rate", f"{megabits}mbit", "burst", str(BURST_BYTES), "latency", LATENCY)
                _do("tc", "qdisc", "add", "dev", outer, "root", "tbf", *bucket)
                _do("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", "tbf", *bucket)
        yield names


def address(number: int) -> str:
    """Return the address of a host."""
    return f"10.77.0.{number + 1}"


def inside(name: str, command: Sequence[str]) -> list[str]:
    """Return a command as it is run on a host; gloo is told of its link."""
    return ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={LINK}", *command]


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
