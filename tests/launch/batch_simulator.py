"""A simulator of AWS Batch on the loopback interface: its states, its retries and its nodes.

boto3 reaches it by environment variables with its address. A container is a process of this
machine with the command and the variables of its job definition; the program `regauge` is that of
this Python. Paths of the image become folders of this machine. The rules follow the AWS Batch user
guide:

- A multi-node job starts its main node first, ends with it, and takes its exit code.
- Only an attempt that fails is retried, by the first rule of `evaluateOnExit` that matches. An
  attempt that no rule matches is retried.
- An array stays PENDING until all of its jobs have ended.
- A job with `dependsOn` stays PENDING until that job has succeeded, and fails if it fails.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from faults.families import list_descendants
from loopback import serve
from regauge.jobs.targets._aws_batch.documents import build_node_variables
from regauge.supervision.nodes.aws_batch_variables import find_local_address

ARN = "arn:aws:batch:us-east-1:123456789012"
POLL_SECONDS = 0.05
GRACE_SECONDS = 20.0
MAIN_SECONDS = 60.0
"""Maximum wait for the rendezvous of the main node, before the child nodes start."""
ENDED = ("SUCCEEDED", "FAILED")
MAX_RULES, MAX_ATTEMPTS = 5, 10
Document = dict[str, Any]


class RequestError(Exception):
    """A request that Batch refuses; the answer has status 400."""


def matches(pattern: str | None, value: str) -> bool:
    """Return whether a pattern of `evaluateOnExit` matches; only its end may be an asterisk."""
    if pattern is None:
        return True
    if pattern.endswith("*"):
        return value.startswith(pattern[:-1])
    return value == pattern


def decide(strategy: Document, exit_code: int | None, status_reason: str, reason: str) -> str:
    """Return RETRY or EXIT for a failed attempt."""
    code = "" if exit_code is None else str(exit_code)
    for rule in strategy.get("evaluateOnExit", []):
        is_match = (
            matches(rule.get("onExitCode"), code)
            and matches(rule.get("onStatusReason"), status_reason)
            and matches(rule.get("onReason"), reason)
        )
        if is_match:
            return str(rule["action"]).upper()
    return "RETRY"


@dataclass
class SimulatedNode:
    """One container: a job, a node of a multi-node job, or a job of an array."""

    job_id: str
    container: Document
    index: int = 0
    status: str = "SUBMITTED"
    status_reason: str = ""
    exit_code: int | None = None
    process: subprocess.Popen[bytes] | None = None
    attempts: list[Document] = field(default_factory=list)
    stream: str = ""
    host: str = ""
    """Identifier of its machine; a new one for each attempt."""
    is_reclaimed: bool = False

    def stop(self, *, grace: float) -> None:
        """Send SIGTERM to the command, and SIGKILL to its processes after the grace time."""
        process = self.process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        self.kill()

    def kill(self) -> None:
        """Kill the command with its processes at the same moment, as the loss of a machine does."""
        if self.process is None:
            return
        for pid in [self.process.pid, *list_descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class SimulatedJob:
    """A job, with its nodes or with the jobs of its array."""

    job_id: str
    definition: Document
    request: Document
    nodes: list[SimulatedNode]
    status: str = "SUBMITTED"
    status_reason: str = ""
    created_at: int = 0
    started_at: int | None = None
    stopped_at: int | None = None
    attempts: list[Document] = field(default_factory=list)
    is_cancelled: bool = False
    is_terminated: bool = False
    children: list[SimulatedJob] = field(default_factory=list)

    @property
    def main(self) -> SimulatedNode:
        return self.nodes[0]


def read_clock() -> int:
    """Return the time in milliseconds since 1970."""
    return int(time.time() * 1000)


class BatchSimulator:
    """The state of the service. `folders` maps paths in containers to folders of this machine."""

    def __init__(self, root: Path, folders: Mapping[str, Path]) -> None:
        self.root, self.folders = root, folders
        self.has_capacity = True
        self.pending_seconds = 3600.0
        """Seconds after which the action of `jobStateTimeLimitActions` is taken."""
        self.queue_error: str | None = None
        """Message with which SubmitJob is refused; None to accept jobs."""
        self.definitions: dict[str, Document] = {}
        self.jobs: dict[str, SimulatedJob] = {}
        self.requests: list[tuple[str, Document]] = []
        self.environment_type = "EC2"
        self.queue: Document = {
            "jobQueueName": "regauge",
            "jobQueueArn": f"{ARN}:job-queue/regauge",
            "state": "ENABLED",
            "status": "VALID",
            "priority": 1,
            "computeEnvironmentOrder": [{"order": 1, "computeEnvironment": "regauge"}],
            "jobStateTimeLimitActions": [{}],
        }
        self.environment_tags: dict[str, str] = {}
        self.secrets: dict[str, str] = {}
        """Values of secrets by ARN, which only the containers receive."""
        self.desired_vcpus = 0
        self._threads: list[threading.Thread] = []
        self._is_stopping = threading.Event()
        self._num_hosts = 0

    # Operations of the API

    def call(self, operation: str, body: Document) -> Document:
        self.requests.append((operation, body))
        handler = getattr(self, f"_{operation}", None)
        if handler is None:
            raise RequestError(f"unknown operation {operation}")
        answer: Document = handler(body)
        return answer

    def _registerjobdefinition(self, body: Document) -> Document:
        strategy = body.get("retryStrategy", {})
        if len(strategy.get("evaluateOnExit", [])) > MAX_RULES:
            raise RequestError("evaluateOnExit has more than 5 conditions")
        if not 1 <= strategy.get("attempts", 1) <= MAX_ATTEMPTS:
            raise RequestError("attempts must be between 1 and 10")
        name = body["jobDefinitionName"]
        revision = 1 + sum(item["jobDefinitionName"] == name for item in self.definitions.values())
        arn = f"{ARN}:job-definition/{name}:{revision}"
        identity = {"jobDefinitionArn": arn, "revision": revision, "status": "ACTIVE"}
        self.definitions[arn] = body | identity
        return {"jobDefinitionName": name, "jobDefinitionArn": arn, "revision": revision}

    def _deregisterjobdefinition(self, body: Document) -> Document:
        self.definitions[body["jobDefinition"]]["status"] = "INACTIVE"
        return {}

    def _describejobqueues(self, body: Document) -> Document:
        names = {self.queue["jobQueueName"], self.queue["jobQueueArn"]}
        return {"jobQueues": [self.queue] if names & set(body["jobQueues"]) else []}

    def _describecomputeenvironments(self, body: Document) -> Document:
        environment = {
            "computeEnvironmentName": "regauge",
            "computeEnvironmentArn": f"{ARN}:compute-environment/regauge",
            "computeResources": {
                "type": self.environment_type,
                "minvCpus": 0,
                "maxvCpus": 256,
                "desiredvCpus": self.desired_vcpus,
                "subnets": [],
            },
            "tags": self.environment_tags,
        }
        return {"computeEnvironments": [environment] if body["computeEnvironments"] else []}

    def _submitjob(self, body: Document) -> Document:
        if self.queue_error is not None:
            raise RequestError(self.queue_error)
        definition = self.definitions[body["jobDefinition"]]
        job_id = f"00000000-0000-0000-0000-{len(self.jobs):012d}"
        job = self._create_job(job_id, definition, body)
        size = body.get("arrayProperties", {}).get("size", 0)
        job.children = [
            self._create_job(f"{job_id}:{index}", definition, body, index) for index in range(size)
        ]
        self.jobs[job_id] = job
        self._start(self._run_array if size else self._run_job, job)
        return {"jobId": job_id, "jobName": body["jobName"], "jobArn": f"{ARN}:job/{job_id}"}

    def _create_job(
        self, job_id: str, definition: Document, request: Document, index: int = 0
    ) -> SimulatedJob:
        properties = definition.get("nodeProperties")
        if properties is None:
            nodes = [SimulatedNode(job_id, definition["containerProperties"], index)]
        else:
            container = properties["nodeRangeProperties"][0]["container"]
            nodes = [
                SimulatedNode(f"{job_id}#{number}", container, number)
                for number in range(properties["numNodes"])
            ]
        return SimulatedJob(job_id, definition, request, nodes, created_at=read_clock())

    def _describejobs(self, body: Document) -> Document:
        return {"jobs": [item for name in body["jobs"] for item in self._describe(name)]}

    def _canceljob(self, body: Document) -> Document:
        job = self.jobs[body["jobId"]]
        if job.status in ("SUBMITTED", "PENDING", "RUNNABLE"):
            job.is_cancelled, job.status_reason = True, body["reason"]
        return {}

    def _terminatejob(self, body: Document) -> Document:
        job = self.jobs[body["jobId"]]
        for item in (job, *job.children):
            if item.status in ENDED:
                continue
            item.is_terminated, item.status_reason = True, body["reason"]
            for node in item.nodes:
                self._start_stop(node)
        return {}

    def _start_stop(self, node: SimulatedNode) -> None:
        thread = threading.Thread(target=node.stop, kwargs={"grace": GRACE_SECONDS})
        thread.start()
        self._threads.append(thread)

    def read_log_events(self, body: Document) -> Document:
        """Return the events of GetLogEvents of CloudWatch Logs after a token."""
        path = self.root / f"{body['logStreamName'].replace('/', '_')}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
        start = int(body.get("nextToken", "f/0").partition("/")[2])
        events = [{"timestamp": 0, "message": line} for line in lines[start : start + 100]]
        token = f"f/{start + len(events)}"
        return {"events": events, "nextForwardToken": token, "nextBackwardToken": "b/0"}

    def _describe(self, name: str) -> Iterator[Document]:
        job = self.jobs.get(name.partition("#")[0].partition(":")[0])
        if job is None:
            return
        if "#" in name:
            node = job.nodes[int(name.partition("#")[2])]
            yield self._describe_container(job, node) | {
                "jobId": name,
                "status": node.status,
                "statusReason": node.status_reason,
                "attempts": node.attempts,
                "nodeDetails": {"nodeIndex": node.index, "isMainNode": node is job.main},
            }
            return
        child = job.children[int(name.partition(":")[2])] if ":" in name else job
        yield self._describe_job(child)

    def _describe_job(self, job: SimulatedJob) -> Document:
        document = self._describe_container(job, job.main)
        if job.children:
            summary = dict(Counter(child.status for child in job.children))
            document["arrayProperties"] = {"size": len(job.children), "statusSummary": summary}
        if "nodeProperties" in job.definition:
            del document["container"]
            document["nodeProperties"] = job.definition["nodeProperties"]
        document |= {"attempts": job.attempts, "isCancelled": job.is_cancelled}
        document["isTerminated"] = job.is_terminated
        times = {"startedAt": job.started_at, "stoppedAt": job.stopped_at}
        document["dependsOn"] = job.request.get("dependsOn", [])
        return document | {key: value for key, value in times.items() if value is not None}

    def _describe_container(self, job: SimulatedJob, node: SimulatedNode) -> Document:
        container = dict(node.container)
        if node.stream:
            container["logStreamName"] = node.stream
            container["containerInstanceArn"] = f"{ARN}:container-instance/{node.host}"
        if node.exit_code is not None:
            container["exitCode"] = node.exit_code
        return {
            "jobName": job.request["jobName"],
            "jobId": job.job_id,
            "jobQueue": self.queue["jobQueueArn"],
            "status": job.status,
            "statusReason": job.status_reason,
            "createdAt": job.created_at,
            "startedAt": job.started_at or 0,
            "jobDefinition": job.request["jobDefinition"],
            "container": container,
            "tags": job.definition.get("tags", {}) | job.request.get("tags", {}),
        }

    # The life of a job

    def _start(self, target: Any, job: SimulatedJob) -> None:
        thread = threading.Thread(target=target, args=(job,), name=f"batch {job.job_id}")
        thread.start()
        self._threads.append(thread)

    def _run_array(self, job: SimulatedJob) -> None:
        """Run the jobs of an array at the same time; it fails if one of them does."""
        job.status, job.started_at = "PENDING", read_clock()
        threads = [threading.Thread(target=self._run_job, args=(item,)) for item in job.children]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        has_failed = any(child.status == "FAILED" for child in job.children)
        self._finish(job, "FAILED" if has_failed else "SUCCEEDED", "Array Child Job failed")

    def _run_job(self, job: SimulatedJob) -> None:
        strategy = job.definition.get("retryStrategy", {"attempts": 1})
        if not self._wait_for_dependencies(job):
            return
        while not self._is_stopping.is_set():
            job.status = "RUNNABLE"
            if not self._wait_for_capacity(job):
                return
            self._run_attempt(job)
            attempt = job.attempts[-1]
            exit_code = attempt["container"].get("exitCode")
            if exit_code == 0:
                self._finish(job, "SUCCEEDED", "Essential container in task exited")
                return
            reason, status_reason = attempt["container"].get("reason", ""), attempt["statusReason"]
            is_over = len(job.attempts) >= strategy.get("attempts", 1) or job.is_terminated
            if is_over or decide(strategy, exit_code, status_reason, reason) == "EXIT":
                self._finish(job, "FAILED", status_reason)
                return

    def _wait_for_dependencies(self, job: SimulatedJob) -> bool:
        """Return whether the jobs of `dependsOn` have succeeded; fail the job if they have not."""
        jobs = [self.jobs[item["jobId"]] for item in job.request.get("dependsOn", [])]
        while any(item.status not in ENDED for item in jobs):
            job.status = "PENDING"
            if self._is_stopping.is_set():
                return False
            if job.is_cancelled or job.is_terminated:
                self._finish(job, "FAILED", job.status_reason)
                return False
            time.sleep(POLL_SECONDS)
        if any(item.status == "FAILED" for item in jobs):
            self._finish(job, "FAILED", "Dependent Job failed")
            return False
        return True

    def _wait_for_capacity(self, job: SimulatedJob) -> bool:
        """Return whether the job may start; False if it was cancelled meanwhile."""
        limit = time.monotonic() + self.pending_seconds
        reason = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
        while not self._is_stopping.is_set():
            if job.is_cancelled or job.is_terminated:
                self._finish(job, "FAILED", job.status_reason)
                return False
            if self.has_capacity:
                return True
            job.status_reason = f"{reason} - Service cannot fulfill the capacity requested"
            if time.monotonic() > limit:
                action = f"Canceled by JobStateTimeLimit action due to reason: {reason}"
                job.is_cancelled = True
                self._finish(job, "FAILED", action)
                return False
            time.sleep(POLL_SECONDS)
        return False

    def _run_attempt(self, job: SimulatedJob) -> None:
        """Start the main node, then the child nodes; record the attempt after its end."""
        job.status, job.status_reason = "STARTING", ""
        started_at = read_clock()
        main, *children = job.nodes
        self._start_node(job, main)
        job.status, job.started_at = "RUNNING", started_at
        if children:
            self._wait_for_main(job)
        for child in children:
            self._start_node(job, child)
        limit = job.definition.get("timeout", {}).get("attemptDurationSeconds", float("inf"))
        deadline = time.monotonic() + limit
        while main.process is not None and main.process.poll() is None:
            for child in children:
                self._end_node(child)
            if time.monotonic() > deadline:
                job.status_reason = "Job attempt duration exceeded timeout"
                job.is_terminated = True
                main.stop(grace=GRACE_SECONDS)
            time.sleep(POLL_SECONDS)
        for child in children:
            child.stop(grace=GRACE_SECONDS)
        for node in job.nodes:
            self._end_node(node)
        job.attempts.append(
            main.attempts[-1] | {"startedAt": started_at, "stoppedAt": read_clock()}
        )
        if job.is_terminated:
            job.attempts[-1]["statusReason"] = job.status_reason

    def _end_node(self, node: SimulatedNode) -> None:
        """Record the end of a node, once per attempt."""
        process = node.process
        if process is None or process.poll() is None or node.status in ENDED:
            return
        container: Document = {"logStreamName": node.stream}
        reason = "Essential container in task exited"
        if node.is_reclaimed:
            reason = f"Host EC2 (instance {node.host}) terminated."
            node.exit_code = None
        else:
            code = process.returncode
            node.exit_code = code if code >= 0 else 128 - code
            container["exitCode"] = node.exit_code
        node.status = "SUCCEEDED" if node.exit_code == 0 else "FAILED"
        node.status_reason = reason
        node.attempts.append({"container": container, "statusReason": reason})

    def _start_node(self, job: SimulatedJob, node: SimulatedNode) -> None:
        """Start the process of a container on a new machine."""
        self._num_hosts += 1
        node.host, node.is_reclaimed = f"i-{self._num_hosts:017x}", False
        node.status, node.exit_code, node.status_reason = "RUNNING", None, ""
        number = len(job.attempts) + 1
        node.stream = f"{job.request['jobName']}/default/{node.job_id}-{number}"
        command = [self._map_path(argument) for argument in node.container["command"]]
        path = self.root / f"{node.stream.replace('/', '_')}.log"
        with path.open("wb") as log:
            node.process = subprocess.Popen(
                command,
                env=os.environ | self._build_environment(job, node, number),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                start_new_session=True,
            )

    def _build_environment(
        self, job: SimulatedJob, node: SimulatedNode, number: int
    ) -> dict[str, str]:
        variables = {
            item["name"]: self._map_path(item["value"])
            for item in node.container.get("environment", [])
        }
        variables |= {
            item["name"]: self.secrets[item["valueFrom"]]
            for item in node.container.get("secrets", [])
        }
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables |= {"AWS_BATCH_JOB_ID": node.job_id, "AWS_BATCH_JOB_ATTEMPT": str(number)}
        variables["PATH"] = programs
        properties = job.definition.get("nodeProperties")
        if properties is not None:
            variables |= build_node_variables(node.index, properties, find_local_address())
        size = job.request.get("arrayProperties", {}).get("size")
        if size is not None:
            variables["AWS_BATCH_JOB_ARRAY_INDEX"] = str(node.index)
            variables["AWS_BATCH_JOB_ARRAY_SIZE"] = str(size)
        return variables

    def _map_path(self, text: str) -> str:
        """Return an argument with the folders of this machine for the paths of the container."""
        for path, folder in self.folders.items():
            before, separator, after = text.partition(path)
            if separator and (not before or before.endswith("=")) and after[:1] in ("", "/"):
                return f"{before}{folder}{after}"
        return text

    def _wait_for_main(self, job: SimulatedJob) -> None:
        """Wait until the main node serves the rendezvous.

        All nodes have the address of this machine here, so that the first one would serve it.
        """
        variables = {item["name"]: item["value"] for item in job.main.container["environment"]}
        address = (find_local_address(), int(variables["MASTER_PORT"]))
        deadline = time.monotonic() + MAIN_SECONDS
        while time.monotonic() < deadline and job.main.process is not None:
            if job.main.process.poll() is not None:
                return
            with suppress(OSError), socket.create_connection(address, timeout=1):
                return
            time.sleep(POLL_SECONDS)

    def _finish(self, job: SimulatedJob, status: str, reason: str) -> None:
        job.stopped_at, job.status_reason = read_clock(), reason
        if status == "SUCCEEDED" and not job.attempts and not job.children:
            raise AssertionError("a job without an attempt succeeded")
        job.status = status

    def reclaim(self, node: SimulatedNode) -> None:
        """Take the machine of a node away: its processes die at once."""
        node.is_reclaimed = True
        node.kill()

    def stop(self) -> None:
        """Kill all processes, and wait for the threads."""
        self._is_stopping.set()
        for job in self.jobs.values():
            for item in (job, *job.children):
                item.is_terminated = True
                for node in item.nodes:
                    node.kill()
        for thread in self._threads:
            thread.join()


def build_handler(simulator: BatchSimulator) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers requests of the REST JSON protocol, and of the JSON protocol of logs."""

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            body = json.loads(text or b"{}")
            is_log = self.headers.get("X-Amz-Target", "").endswith("GetLogEvents")
            try:
                operation = self.path.rpartition("/")[2]
                answer = (
                    simulator.read_log_events(body) if is_log else simulator.call(operation, body)
                )
                self._send(200, answer)
            except RequestError as error:
                self._send(400, {"message": str(error)}, "ClientException")

        def _send(self, status: int, answer: Document, error: str = "") -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if error:
                self.send_header("x-amzn-ErrorType", error)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            """Write no log."""

    return Handler


@contextmanager
def start_simulator(root: Path, folders: Mapping[str, Path]) -> Iterator[BatchSimulator]:
    """Run a simulator; boto3 of this process and of its children reaches it."""
    simulator = BatchSimulator(root, folders)
    server = ThreadingHTTPServer(("127.0.0.1", 0), build_handler(simulator))
    before = dict(os.environ)
    with serve(server, "batch") as address:
        os.environ |= {
            "AWS_ENDPOINT_URL_BATCH": address,
            "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": address,
            "AWS_ACCESS_KEY_ID": "simulator",
            "AWS_SECRET_ACCESS_KEY": "simulator",
        }
        try:
            yield simulator
        finally:
            os.environ.clear()
            os.environ.update(before)
            simulator.stop()
