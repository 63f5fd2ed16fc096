"""Build the job for a run file: command, nodes and machine; a pipeline has several."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from regauge import config
from regauge.jobs.server_resources import plan_resources
from regauge.jobs.settings import MAX_NAME, Launch, is_job_name
from regauge.jobs.targets import JobSpec, Launcher, Machine
from regauge.jobs.targets._server_spec import ServerSpec
from regauge.machines.catalog import (
    REGION,
    MachinePrice,
    find_efa_interfaces,
    find_instance,
    find_listed_price,
    find_vendor,
)
from regauge.serving.settings import ServeSettings
from regauge.supervision.settings import parse_node_range
from regauge.system.errors import SettingsError

SERVE = "serve"
IMAGE_FOLDER = PurePosixPath("/workspace")
"""An image's working folder, which contains the run file."""


class StageRequest(NamedTuple):
    name: str
    verb: str
    tables: config.Tables
    """The stage's tables with all overrides."""


@dataclass(frozen=True)
class LaunchRequest:
    """A run file with a verb and overrides, from the command line of `launch`."""

    run_file: Path
    verb: str
    overrides: tuple[str, ...]
    """Overrides for the job's command; [launch] overrides are applied already."""
    tables: config.Tables
    """The run file's tables with all overrides."""
    stages: tuple[StageRequest, ...] = ()


def build_job(request: LaunchRequest, launch: Launch, launcher: Launcher) -> JobSpec:
    """Return the job to launch for a run file.

    Raises SettingsError for contradictory settings.
    """
    execution = request.tables.get("execution", {})
    is_training = request.verb == "train"
    nodes = execution.get("nodes", {}) if is_training else {}
    min_nodes, max_nodes = _read_nodes(nodes)
    price = execution.get("price", {})
    accelerator = None if request.verb == "prepare" else request.tables.get("accelerator")
    if isinstance(accelerator, dict):
        accelerator = accelerator.get("kind")
    if launch.jobs > 1 and request.verb not in ("predict", SERVE):
        problem = f"launch.jobs = {launch.jobs} is for 'predict' and 'serve', not '{request.verb}'"
        raise SettingsError(problem, "remove it, or set execution.nodes.count")
    machine = find_machine(launch.instance, execution)
    server = _find_server(request.tables, machine) if request.verb == SERVE else None
    command = build_command(request, launch.jobs, is_container=launcher.is_container)
    if server and server.resources and launcher.is_container:
        command = (*command, f"serve.workers.count={server.resources.num_workers}")
    return JobSpec(
        name=resolve_name(launch.name, request.run_file),
        verb=request.verb,
        command=command,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        processes=execution.get("processes", 1) if is_training else 1,
        accelerator=None if accelerator is None else str(accelerator),
        jobs=launch.jobs,
        machine=machine,
        node_usd_per_hour=price.get("usd_per_hour"),
        node_price_date=str(price["as_of"]) if price.get("as_of") else None,
        spot=launch.spot,
        image=getattr(launcher, "image", None) or launch.image,
        environment=dict(launch.environment),
        secrets=dict(launch.secrets),
        volumes=getattr(launcher, "volumes", ()) or launch.volumes,
        shared_memory_gib=launch.shared_memory_gib,
        max_attempts=launch.max_attempts,
        hours=launch.hours,
        output=str(request.tables.get("output", {}).get("folder", "")),
        run_file_text=_read_text(request.run_file) if launcher.is_container else "",
        rendezvous=nodes.get("rendezvous") or "c10d",
        rendezvous_endpoint=nodes.get("endpoint"),
        labels=dict(launch.labels),
        server=server,
    )


def _find_server(tables: config.Tables, machine: Machine | None) -> ServerSpec:
    """Return a server's port, times and settings, and its resources without a machine type.

    Raises SettingsError for a port that changes.
    """
    table = tables.get(SERVE, {})
    settings = config.build(ServeSettings, {SERVE: table}).serve
    if settings.port == 0:
        raise SettingsError("serve.port = 0 is another port at each start", "set serve.port")
    others = {key: item for key, item in table.items() if key not in ("artifacts", "host", "port")}
    return ServerSpec(
        port=settings.port,
        start_seconds=settings.workers.start_timeout_seconds,
        drain_seconds=settings.http.drain_seconds,
        resources=None if machine else plan_resources(settings),
        artifacts=settings.artifacts,
        options=tuple(f"{key}={json.dumps(leaf)}" for key, leaf in config.flatten(others, SERVE)),
    )


def build_pipeline(request: LaunchRequest, launch: Launch, launcher: Launcher) -> JobSpec:
    """Return a pipeline's job with one job per stage, each after the previous one.

    A job runs `regauge pipeline FILE --wait --until STAGE`, which skips finished stages. Training
    uses `execution.nodes`; every other stage runs on one machine. With `--wait`, a restarted job
    waits until the lock held by the lost machine is released.

    Raises SettingsError for contradictory settings.
    """
    if launch.jobs > 1:
        problem = f"launch.jobs = {launch.jobs} is for 'predict' alone, not for a pipeline"
        raise SettingsError(problem, "remove it")
    command = build_command(request, launch.jobs, is_container=launcher.is_container)
    jobs: list[JobSpec] = []
    price = {"price": request.tables.get("execution", {}).get("price", {})}
    for stage in request.stages:
        execution = {**price, **stage.tables.get("execution", {})}
        tables = {**stage.tables, "output": request.tables["output"], "execution": execution}
        job = build_job(replace(request, verb=stage.verb, tables=tables), launch, launcher)
        jobs.append(
            replace(
                job,
                name=_name_job(job.name, stage.name, {item.name for item in jobs}),
                command=(*command, "--wait", "--until", stage.name),
                stage=stage.name,
                after=jobs[-1].name if jobs else "",
            )
        )
    largest = max(jobs, key=lambda job: job.max_nodes)
    name = resolve_name(launch.name, request.run_file)
    return replace(
        largest,
        name=name,
        verb=request.verb,
        command=command,
        stages=tuple(jobs),
        stage="",
        after="",
    )


def _name_job(pipeline: str, stage: str, names: set[str]) -> str:
    """Return a stage's job name; raises SettingsError if it is too long or taken."""
    name = f"{pipeline}-{re.sub('[^a-z0-9]+', '-', stage).strip('-')}"
    if not is_job_name(name):
        problem = f"'{name}' is too long for a job name"
        raise SettingsError(problem, f"shorten launch.name, or the name of stage '{stage}'")
    if name in names:
        problem = f"the jobs of two stages are named '{name}'"
        raise SettingsError(problem, f"give stage '{stage}' another name")
    return name


def _read_text(run_file: Path) -> str:
    """Return a run file's text; raises SettingsError if it is not UTF-8."""
    try:
        return run_file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SettingsError(f"{run_file} is not UTF-8", "convert it to UTF-8") from None


def _read_nodes(nodes: dict[str, Any]) -> tuple[int, int]:
    """Return the minimum and maximum node count in [execution.nodes].

    Raises SettingsError for a c10d rendezvous endpoint, which the target sets.
    """
    endpoint = nodes.get("endpoint")
    if endpoint and nodes.get("rendezvous") != "etcd":
        problem = f"execution.nodes.endpoint = '{endpoint}' is set, and the target sets it itself"
        raise SettingsError(problem, "remove it, or set execution.nodes.rendezvous to etcd")
    count = nodes.get("count")
    return parse_node_range(1 if count is None else count)


def resolve_name(name: str | None, run_file: Path) -> str:
    """Return the job name; a run file name is converted to an RFC 1035 label."""
    if name is not None:
        return name
    label = re.sub(r"[^a-z0-9]+", "-", run_file.stem.lower()).strip("-")[:MAX_NAME].rstrip("-")
    if not is_job_name(label):
        raise SettingsError(f"'{run_file.stem}' cannot be a job name", "set launch.name")
    return label


def build_command(request: LaunchRequest, jobs: int, *, is_container: bool) -> tuple[str, ...]:
    """Return the command line of one node.

    In an image the run file is in the working folder. Elsewhere the nodes share this file system.
    """
    program: tuple[str, ...] = ("regauge",)
    if is_container:
        run_file = str(IMAGE_FOLDER / request.run_file.name)
    else:
        program, run_file = (sys.executable, "-m", "regauge"), str(request.run_file.resolve())
    serve, monitoring = (request.tables.get(name, {}) for name in (SERVE, "monitoring"))
    added: list[str] = []
    if is_container and request.verb == SERVE and "host" not in serve:
        added.append("serve.host=0.0.0.0")
    if is_container and monitoring.get("port") is not None and "host" not in monitoring:
        added.append("monitoring.host=0.0.0.0")  # Prometheus is outside the container
    if jobs > 1 and request.verb != SERVE:
        added.append(f"predict.job_count={jobs}")
    return (*program, request.verb, run_file, *request.overrides, *added)


def find_machine(instance: str | None, execution: dict[str, Any]) -> Machine | None:
    """Return the machine type of the nodes; None if none is set.

    Raises SettingsError for an unknown machine type.
    """
    name = instance or execution.get("price", {}).get("instance")
    if name is None:
        return None
    entry = find_instance(name, "launch.instance" if instance else "price.instance")
    table = execution.get("price", {})
    price = find_listed_price(entry, table.get("discounts"), table.get("region", REGION))
    if table.get("usd_per_hour") is not None:
        price = MachinePrice(table["usd_per_hour"], "run file", table.get("as_of"))
    return Machine(
        name=name,
        chip=entry.chip,
        vendor=find_vendor(entry),
        chips=entry.chips or 0,
        efa_interfaces=find_efa_interfaces(name),
        vcpus=entry.vcpus,
        memory_gib=entry.memory_gib,
        usd_per_hour=price.usd_per_hour if price else None,
        price_date=str(price.as_of) if price and price.as_of else None,
        price_source=price.source if price else "",
    )
