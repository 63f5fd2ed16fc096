"""Emulates hosts on one machine: network namespaces on a bridge, with optional rate limits.

Each host has an address and one link to the bridge. A token bucket (`tc tbf`) limits the link in
both directions. The hosts share the machine's cores. They need root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

BRIDGE = "regauge-hosts"
LINK = "eth0"
"""Name of a host's link."""
BURST_BYTES = 256 * 1024
LATENCY = "200ms"
"""Maximum wait of a packet in the queue of the bucket before it is dropped."""


def find_obstacle() -> str | None:
    """Return why this machine cannot emulate hosts, or None if it can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} of iproute2 are not installed" if missing else None


@contextmanager
def create_hosts(count: int, megabits: float | None) -> Iterator[list[str]]:
    """Create hosts with a rate limit per direction, and yield their names; None is no limit."""
    names = [f"regauge-host-{number}" for number in range(count)]
    with ExitStack() as stack:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate(names):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
            outer = f"regauge-{number}"
            peer = ("peer", "name", LINK, "netns", name)
            _run("ip", "link", "add", outer, "type", "veth", *peer)
            # The namespace removes its end of the link too late.
            stack.callback(_run, "ip", "link", "del", outer)
            _run("ip", "link", "set", outer, "master", BRIDGE, "up")
            ip = ("ip", "-n", name)
            _run(*ip, "addr", "add", f"{host_address(number)}/24", "dev", LINK)
            for link in ("lo", LINK):
                _run(*ip, "link", "set", link, "up")
            if megabits is not None:
                bucket = ("rate", f"{megabits}mbit", "burst", str(BURST_BYTES), "latency", LATENCY)
                _run("tc", "qdisc", "add", "dev", outer, "root", "tbf", *bucket)
                _run("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", "tbf", *bucket)
        yield names


def host_address(number: int) -> str:
    """Return the address of a host."""
    return f"10.77.0.{number + 1}"


def build_host_command(name: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs on a host, with gloo on the host's link."""
    return ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={LINK}", *command]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
