"""Servers of a small cluster: the controller of Deployments, and clients of a Service.

It follows kubernetes/kubernetes, pkg/controller/deployment/rolling.go: a new replica is created
while the surge allows it, and an old one deleted when enough others are ready.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.kubernetes_api import ApiServer, Store
    from launch.kubernetes_pods import Kubelet

Object = dict[str, Any]
HASH = "pod-template-hash"
PROBE_SECONDS = 0.25
_NUMBERS = count()


@dataclass
class Deployments:
    """Replaces the replicas of Deployments one by one."""

    store: Store
    kubelet: Kubelet
    ready: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Time and result of the last probe of each pod by uid."""

    def reconcile(self) -> None:
        for deployment in self.store.list("deployments"):
            self._reconcile(deployment)

    def is_ready(self, pod: Object) -> bool:
        """Return the result of a pod's readiness probe, as kubelets ask it repeatedly."""
        uid = pod["metadata"]["uid"]
        probed_at, answer = self.ready.get(uid, (0.0, False))
        if time.monotonic() - probed_at > PROBE_SECONDS:
            port = self.kubelet.server_ports.get(uid)
            path = pod["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"]
            answer = port is not None and _probe(port, path)
            self.ready[uid] = (time.monotonic(), answer)
        return answer

    def _reconcile(self, deployment: Object) -> None:
        spec, metadata = deployment["spec"], deployment["metadata"]
        num_replicas, surge = spec.get("replicas", 1), spec["strategy"]["rollingUpdate"]["maxSurge"]
        template = json.dumps(spec["template"], sort_keys=True)
        digest = hashlib.sha256(template.encode()).hexdigest()[:10]
        pods = self.store.list("pods", metadata["namespace"], **spec["selector"]["matchLabels"])
        for pod in [pod for pod in pods if pod["status"]["phase"] in ("Failed", "Succeeded")]:
            self._delete(pod)
            pods.remove(pod)
        current = [pod for pod in pods if pod["metadata"]["labels"][HASH] == digest]
        old = [pod for pod in pods if pod not in current]
        ready = [pod for pod in pods if self.is_ready(pod)]
        if len(current) < num_replicas and len(pods) < num_replicas + surge:
            self._create(deployment, digest)
        surplus = [pod for pod in old if pod not in ready] or old or current[num_replicas:]
        if surplus and (len(ready) > num_replicas or surplus[0] not in ready or num_replicas == 0):
            self._delete(surplus[0])
        status = "True" if len(ready) >= num_replicas else "False"
        condition = {"type": "Available", "status": status, "message": f"{len(ready)} are ready"}
        deployment["status"] = {"replicas": len(pods), "conditions": [condition]}

    def _create(self, deployment: Object, digest: str) -> None:
        metadata, template = deployment["metadata"], deepcopy(deployment["spec"]["template"])
        name = f"{metadata['name']}-{digest}-{next(_NUMBERS):05d}"
        labels = {**template["metadata"]["labels"], HASH: digest}
        self.store.create(
            "pods",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": metadata["namespace"], "labels": labels},
                "spec": {**template["spec"], "hostname": name},
                "status": {"phase": "Pending"},
            },
        )

    def _delete(self, pod: Object) -> None:
        metadata = pod["metadata"]
        self.store.delete("pods", metadata["namespace"], metadata["name"])


def _probe(port: int, path: str) -> bool:
    with (
        suppress(OSError, http.client.HTTPException),
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=0.5)) as connection,
    ):
        return _ask(connection, "GET", path) == 200
    return False


def _ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None
) -> int:
    """Send a request and return the status; the connection closes if the server asks for it."""
    headers = {"Content-Type": "application/json"} if body else {}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


@dataclass
class ServiceClients:
    """Clients that keep connections to the ready replicas of a server, as through a Service."""

    cluster: ApiServer
    name: str
    path: str
    body: str
    statuses: list[int] = field(default_factory=list)
    num_reconnected: int = 0
    """Requests sent again because the server had closed the idle connection before."""

    def run(self, num_requests: int, num_clients: int) -> None:
        """Send requests from several clients at once."""
        with ThreadPoolExecutor(num_clients) as executor:
            list(executor.map(self._send_many, [num_requests // num_clients] * num_clients))

    def list_ports(self) -> list[int]:
        """Return the ports of the endpoints: replicas that are ready and not being deleted."""
        with self.cluster.store.lock:
            pods = self.cluster.find_pods(self.name)
            ready = [pod for pod in pods if self.cluster.controllers.deployments.is_ready(pod)]
            return [self.cluster.kubelet.server_ports[pod["metadata"]["uid"]] for pod in ready]

    def _send_many(self, num_requests: int) -> None:
        connection = self._connect(0)
        for index in range(num_requests):
            if index % 50 == 0:
                connection.close()
                connection = self._connect(index)
            try:
                status = _ask(connection, "POST", self.path, self.body)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self.num_reconnected += 1
                connection.close()
                connection = self._connect(index)
                status = _ask(connection, "POST", self.path, self.body)
            self.statuses.append(status)
        connection.close()

    def _connect(self, index: int) -> http.client.HTTPConnection:
        ports = self.list_ports()
        return http.client.HTTPConnection("127.0.0.1", ports[index % len(ports)], timeout=60)
