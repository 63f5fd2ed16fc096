"""A small Kubernetes API server on loopback that kubectl talks to.

It validates documents strictly, stores them, and has the controllers of `kubernetes_controllers`,
which run pods as local processes. Only the requests that kubectl sends for create, get, patch,
delete and logs are served.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from launch.kubernetes_controllers import JOB_SET_NAME, Controllers
from launch.kubernetes_pods import Kubelet
from launch.schemas import find_problems
from loopback import serve

CONTEXT = "arn:aws:eks:us-east-1:111122223333:cluster/rehearsal"
"""Context of the kubeconfig: the name that the command line of AWS gives to an EKS cluster."""
Object = dict[str, Any]
KINDS: dict[str, dict[str, tuple[str, bool]]] = {
    "v1": {
        "configmaps": ("ConfigMap", True),
        "events": ("Event", True),
        "persistentvolumeclaims": ("PersistentVolumeClaim", True),
        "persistentvolumes": ("PersistentVolume", False),
        "pods": ("Pod", True),
        "secrets": ("Secret", True),
        "services": ("Service", True),
    },
    "apps/v1": {"deployments": ("Deployment", True)},
    "autoscaling/v2": {"horizontalpodautoscalers": ("HorizontalPodAutoscaler", True)},
    "batch/v1": {"jobs": ("Job", True)},
    "keda.sh/v1alpha1": {"scaledobjects": ("ScaledObject", True)},
    "policy/v1": {"poddisruptionbudgets": ("PodDisruptionBudget", True)},
    "kubeflow.org/v1": {"pytorchjobs": ("PyTorchJob", True)},
    "trainer.kubeflow.org/v1alpha1": {
        "trainjobs": ("TrainJob", True),
        "trainingruntimes": ("TrainingRuntime", True),
    },
    "jobset.x-k8s.io/v1alpha2": {"jobsets": ("JobSet", True)},
    "kueue.x-k8s.io/v1beta1": {"workloads": ("Workload", True)},
}
"""Kind of each resource, and whether it is in a namespace."""
JOB_RESOURCES = ("deployments", "jobs", "jobsets", "pytorchjobs", "trainjobs")
POLL_SECONDS = 0.05


class ApiError(Exception):
    """An answer of the server that is no success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass
class Store:
    """The objects of the cluster by resource, namespace and name."""

    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    lock: Any = field(default_factory=RLock)
    version: int = 0
    refused: set[str] = field(default_factory=set)
    """Kinds that the server refuses to create."""
    deleted: list[tuple[str, str, str]] = field(default_factory=list)
    """Keys of deleted objects, in their order."""

    def create(self, resource: str, document: Object) -> Object:
        """Store a new object; raises ApiError if its name is taken."""
        metadata = document["metadata"]
        key = (resource, metadata.get("namespace", ""), metadata["name"])
        with self.lock:
            if document.get("kind") in self.refused:
                raise ApiError(403, "Forbidden", f'{resource} "{key[2]}" is forbidden: by a test')
            if key in self.objects:
                raise ApiError(409, "AlreadyExists", f'{resource} "{key[2]}" already exists')
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", now())
            self.objects[key] = document
            self._touch(document)
            return document

    def find(self, resource: str, namespace: str, name: str) -> Object:
        """Return an object; raises ApiError if there is none."""
        with self.lock:
            item = self.objects.get((resource, namespace, name))
            if item is None:
                raise ApiError(404, "NotFound", f'{resource} "{name}" not found')
            return item

    def list(self, resource: str, namespace: str = "", **labels: str) -> list[Object]:
        """Return the objects of a resource with these labels."""
        with self.lock:
            return [
                item
                for (kind, space, _), item in self.objects.items()
                if kind == resource
                and (not namespace or space == namespace)
                and labels.items() <= item["metadata"].get("labels", {}).items()
            ]

    def delete(self, resource: str, namespace: str, name: str) -> Object:
        with self.lock:
            item = self.find(resource, namespace, name)
            del self.objects[resource, namespace, name]
            self.deleted.append((resource, namespace, name))
            if resource == "jobsets":
                for job in self.list("jobs", namespace, **{JOB_SET_NAME: name}):
                    self.delete("jobs", namespace, job["metadata"]["name"])
            if resource in JOB_RESOURCES:  # the garbage collector deletes what a job owns
                for pod in self.list("pods", namespace, **{"regauge/job": name}):
                    self.delete("pods", namespace, pod["metadata"]["name"])
            return item

    def patch(self, resource: str, namespace: str, name: str, patch: Object) -> Object:
        """Merge a patch into an object (RFC 7386)."""
        with self.lock:
            item = self.find(resource, namespace, name)
            _merge(item, patch)
            self._touch(item)
            return item

    def record_event(self, target: Object, reason: str, message: str) -> None:
        """Store an event about an object, at most once for the same message."""
        metadata = target["metadata"]
        namespace = metadata.get("namespace", "")
        with self.lock:
            for event in self.list("events", namespace):
                if (
                    event["message"] == message
                    and event["involvedObject"]["uid"] == metadata["uid"]
                ):
                    return
            self.create(
                "events",
                {
                    "apiVersion": "v1",
                    "kind": "Event",
                    "metadata": {
                        "name": f"{metadata['name']}.{self.version:x}",
                        "namespace": namespace,
                    },
                    "involvedObject": {
                        "kind": target["kind"],
                        "name": metadata["name"],
                        "uid": metadata["uid"],
                    },
                    "reason": reason,
                    "message": message,
                    "lastTimestamp": now(),
                },
            )

    def _touch(self, document: Object) -> None:
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _merge(target: Object, patch: Object) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


@dataclass
class ApiServer:
    """The server, its controllers and its nodes."""

    root: Path
    store: Store
    kubelet: Kubelet
    controllers: Controllers
    url: str = ""
    accepts_credentials: bool = True
    versions: dict[str, str] = field(default_factory=dict)
    """Version of the schema of each kind; the latest one by default."""

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    def write_kubeconfig(self) -> Path:
        """Write the configuration of kubectl, whose current context is this cluster."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "loopback", "cluster": {"server": self.url}}],
            "contexts": [{"name": CONTEXT, "context": {"cluster": "loopback"}}],
            "current-context": CONTEXT,
        }
        self.kubeconfig.write_text(yaml.safe_dump(document))
        return self.kubeconfig

    def find_pods(self, job: str) -> list[Object]:
        pods = self.store.list("pods", **{"regauge/job": job})
        return sorted(pods, key=lambda pod: pod["metadata"]["name"])

    def lose_node(self, name: str) -> None:
        """Lose the machine of a pod: its processes are killed, and the pod reports no exit code."""
        self.kubelet.lose_pod(self.store.find("pods", "default", name))


@contextmanager
def serve_cluster(root: Path) -> Iterator[ApiServer]:
    """Run a cluster in this process for the duration of the block."""
    store = Store()
    kubelet = Kubelet(root, store)
    cluster = ApiServer(root, store, kubelet, Controllers(store, kubelet))
    server = _Server(cluster)
    has_ended = Event()

    def reconcile() -> None:
        while not has_ended.is_set():
            with store.lock:
                cluster.controllers.reconcile()
                kubelet.reconcile()
            time.sleep(POLL_SECONDS)

    with serve(server, "kubernetes-api") as url:
        cluster.url = url
        cluster.write_kubeconfig()
        thread = Thread(target=reconcile, name="kubernetes-controllers")
        thread.start()
        try:
            yield cluster
        finally:
            has_ended.set()
            thread.join()
            kubelet.kill_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, cluster: ApiServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cluster = cluster


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, method: Callable[[str, dict[str, str]], Object | None]) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        try:
            document = self._serve(method, url.path, query)
        except ApiError as error:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
            self._send(
                {**status, "message": str(error), "reason": error.reason, "code": error.code},
                error.code,
            )
            return
        if document is not None:
            self._send(document)

    def _serve(
        self,
        method: Callable[[str, dict[str, str]], Object | None],
        path: str,
        query: dict[str, str],
    ) -> Object | None:
        if not self.server.cluster.accepts_credentials:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return method(path, query)

    def _send(self, document: Object, code: int = 200) -> None:
        with self.server.cluster.store.lock:
            content = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _read(self) -> Object:
        content = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        return dict(json.loads(content)) if content else {}

    def _get(self, path: str, query: dict[str, str]) -> Object | None:
        if (discovery := _discover(path)) is not None:
            return discovery
        target = _Target.parse(path)
        if target.subresource == "log":
            self._send_log(target, query)
            return None
        if target.name:
            return self.server.cluster.store.find(target.resource, target.namespace, target.name)
        labels = dict(
            part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part
        )
        items = self.server.cluster.store.list(target.resource, target.namespace, **labels)
        return {
            "apiVersion": target.version,
            "kind": f"{target.kind}List",
            "metadata": {"resourceVersion": str(self.server.cluster.store.version)},
            "items": items,
        }

    def _post(self, path: str, _: dict[str, str]) -> Object:
        target, document = _Target.parse(path), self._read()
        problems = find_problems(document, self.server.cluster.versions.get(target.kind))
        if problems:
            name = document["metadata"]["name"]
            message = f'{target.kind} "{name}" is invalid: {"; ".join(problems)}'
            raise ApiError(422, "Invalid", message)
        if target.namespace:
            document["metadata"]["namespace"] = target.namespace
        return self.server.cluster.store.create(target.resource, document)

    def _patch(self, path: str, query: dict[str, str]) -> Object:
        target = _Target.parse(path)
        if "fieldManager" in query and "apply" in self.headers["Content-Type"]:
            return self._apply(target)
        return self.server.cluster.store.patch(
            target.resource, target.namespace, target.name, self._read()
        )

    def _apply(self, target: _Target) -> Object:
        """Create or merge an object (server-side apply of YAML or JSON)."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        document = yaml.safe_load(content)
        if problems := find_problems(document, self.server.cluster.versions.get(target.kind)):
            raise ApiError(422, "Invalid", f"{target.kind} is invalid: {'; '.join(problems)}")
        store = self.server.cluster.store
        document["metadata"]["namespace"] = target.namespace
        with store.lock:
            if (target.resource, target.namespace, target.name) in store.objects:
                return store.patch(target.resource, target.namespace, target.name, document)
            return store.create(target.resource, document)

    def _delete(self, path: str, _: dict[str, str]) -> Object:
        self._read()
        target = _Target.parse(path)
        return self.server.cluster.store.delete(target.resource, target.namespace, target.name)

    def _send_log(self, target: _Target, query: dict[str, str]) -> None:
        """Send the log of a pod; with `follow`, until its process ends."""
        pod = self.server.cluster.store.find("pods", target.namespace, target.name)
        path = self.server.cluster.kubelet.find_log(pod)
        if path is None:
            raise ApiError(400, "BadRequest", f"the container of {target.name} is not started")
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with path.open("rb") as file:
            while True:
                has_ended = self.server.cluster.kubelet.has_ended(pod)
                while content := file.read(1 << 16):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
                if has_ended or query.get("follow") != "true":
                    break
                time.sleep(POLL_SECONDS)
        self.wfile.write(b"0\r\n\r\n")


@dataclass(frozen=True)
class _Target:
    """The resource that a path names."""

    version: str
    resource: str
    kind: str
    namespace: str
    name: str
    subresource: str

    @classmethod
    def parse(cls, path: str) -> _Target:
        parts = path.strip("/").split("/")
        size = 2 if parts[0] == "api" else 3
        version, rest = "/".join(parts[1:size]), parts[size:]
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        resource, name, subresource = [*rest, "", "", ""][:3]
        if resource not in KINDS.get(version, {}):
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        kind, _ = KINDS[version][resource]
        return cls(version, resource, kind, namespace, name, subresource)


def _discover(path: str) -> Object | None:
    """Return the answer to a discovery request; None for other paths."""
    groups = [version for version in KINDS if "/" in version]
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": version.partition("/")[0],
                    "versions": [{"groupVersion": version, "version": version.partition("/")[2]}],
                    "preferredVersion": {
                        "groupVersion": version,
                        "version": version.partition("/")[2],
                    },
                }
                for version in groups
            ],
        }
    if path == "/openapi/v3":
        return {
            "paths": {
                _prefix(version): {"serverRelativeURL": f"/openapi/v3/{_prefix(version)}"}
                for version in KINDS
            }
        }
    for version, resources in KINDS.items():
        if path == f"/{_prefix(version)}":
            return _list_resources(version, resources)
        if path == f"/openapi/v3/{_prefix(version)}":
            return _describe_patches(version, resources)
    return None


def _prefix(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _list_resources(version: str, resources: dict[str, tuple[str, bool]]) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [
            {
                "name": name,
                "singularName": kind.lower(),
                "namespaced": is_namespaced,
                "kind": kind,
                "verbs": verbs,
            }
            for name, (kind, is_namespaced) in resources.items()
        ],
    }


def _describe_patches(version: str, resources: dict[str, tuple[str, bool]]) -> Object:
    """Return OpenAPI paths which state that the server validates fields itself."""
    group, _, number = version.rpartition("/")
    parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
    paths = {}
    for name, (kind, is_namespaced) in resources.items():
        folder = f"/{_prefix(version)}" + ("/namespaces/{namespace}" * is_namespaced)
        identity = {"group": group, "version": number, "kind": kind}
        patch = {
            "parameters": parameters,
            "responses": {"200": {"description": "OK"}},
            "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": identity,
        }
        paths[f"{folder}/{name}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "loopback", "version": "1"}, "paths": paths}
