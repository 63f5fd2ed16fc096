"""Launchers: the schedulers that run a Regauge command, such as Slurm or Kubernetes.

One choice per file. `Launcher.plan` returns a job's exact documents and command lines. It is pure,
works offline and needs no credentials. `submit` sends the documents. The other methods take a
`Handle`, and read the state from the scheduler. No file here imports torch.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import field_validator

from regauge.config import Choice, Settings
from regauge.jobs.targets._server_spec import ServerSpec
from regauge.system.errors import SettingsError
from regauge.system.units import SECONDS_PER_HOUR

JobState = Literal[
    "pending",
    "starting",
    "running",
    "restarting",
    "preempted",
    "succeeded",
    "failed",
    "cancelled",
    "unknown",
]
FINAL_STATES: frozenset[JobState] = frozenset({"succeeded", "failed", "cancelled"})
SEPARATOR = "://"
SHARED_MEMORY_SHARE = 0.25
"""Default /dev/shm size, as a share of machine memory."""
COMMON_FIELDS = frozenset(
    (
        "min_nodes",
        "max_nodes",
        "processes",
        "machine",
        "environment",
        "secrets",
        "max_attempts",
        "hours",
        "rendezvous",
        "rendezvous_endpoint",
        "labels",
    )
)
PIPELINE_FIELDS = frozenset({"stages", "stage", "after"})
"""`JobSpec` fields about pipeline stages."""


@dataclass(frozen=True)
class Machine:
    """A machine type, as documents and checks describe it."""

    name: str
    chip: str
    """Chip name in the catalog."""
    vendor: str
    """Chip vendor; `CPU` for a machine without accelerators."""
    chips: int
    """Accelerator count; 0 for a CPU machine."""
    efa_interfaces: int
    """Number of EFA network interfaces (Elastic Fabric Adapter)."""
    vcpus: int | None
    memory_gib: int | None
    usd_per_hour: float | None
    """USD per machine; None if unknown."""
    price_date: str | None
    """Price date, as YYYY-MM-DD."""
    price_source: str = ""
    """Price source, such as the catalog or the run file."""


class Volume(Settings):
    """A file system mounted on every node."""

    name: str
    """Volume name."""
    mount: str
    """Absolute mount path on each node."""
    source: str
    """PersistentVolumeClaim name, FSx, EFS or EBS volume id, or host path."""
    kind: Literal["claim", "fsx", "efs", "ebs", "host"] = "claim"
    """File system kind."""
    read_only: bool = False
    """Whether it is mounted read-only."""

    @field_validator("mount")
    @classmethod
    def _check_mount(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError(f"{value!r} is not an absolute path; begin it with /")
        return value


@dataclass(frozen=True)
class JobSpec:
    """A Regauge command and the resources it needs, the same for every launcher."""

    name: str
    """Job name: at most 63 lowercase letters, digits and hyphens (RFC 1035 label)."""
    verb: str
    command: tuple[str, ...]
    """A node's command line, starting with `regauge`."""
    min_nodes: int
    max_nodes: int
    processes: int | Literal["auto"]
    """Processes per node."""
    accelerator: str | None = None
    """Accelerator kind; None lets each node choose."""
    jobs: int = 1
    """Independent array jobs that share the `predict` work, or server replicas."""
    machine: Machine | None = None
    node_usd_per_hour: float | None = None
    """USD per node, for nodes without a machine type; None if unknown."""
    node_price_date: str | None = None
    """Price date, as YYYY-MM-DD."""
    spot: bool = False
    """Whether nodes may be interrupted in exchange for a lower price."""
    image: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Environment variable -> secret reference. Secrets are never read."""
    volumes: tuple[Volume, ...] = ()
    shared_memory_gib: float | None = None
    """Size of /dev/shm; None for the launcher's default."""
    max_attempts: int = 3
    """Maximum number of attempts; a lost machine or the exit code starts another one."""
    hours: float | None = None
    output: str = ""
    run_file_text: str = ""
    """Run file text, which containers get at `run_file`; empty without containers."""
    rendezvous: Literal["c10d", "etcd"] = "c10d"
    rendezvous_endpoint: str | None = None
    """Host and port of an etcd server; None if a node serves the rendezvous."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels or tags for the documents."""
    server: ServerSpec | None = None
    """The server that `serve` starts."""
    stages: tuple[JobSpec, ...] = ()
    """Pipeline jobs in order, one per stage. The other fields then describe the stage with the most
    nodes."""
    stage: str = ""
    """Pipeline stage to run; empty outside a pipeline."""
    after: str = ""
    """Name of the job that must succeed first; empty if none."""

    @property
    def run_file(self) -> PurePosixPath:
        """The run file's path in a container: the command's second argument."""
        return PurePosixPath(self.command[2])

    @property
    def is_elastic(self) -> bool:
        return self.min_nodes != self.max_nodes

    @property
    def node_range(self) -> str:
        """Node count as `execution.nodes.count` and torchrun write it: `2`, or `1:4`."""
        return f"{self.min_nodes}:{self.max_nodes}" if self.is_elastic else str(self.max_nodes)

    @property
    def processes_per_node(self) -> int | None:
        """Process count; `auto` is one per accelerator, or None without accelerators."""
        if self.processes != "auto":
            return self.processes
        return self.machine.chips if self.machine and self.machine.chips else None

    @property
    def limit_seconds(self) -> int | None:
        """The time limit in whole seconds; None without a limit."""
        return None if self.hours is None else round(self.hours * SECONDS_PER_HOUR)

    @property
    def uses_efa(self) -> bool:
        """Whether the nodes communicate through EFA: there are several, and they have it."""
        return self.max_nodes > 1 and self.machine is not None and self.machine.efa_interfaces > 0

    @property
    def usd_per_hour(self) -> float | None:
        """USD per hour for all nodes and jobs; None if unknown."""
        price = self.machine.usd_per_hour if self.machine else self.node_usd_per_hour
        return None if price is None else price * self.max_nodes * self.jobs

    @property
    def price_date(self) -> str | None:
        """Price date, as YYYY-MM-DD; None if unknown."""
        return self.machine.price_date if self.machine else self.node_price_date


def is_local_folder(address: str) -> bool:
    """Return whether an output folder is a path; not so if empty or in an object store."""
    return bool(address) and SEPARATOR not in address


class Document(NamedTuple):
    """A file or request sent to a scheduler."""

    name: str
    """File name, such as `job.yaml`; the suffix gives the format."""
    content: Any
    """Script text, or a JSON-ready value."""

    @property
    def text(self) -> str:
        """The content as text: YAML documents, JSON, or the script itself."""
        if isinstance(self.content, str):
            return self.content
        if self.name.endswith((".yaml", ".yml")):
            return _format_yaml(self.content if isinstance(self.content, list) else [self.content])
        return json.dumps(self.content, indent=2) + "\n"


def _format_yaml(documents: list[Any]) -> str:
    """Return YAML documents without aliases; multi-line texts are literal blocks."""
    import yaml

    class BlockDumper(yaml.SafeDumper):
        def ignore_aliases(self, _: Any) -> bool:
            return True

    def represent_text(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    BlockDumper.add_representer(str, represent_text)
    return str(yaml.dump_all(documents, Dumper=BlockDumper, sort_keys=False, width=100))


@dataclass(frozen=True)
class LaunchPlan:
    """A job's documents and command lines, with the reasons for the launcher's decisions."""

    job: JobSpec
    documents: tuple[Document, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    restart_policy: str = ""
    """Reaction to a lost node and to exit codes, as one sentence."""
    used: frozenset[str] = frozenset()
    """`JobSpec` fields contained in the documents or applied by the launcher itself."""
    stages: tuple[LaunchPlan, ...] = ()
    """Plans for the pipeline stages, whose documents this plan contains."""


class LeaderAddress(NamedTuple):
    """The node that serves an attempt's rendezvous."""

    host: str
    port: int
    run_id: str
    """The attempt's rendezvous name; it differs between attempts."""


@dataclass(frozen=True)
class NodeCommand:
    """The process that a scheduler starts on a node, or for an array job."""

    index: int
    """Node or job number; node 0 is the leader."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables from the documents and from the scheduler. No secrets."""


class Handle(NamedTuple):
    """The address of a submitted job.

    >>> Handle.parse("slurm://cluster/7").job_id
    '7'
    """

    target: str
    context: str
    """Cluster, region, Kubernetes context or host."""
    job_id: str
    """Job identifier; it may contain slashes."""

    def __str__(self) -> str:
        return f"{self.target}{SEPARATOR}{self.context}/{self.job_id}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Parse `target://context/id`; raises SettingsError for other texts."""
        target, separator, rest = text.partition(SEPARATOR)
        context, slash, job_id = rest.partition("/")
        if not (target and separator and slash and job_id):
            problem = f"'{text}' is not a job handle"
            raise SettingsError(
                problem, "use the handle that `launch` printed: target://context/id"
            )
        return cls(target.replace("_", "-"), context, job_id)


@dataclass(frozen=True)
class NodeStatus:
    """A node, or an array job."""

    index: int
    """Node or array index, from 0."""
    state: JobState
    host: str = ""
    """Host name by the scheduler; empty if unknown."""
    exit_code: int | None = None
    reason: str = ""
    shell_command: str = ""
    """Command that opens a shell on the node, or in its container; empty if there is none."""


@dataclass(frozen=True)
class JobFailure:
    """A job failure, as the scheduler or the run recorded it."""

    kind: str
    """Failure kind, as in `failures/*.json` of a run; `unknown` if none is recorded."""
    rank: int | None = None
    node: int | None = None
    message: str = ""


@dataclass(frozen=True)
class Progress:
    """Run progress, from the output folder if this machine can read it."""

    step: int
    """Last logged step."""
    total_steps: int | None = None
    eta_seconds: float | None = None
    """Estimated time until the last step; None if unknown."""


@dataclass(frozen=True)
class StageState:
    """A pipeline stage's job."""

    name: str
    state: JobState
    handle: str
    """Job handle, for the log; empty before the scheduler has created the job."""
    exit_code: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class JobStatus:
    """A job's state, as reported by the scheduler."""

    handle: Handle
    state: JobState
    reason: str = ""
    """The scheduler's reason, such as the resource a pending job waits for."""
    attempt: int | None = None
    nodes: tuple[NodeStatus, ...] = ()
    exit_code: int | None = None
    failure: JobFailure | None = None
    progress: Progress | None = None
    usd_per_hour: float | None = None
    """USD per hour for all nodes at submission."""
    price_date: str | None = None
    output: str = ""
    """Output folder, for the progress; empty if the scheduler does not know it."""
    submitted_at: str | None = None
    """Submission time, as ISO 8601 in UTC."""
    started_at: str | None = None
    """First node start, as ISO 8601 in UTC."""
    finished_at: str | None = None
    """End time, as ISO 8601 in UTC."""
    stages: tuple[StageState, ...] = ()
    """Pipeline stages in order; the other fields describe the current stage."""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def shell_command(self) -> str:
        """Command that opens a shell on the first running node; empty without one."""
        commands = (node.shell_command for node in self.nodes if node.state == "running")
        return next(filter(None, commands), "")


class JobEvent(NamedTuple):
    """A job event."""

    time: str
    """Time as ISO 8601 in UTC."""
    source: str
    """Reporting component, such as `slurm` or `node 1`."""
    message: str


class LogRequest(NamedTuple):
    """Selects a log; by default the leader's log in the last attempt."""

    rank: int | None = None
    """Rank whose node is selected, or array index; None for the leader."""
    attempt: int | None = None
    """Attempt number, from 1; None for the last one."""
    follow: bool = False
    """Whether to wait for new lines until the job ends."""


class Leftover(NamedTuple):
    """A resource that still exists after `cleanup`, or still costs money."""

    name: str
    reason: str
    remedy: str
    """Command that removes the resource."""


class Launcher(Choice):
    """A scheduler that runs jobs."""

    is_container: ClassVar[bool] = False
    """Whether nodes run a container image; paths are then paths in the container."""
    supports_elastic: ClassVar[bool] = False
    """Whether nodes may join and leave during a job."""
    supports_arrays: ClassVar[bool] = False
    """Whether independent array jobs can share the `predict` work."""
    supports_servers: ClassVar[bool] = False
    """Whether it can run a server, which never ends."""
    supports_stages: ClassVar[bool] = False
    """Whether pipeline stages are jobs that wait for each other."""

    @abstractmethod
    def plan(self, job: JobSpec) -> LaunchPlan:
        """Return a job's documents and command lines.

        Deterministic, offline and without credentials. Raises SettingsError if the launcher cannot
        run the job.
        """

    def list_node_commands(self, plan: LaunchPlan, leader: LeaderAddress) -> list[NodeCommand]:
        """Return the processes that the scheduler starts for a plan's documents.

        They are read from the documents, so a rehearsal runs exactly the submitted job. `leader`
        replaces the address assigned by the scheduler. Raises SettingsError if the launcher does
        not support rehearsals.
        """
        del leader
        problem = f"target '{self.kind}' does not support rehearsals"
        raise SettingsError(problem, f"rehearse the job of {plan.job.name} with --on local")

    @abstractmethod
    def submit(self, plan: LaunchPlan) -> Handle:
        """Submit a plan and return the job's handle.

        If a step fails, the objects of earlier steps are deleted. Raises PreflightError without the
        scheduler's client, SettingsError if the scheduler rejects the job, and TransientError if it
        is unreachable.
        """

    @abstractmethod
    def find_status(self, handle: Handle) -> JobStatus:
        """Return a job's state; raises SettingsError if the scheduler does not know it."""

    @abstractmethod
    def list_events(self, handle: Handle) -> list[JobEvent]:
        """Return a job's events, oldest first."""

    @abstractmethod
    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        """Yield a log's lines without line ends; raises SettingsError without a log."""

    @abstractmethod
    def cancel(self, handle: Handle) -> None:
        """Stop a job; raises SettingsError if it has already ended."""

    @abstractmethod
    def clean_up(self, handle: Handle) -> list[Leftover]:
        """Remove the objects created by `submit`; return the remaining resources.

        Raises SettingsError for a job that has not ended.
        """


class ContainerLauncher(Launcher):
    """A scheduler whose nodes run a container image."""

    is_container: ClassVar[bool] = True

    image: str | None = None
    """Container image with tag or digest; by default `launch.image`."""
    volumes: tuple[Volume, ...] = ()
    """File systems mounted on every node; by default `launch.volumes`."""
