"""Launchers: the schedulers that run a command of Regauge, such as Slurm or Kubernetes.

One choice per file. `Launcher.plan` returns the exact documents and command lines of a job. It is
pure, works offline and needs no credentials. `submit` sends the documents. The other methods take a
`Handle`, and read the state from the scheduler. No file here imports torch.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from regauge.config import Choice
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
"""States that a job does not leave."""
SEPARATOR = "://"
SHARED_MEMORY_SHARE = 0.25
"""Default size of /dev/shm, as a share of the memory of the machine."""
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
"""Fields of `JobSpec` that every launcher uses."""
PIPELINE_FIELDS = frozenset({"stages", "stage", "after"})
"""Fields of `JobSpec` about the stages of a pipeline."""


@dataclass(frozen=True)
class Machine:
    """The properties of a machine type that documents and checks need."""

    name: str
    chip: str
    """Name of the chip in the catalog."""
    vendor: str
    """Vendor of the chip; `CPU` for a machine without accelerators."""
    chips: int
    """Number of accelerators; 0 for a CPU machine."""
    efa_interfaces: int
    """Number of EFA network interfaces (Elastic Fabric Adapter); 0 if it has none."""
    vcpus: int | None
    memory_gib: int | None
    usd_per_hour: float | None
    """Price of one machine in USD; None if it is unknown."""
    price_date: str | None
    """Date of the price, as YYYY-MM-DD."""
    price_source: str = ""
    """Source of the price, such as the catalog or the run file."""


@dataclass(frozen=True)
class Volume:
    """A file system that every node of a job mounts."""

    name: str
    mount: str
    """Absolute path in the container."""
    source: str
    """Identifier of the file system: a claim, a file system id, or a path of the host."""
    kind: Literal["claim", "fsx", "efs", "ebs", "host"]
    read_only: bool = False


@dataclass(frozen=True)
class JobSpec:
    """A command of Regauge and its resources, the same for every launcher."""

    name: str
    """Name of the job: at most 63 lowercase letters, digits and hyphens (RFC 1035 label)."""
    verb: str
    command: tuple[str, ...]
    """Command line of one node, from `regauge` on."""
    min_nodes: int
    max_nodes: int
    processes: int | Literal["auto"]
    """Processes per node."""
    accelerator: str | None = None
    """Kind of the accelerator of the run; None if each node chooses it."""
    jobs: int = 1
    """Independent jobs of an array, which share the work of `predict`."""
    machine: Machine | None = None
    spot: bool = False
    """Whether nodes may be interrupted in exchange for a lower price."""
    image: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """References to secrets by environment variable. The values are never read."""
    volumes: tuple[Volume, ...] = ()
    shared_memory_gib: float | None = None
    """Size of /dev/shm; None for the default of the launcher."""
    max_attempts: int = 3
    """Attempts of the job if its machine is lost or its exit code allows another one."""
    hours: float | None = None
    """Job time limit in hours."""
    output: str = ""
    """Output folder of the run."""
    run_file_text: str = ""
    """Text of the run file, for launchers that copy it into a container."""
    rendezvous: Literal["c10d", "etcd"] = "c10d"
    rendezvous_endpoint: str | None = None
    """Host and port of an etcd server; None if a node serves the rendezvous."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels or tags of the documents."""
    stages: tuple[JobSpec, ...] = ()
    """The jobs of a pipeline in their order, one per stage. The other fields are then those of the
    stage with the most nodes."""
    stage: str = ""
    """Name of the stage that the job runs; empty if it is no stage of a pipeline."""
    after: str = ""
    """Name of the job that must succeed before this one starts; empty if there is none."""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.min_nodes != self.max_nodes

    @property
    def node_range(self) -> str:
        """The number of nodes as `execution.nodes.count` and torchrun write it: `2`, or `1:4`."""
        return f"{self.min_nodes}:{self.max_nodes}" if self.is_elastic else str(self.max_nodes)

    @property
    def processes_per_node(self) -> int | None:
        """The number of processes; `auto` is one per accelerator, or None without accelerators."""
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
        """Price of all nodes and jobs per hour; None if it is unknown."""
        price = self.machine.usd_per_hour if self.machine else None
        return None if price is None else price * self.max_nodes * self.jobs


def is_local_folder(address: str) -> bool:
    """Return whether an output folder is a path; not so if empty or in an object store."""
    return bool(address) and SEPARATOR not in address


class Document(NamedTuple):
    """A file or request that a launcher sends to its scheduler."""

    name: str
    """File name, such as `job.yaml`; its suffix is the format."""
    content: Any
    """Text of a script, or a JSON-ready value."""

    @property
    def text(self) -> str:
        """The content as text: YAML documents, JSON, or the script itself."""
        if isinstance(self.content, str):
            return self.content
        if self.name.endswith((".yaml", ".yml")):
            return _format_yaml(self.content if isinstance(self.content, list) else [self.content])
        return json.dumps(self.content, indent=2) + "\n"


def _format_yaml(documents: list[Any]) -> str:
    """Return YAML documents without aliases; texts of several lines are literal blocks."""
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
    """The documents and command lines of a job, with the reasons for the launcher's decisions."""

    job: JobSpec
    documents: tuple[Document, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    """Command lines that submit the documents."""
    notes: tuple[str, ...] = ()
    """Decisions with their reasons, one sentence each."""
    restart_policy: str = ""
    """Reaction to the loss of a node and to exit codes, as one sentence."""
    used: frozenset[str] = frozenset()
    """Fields of `JobSpec` that the documents contain or that the launcher applies itself."""
    stages: tuple[LaunchPlan, ...] = ()
    """The plans of the stages of a pipeline, whose documents this plan contains."""


class LeaderAddress(NamedTuple):
    """The address of the node that serves the rendezvous of an attempt."""

    host: str
    port: int
    run_id: str
    """Name of the attempt at the rendezvous; it differs between attempts."""


@dataclass(frozen=True)
class NodeCommand:
    """The process that a scheduler starts on a node, or for a job of an array."""

    index: int
    """Number of the node or of the job; node 0 is the leader."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables of the documents, and the variables that the scheduler sets. No secrets."""


class Handle(NamedTuple):
    """The address of a submitted job, written as `target://context/id`."""

    target: str
    context: str
    """Cluster, region, Kubernetes context or host."""
    job_id: str
    """Identifier of the job; it may contain slashes."""

    def __str__(self) -> str:
        return f"{self.target}{SEPARATOR}{self.context}/{self.job_id}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Return the handle of `target://context/id`; raises SettingsError for other texts."""
        target, separator, rest = text.partition(SEPARATOR)
        context, slash, job_id = rest.partition("/")
        if not (target and separator and slash and job_id):
            problem = f"'{text}' is not a handle of a job"
            raise SettingsError(
                problem, "use the handle that `launch` printed: target://context/id"
            )
        return cls(target.replace("_", "-"), context, job_id)


@dataclass(frozen=True)
class NodeStatus:
    """One node of a job, or one job of an array."""

    index: int
    """Number of the node, or of the job in its array, from 0."""
    state: JobState
    host: str = ""
    """Host that runs it, as the scheduler names it; empty if it is unknown."""
    exit_code: int | None = None
    reason: str = ""
    """Reason of the scheduler for the state."""


@dataclass(frozen=True)
class JobFailure:
    """The failure of a job, as the scheduler or the run recorded it."""

    kind: str
    """Kind of the failure, as in `failures/*.json` of a run; `unknown` if none is recorded."""
    rank: int | None = None
    node: int | None = None
    message: str = ""


@dataclass(frozen=True)
class Progress:
    """Progress of a run, read from its output folder if this machine can read it."""

    step: int
    """Last step that the run logged."""
    total_steps: int | None = None
    eta_seconds: float | None = None
    """Estimated time until the last step; None if it is unknown."""


@dataclass(frozen=True)
class StageState:
    """The job of one stage of a pipeline."""

    name: str
    state: JobState
    handle: str
    """Handle of the job, for its log; empty before the scheduler has created the job."""
    exit_code: int | None = None
    reason: str = ""
    """Reason of the scheduler for the state."""


@dataclass(frozen=True)
class JobStatus:
    """The state of a job, as its scheduler reports it."""

    handle: Handle
    state: JobState
    reason: str = ""
    """Reason of the scheduler, such as the resource that a pending job waits for."""
    attempt: int | None = None
    nodes: tuple[NodeStatus, ...] = ()
    exit_code: int | None = None
    failure: JobFailure | None = None
    progress: Progress | None = None
    usd_per_hour: float | None = None
    """Price of all nodes per hour in USD, when the job was submitted."""
    price_date: str | None = None
    output: str = ""
    """Output folder of the run, for its progress; empty if the scheduler does not know it."""
    submitted_at: str | None = None
    """Time of the submission, as ISO 8601 in UTC."""
    started_at: str | None = None
    """Time of the first start of a node, as ISO 8601 in UTC."""
    finished_at: str | None = None
    """Time of the end of the job, as ISO 8601 in UTC."""
    stages: tuple[StageState, ...] = ()
    """The stages of a pipeline in their order; the other fields are those of the current stage."""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL_STATES


class JobEvent(NamedTuple):
    """An event of a job."""

    time: str
    """Time as ISO 8601 in UTC."""
    source: str
    """Component that reported the event, such as `slurm` or `node 1`."""
    message: str


class LogRequest(NamedTuple):
    """The selection of a log; by default the log of the leader in its last attempt."""

    rank: int | None = None
    """Rank whose node is selected, or index of a job in an array; None for the leader."""
    attempt: int | None = None
    """Number of the attempt, from 1; None for the last one."""
    follow: bool = False
    """Whether to wait for new lines until the job ends."""


class Leftover(NamedTuple):
    """A resource that still exists after `cleanup`, or that costs money."""

    name: str
    reason: str
    remedy: str
    """Command that removes it."""


class Launcher(Choice):
    """A scheduler that runs jobs."""

    is_container: ClassVar[bool] = False
    """Whether nodes run a container image; paths are then paths in the container."""
    supports_elastic: ClassVar[bool] = False
    """Whether the number of nodes may change during a job."""
    supports_arrays: ClassVar[bool] = False
    """Whether independent jobs of an array share the work of `predict`."""
    supports_stages: ClassVar[bool] = False
    """Whether the stages of a pipeline are jobs that wait for each other."""

    @abstractmethod
    def plan(self, job: JobSpec) -> LaunchPlan:
        """Return the documents and command lines of a job.

        Deterministic, offline and without credentials. Raises SettingsError if the launcher cannot
        run the job, or if a setting of the job would have no effect.
        """

    def list_node_commands(self, plan: LaunchPlan, leader: LeaderAddress) -> list[NodeCommand]:
        """Return the processes that the scheduler starts for the documents of a plan.

        They are read from the documents, so that a rehearsal runs the job that is submitted.
        `leader` replaces the address that the scheduler assigns. Raises SettingsError if the
        launcher has no rehearsal.
        """
        del leader
        problem = f"target '{self.kind}' has no rehearsal"
        raise SettingsError(problem, f"rehearse the job of {plan.job.name} with --on local")

    @abstractmethod
    def submit(self, plan: LaunchPlan) -> Handle:
        """Submit a plan and return the handle of the job.

        If a step fails, the objects of earlier steps are deleted. Raises PreflightError without the
        scheduler's client, SettingsError if the scheduler rejects the job, and TransientError if it
        is unreachable.
        """

    @abstractmethod
    def find_status(self, handle: Handle) -> JobStatus:
        """Return the state of a job; raises SettingsError if the scheduler does not know it."""

    @abstractmethod
    def list_events(self, handle: Handle) -> list[JobEvent]:
        """Return the events of a job, oldest first."""

    @abstractmethod
    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        """Yield the lines of a log without line ends; raises SettingsError if there is none."""

    @abstractmethod
    def cancel(self, handle: Handle) -> None:
        """Stop a job; raises SettingsError if it has ended already."""

    @abstractmethod
    def clean_up(self, handle: Handle) -> list[Leftover]:
        """Remove the objects that `submit` created; return the resources that remain.

        Raises SettingsError for a job that has not ended.
        """
