"""The nodes of a cluster: each pod is a local process with its environment and its mounts.

Host names of pods become loopback addresses, and mounts become folders, in the command and in the
environment of a process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from faults.families import list_descendants
from regauge.jobs.targets._kubernetes.documents import PORTS
from regauge.jobs.targets._nodes import clear_scheduler_variables
from regauge.system.processes import find_free_port

if TYPE_CHECKING:
    from launch.kubernetes_api import Store

Object = dict[str, Any]
NODE_NAME = "loopback-{}"
LOG_CHARACTERS = 2048
"""Size of a termination message, https://kubernetes.io/docs/tasks/debug/debug-application."""


@dataclass
class Kubelet:
    """Runs pods as processes."""

    root: Path
    store: Store
    capacity: int = 8
    """Pods that run at the same time; others are not scheduled."""
    missing_images: set[str] = field(default_factory=set)
    """Images that no registry has."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Process of each pod by uid."""
    lost: set[str] = field(default_factory=set)
    ports: dict[str, int] = field(default_factory=dict)
    """Port on loopback of each address of a pod."""
    server_ports: dict[str, int] = field(default_factory=dict)
    """Port on loopback of each server's pod by uid; replicas here share one address."""
    hook_seconds: dict[str, float] = field(default_factory=dict)
    """Time that the hook `preStop` of a server's pod sleeps, by uid."""

    def reconcile(self) -> None:
        """Start pods, and report those that have ended."""
        pods = self.store.list("pods")
        self._kill_deleted({pod["metadata"]["uid"] for pod in pods})
        for pod in pods:
            phase = pod["status"]["phase"]
            if phase == "Pending":
                self._try_start(pod)
            elif phase == "Running":
                self._check_end(pod)

    def find_log(self, pod: Object) -> Path | None:
        """Return the log of a pod; None if its process was not started."""
        path = self._folder(pod) / "log.txt"
        return path if path.exists() else None

    def has_ended(self, pod: Object) -> bool:
        process = self.processes.get(pod["metadata"]["uid"])
        return process is None or process.poll() is not None

    def lose_pod(self, pod: Object) -> None:
        """Kill the processes of a pod; its node does not answer, so the pod has no exit code."""
        uid = pod["metadata"]["uid"]
        with self.store.lock:
            self.lost.add(uid)
            _kill_family(self.processes[uid])
            disruption = {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "DeletionByTaintManager",
                "message": "Taint manager: deleting due to NoExecute taint",
            }
            pod["status"] = {"phase": "Failed", "reason": "NodeLost", "conditions": [disruption]}

    def kill_all(self) -> None:
        for process in self.processes.values():
            _kill_family(process)

    def _try_start(self, pod: Object) -> None:
        """Start a pod, or report why it cannot start."""
        (container,) = pod["spec"]["containers"]
        running = [item for item in self.store.list("pods") if item["status"]["phase"] == "Running"]
        if len(running) >= self.capacity:
            message = f"0/{self.capacity} nodes are available: {self.capacity} Insufficient cpu."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            pod["status"]["conditions"] = [{**condition, "message": message}]
            self.store.record_event(pod, "FailedScheduling", message)
            return
        pod["status"].pop("conditions", None)
        if container["image"] in self.missing_images:
            message = f'Back-off pulling image "{container["image"]}"'
            _wait(pod, container, "ImagePullBackOff", message)
            self.store.record_event(pod, "Failed", message)
            return
        environment, missing = self._build_environment(pod, container)
        if missing:
            _wait(pod, container, "CreateContainerConfigError", f'secret "{missing}" not found')
            return
        self._start(pod, container, environment)

    def _start(self, pod: Object, container: Object, environment: dict[str, str]) -> None:
        replacements = self._build_replacements(pod, container)
        texts = [*container["command"], *container.get("args", [])]
        command = [_replace(text, replacements) for text in texts]
        if "ports" in container:
            hook = container["lifecycle"]["preStop"]["exec"]["command"]
            self.hook_seconds[pod["metadata"]["uid"]] = float(hook[1])
            port = self.server_ports[pod["metadata"]["uid"]] = find_free_port()
            command.append(f"serve.port={port}")
        folder = self._folder(pod)
        with (folder / "log.txt").open("wb") as log:
            self.processes[pod["metadata"]["uid"]] = subprocess.Popen(
                command,
                env={name: _replace(text, replacements) for name, text in environment.items()},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        pod["spec"]["nodeName"] = NODE_NAME.format(pod["metadata"]["name"])
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        state = {"name": container["name"], "image": container["image"], "restartCount": 0}
        pod["status"] = {
            "phase": "Running",
            "startTime": started,
            "containerStatuses": [{**state, "state": {"running": {"startedAt": started}}}],
        }
        self.store.record_event(pod, "Started", f"Started container {container['name']}")

    def _check_end(self, pod: Object) -> None:
        """Report the exit code of a pod whose process has ended."""
        process = self.processes[pod["metadata"]["uid"]]
        code = process.poll()
        if code is None:
            return
        code = 128 - code if code < 0 else code
        log = self.find_log(pod)
        message = log.read_text(errors="replace")[-LOG_CHARACTERS:] if log and code else ""
        terminated = {"exitCode": code, "reason": "Error" if code else "Completed"}
        (status,) = pod["status"]["containerStatuses"]
        status["state"] = {"terminated": {**terminated, "message": message}}
        pod["status"]["phase"] = "Failed" if code else "Succeeded"

    def _kill_deleted(self, uids: set[str]) -> None:
        """Stop the processes of pods that were deleted: the hook `preStop`, then SIGTERM."""
        for uid, process in list(self.processes.items()):
            if uid in uids or process.poll() is not None:
                continue
            if uid not in self.lost:
                self.lost.add(uid)
                Timer(self.hook_seconds.get(uid, 0.0), process.terminate).start()

    def _build_environment(self, pod: Object, container: Object) -> tuple[dict[str, str], str]:
        """Return the environment of a container, and the name of a secret that does not exist."""
        binaries = str(Path(sys.executable).parent)
        environment = clear_scheduler_variables(os.environ)
        environment["PATH"] = f"{binaries}:{environment['PATH']}"
        for item in container.get("env", []):
            if "value" in item:
                environment[item["name"]] = item["value"]
                continue
            reference = item["valueFrom"]["secretKeyRef"]
            secrets = self.store.list("secrets", pod["metadata"]["namespace"])
            values = {item["metadata"]["name"]: item["stringData"] for item in secrets}
            if reference["name"] not in values:
                return {}, reference["name"]
            environment[item["name"]] = values[reference["name"]][reference["key"]]
        return environment, ""

    def _build_replacements(self, pod: Object, container: Object) -> dict[str, str]:
        """Return addresses and paths of this machine for those of the pod."""
        job = pod["metadata"]["labels"]["regauge/job"]
        hosts = (
            f"{job}-master-0",
            f"{job}-node-0-0.{job}",
            f"{pod['spec']['hostname'].rpartition('-')[0]}-0.{job}",
        )
        replacements = {}
        for address in (f"{host}:{PORTS['c10d']}" for host in hosts):
            port = self.ports.setdefault(address, find_free_port())
            replacements[address] = f"127.0.0.1:{port}"
        sources = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for mount in container["volumeMounts"]:
            source = sources[mount["name"]]
            if "configMap" in source:
                replacements[mount["mountPath"]] = str(self._write_config(pod, source, mount))
            elif "hostPath" in source:
                replacements[mount["mountPath"]] = source["hostPath"]["path"]
        return replacements

    def _write_config(self, pod: Object, source: Object, mount: Object) -> Path:
        """Write the mounted file of a ConfigMap; return its path."""
        name = source["configMap"]["name"]
        data = self.store.find("configmaps", pod["metadata"]["namespace"], name)["data"]
        path = self._folder(pod) / mount["subPath"]
        path.write_text(data[mount["subPath"]])
        return path

    def _folder(self, pod: Object) -> Path:
        folder = self.root / "pods" / pod["metadata"]["uid"]
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _wait(pod: Object, container: Object, reason: str, message: str) -> None:
    state = {"waiting": {"reason": reason, "message": message}}
    status = {"name": container["name"], "image": container["image"], "restartCount": 0}
    pod["status"]["containerStatuses"] = [{**status, "state": state}]


def _kill_family(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants at the same moment, and wait for it."""
    if process.poll() is None:
        for pid in [process.pid, *list_descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _replace(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text
