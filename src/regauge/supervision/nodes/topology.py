"""A run's nodes and their rendezvous endpoint, from the settings or a launcher.

Three launchers are known. The Kubeflow training operator sets torchrun's variables in each pod
(`PET_NNODES` and others). Slurm sets variables for a step with one task per node. AWS Batch sets
`AWS_BATCH_JOB_NUM_NODES` and others on each node in a multi-node parallel job.
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.supervision.nodes.aws_batch_variables import (
    NUM_NODES,
    is_multi_node,
    read_attempt_name,
    read_main_address,
)
from regauge.supervision.settings import Nodes, parse_node_range
from regauge.system.errors import SettingsError
from regauge.system.processes import build_torchrun_variables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DEFAULT_PORTS = {"c10d": 29400, "etcd": 2379}
"""Rendezvous backend -> port if the endpoint does not include one."""


@dataclass(frozen=True)
class NodeTopology:
    """The nodes of a run on several nodes, or on a changing number of nodes."""

    name: str
    """Run name at the rendezvous."""
    min_nodes: int
    max_nodes: int
    backend: str
    """`c10d` or `etcd`."""
    host: str
    port: int
    settings: Nodes
    replaces_nodes: bool = True
    """Whether the launcher replaces a lost node while the others run."""

    @property
    def endpoint(self) -> str:
        """Rendezvous host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def local_address(self) -> str:
        """Return this node's address on the route to the rendezvous.

        Raises SettingsError if the rendezvous host is unknown.
        """
        return self._find_route()[0]

    def is_endpoint_local(self) -> bool:
        """Return whether the rendezvous address belongs to this node.

        torch knows only the addresses that the node's name resolves to.
        """
        return len(set(self._find_route())) == 1

    def _find_route(self) -> tuple[str, str]:
        """Return the addresses of this node and of the rendezvous."""
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
                "set it to a host that every node can reach",
            ) from None


def is_whole_node(nodes: Nodes, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process was started for one whole node among several, as by `srun`."""
    return nodes.count not in (None, 1, "1") and "LOCAL_RANK" not in environment


def resolve_topology(
    nodes: Nodes, folder: Path, environment: Mapping[str, str] = os.environ
) -> NodeTopology | None:
    """Return the run's nodes, or None for this node only. Raises SettingsError."""
    is_batch = is_multi_node(environment)
    variable = NUM_NODES if is_batch else "PET_NNODES"
    try:
        min_nodes, max_nodes = parse_node_range(nodes.count or environment.get(variable, "1"))
    except ValueError as error:
        raise SettingsError(f"{variable}: {error}", f"set {variable} to another number") from None
    if max_nodes == 1:
        return None
    name = nodes.rendezvous or environment.get("PET_RDZV_BACKEND", "c10d")
    backend = "etcd" if name.startswith("etcd") else name
    if backend not in DEFAULT_PORTS:
        raise SettingsError(
            f"PET_RDZV_BACKEND = '{name}' is not supported", "set it to c10d or etcd"
        )
    endpoint = nodes.endpoint or environment.get("PET_RDZV_ENDPOINT")
    endpoint = endpoint or _read_launcher_endpoint(environment)
    if not endpoint:
        raise SettingsError(
            "execution.nodes.endpoint is not set",
            "set it to the host and port of a node, such as node-0:29400",
        )
    host, port = _split_endpoint(endpoint, DEFAULT_PORTS[backend])
    default_name = f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    name_of_attempt = read_attempt_name(environment) if is_batch else None
    return NodeTopology(
        environment.get("PET_RDZV_ID") or name_of_attempt or default_name,
        min_nodes,
        max_nodes,
        backend,
        host,
        port,
        nodes,
        replaces_nodes=not is_batch,
    )


def _read_launcher_endpoint(environment: Mapping[str, str]) -> str:
    """Return rank 0's address as set by a launcher, or ""."""
    if "SLURM_STEP_NODELIST" in environment:
        environment = build_torchrun_variables(environment)
    port = environment.get("MASTER_PORT", DEFAULT_PORTS["c10d"])
    if is_multi_node(environment):
        return f"{read_main_address(environment)}:{port}"
    if "MASTER_ADDR" not in environment:
        return ""
    return f"{environment['MASTER_ADDR']}:{port}"


def _split_endpoint(endpoint: str, default_port: int) -> tuple[str, int]:
    """Split `host`, `host:port` or `[address]:port` into host and port; raises SettingsError."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(default_port)
    if not port.isdigit() or not host:
        raise SettingsError(
            f"execution.nodes.endpoint = '{endpoint}' is invalid",
            "set it to a host and port, such as node-0:29400",
        )
    return host.strip("[]"), int(port)
