"""Which machines a run is spread over, by its settings or by what a launcher says.

Read are torchrun's variables as the Kubeflow training operator sets them for each pod (`PET_NNODES`
and its kin), and those of a Slurm step with one task for each node.
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.errors import SettingsError
from regauge.slurm import torchrun_variables
from regauge.supervision.settings import Nodes, limits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PORTS = {"c10d": 29400, "etcd": 2379}
"""Of each kind of meeting place where its endpoint names none."""


@dataclass(frozen=True)
class Several:
    """A run on more than one machine, or on a number of them that may change."""

    name: str
    """Of the run at the meeting place."""
    fewest: int
    most: int
    kind: str
    """`c10d` or `etcd`."""
    host: str
    port: int
    nodes: Nodes

    @property
    def endpoint(self) -> str:
        """Where they meet."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def own_address(self) -> str:
        """Return the address of this machine on its way to the meeting place.

        Raises SettingsError where the place is unknown.
        """
        return self._way()[0]

    def is_here(self) -> bool:
        """Return whether the meeting place's address is one of this machine's own.

        torch knows only those that the machine's name leads to.
        """
        return len(set(self._way())) == 1

    def _way(self) -> tuple[str, str]:
        """Return the addresses of this machine and of the meeting place."""
        try:
            family, kind, *_, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0]), str(address[0])
        except OSError as error:
            raise SettingsError(
                f"execution.nodes.endpoint = '{self.endpoint}': {error.strerror}",
                "name a host that every node can reach",
            ) from None


def starts(nodes: Nodes, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher started this process for a whole node of several, as `srun` may."""
    return nodes.count not in (None, 1, "1") and "LOCAL_RANK" not in environment


def several(
    nodes: Nodes, folder: Path, environment: Mapping[str, str] = os.environ
) -> Several | None:
    """Return the machines of a run; None where it has this one. Raises SettingsError."""
    try:
        fewest, most = limits(nodes.count or environment.get("PET_NNODES", "1"))
    except ValueError as error:
        raise SettingsError(f"PET_NNODES: {error}", "start it with another number") from None
    if most == 1:
        return None
    said = nodes.rendezvous or environment.get("PET_RDZV_BACKEND", "c10d")
    kind = "etcd" if said.startswith("etcd") else said
    if kind not in PORTS:
        raise SettingsError(
            f"PET_RDZV_BACKEND = '{said}' is no meeting place here", "take c10d or etcd"
        )
    endpoint = nodes.endpoint or environment.get("PET_RDZV_ENDPOINT") or _launcher(environment)
    if not endpoint:
        raise SettingsError(
            "execution.nodes.endpoint says not where the nodes meet",
            "set it to the host and port of one of them, such as node-0:29400",
        )
    host, port = _parts(endpoint, PORTS[kind])
    own = f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    name = environment.get("PET_RDZV_ID") or own
    return Several(name, fewest, most, kind, host, port, nodes)


def _launcher(environment: Mapping[str, str]) -> str:
    """Return where a launcher lets the processes meet; nothing where it says none."""
    if "SLURM_STEP_NODELIST" in environment:
        environment = torchrun_variables(environment)
    if "MASTER_ADDR" not in environment:
        return ""
    return f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', PORTS['c10d'])}"


def _parts(endpoint: str, port: int) -> tuple[str, int]:
    """Return host and port of `host`, `host:port` or `[address]:port`; raises SettingsError."""
    host, colon, told = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, told = endpoint, str(port)
    if not told.isdigit() or not host:
        raise SettingsError(f"execution.nodes.endpoint = '{endpoint}' is no host:port", "mend it")
    return host.strip("[]"), int(told)
