"""Plan a job from a run file, verb and target, with checks before anything is submitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from regauge import config
from regauge.jobs.job_spec import LaunchRequest, build_job, build_pipeline
from regauge.jobs.lints import Lint, raise_errors, run_lints
from regauge.jobs.lints_tokens import check_tokens
from regauge.jobs.settings import Launch
from regauge.jobs.targets import PIPELINE_FIELDS, JobSpec, Launcher, LaunchPlan
from regauge.system import choices
from regauge.system.errors import SettingsError

FOLDER = "launchers"
ALWAYS_USED = PIPELINE_FIELDS.union(
    (
        "name",
        "verb",
        "command",
        "output",
        "accelerator",
        "processes",
        "run_file_text",
        "node_usd_per_hour",
        "node_price_date",
        "server",
    )
)
"""Fields that no launcher can ignore, or that the run reads itself."""
KEYS = {
    "machine": "launch.instance",
    "min_nodes": "execution.nodes.count",
    "max_nodes": "execution.nodes.count",
    "rendezvous": "execution.nodes.rendezvous",
    "rendezvous_endpoint": "execution.nodes.endpoint",
}
"""JobSpec field -> setting, for settings outside the [launch] table."""


def select_launcher(launch: Launch, target: str) -> Launcher:
    """Return a target's settings, or the defaults if the run file does not have a table for it.

    Raises SettingsError for an unknown target.
    """
    kind = target.replace("_", "-")
    if kind not in choices.names(FOLDER):
        remedy = choices.did_you_mean(kind, choices.names(FOLDER))
        raise SettingsError(f"no target named '{target}'", remedy)
    tables = (table for table in launch.target if table.kind == kind)
    launcher: Launcher = next(tables, None) or config.parse_choice(FOLDER, kind)
    return launcher


def plan_job(request: LaunchRequest, launch: Launch, launcher: Launcher) -> LaunchPlan:
    """Return a job's plan.

    Its notes name the settings without effect on this target. Raises SettingsError if the launcher
    cannot run the job, or if a setting contains a secret.
    """
    build = build_pipeline if request.stages else build_job
    job = build(request, launch, launcher)
    raise_errors(check_tokens(LaunchPlan(job)))  # before another message can contain one
    if job.server is not None and not launcher.supports_servers:
        problem = f"target '{launcher.kind}' does not run servers"
        remedy = "launch with --on kubernetes, sagemaker or local; serve.workers.ray is for Ray"
        raise SettingsError(problem, remedy)
    if job.jobs > 1 and not launcher.supports_arrays:
        problem = f"target '{launcher.kind}' does not support arrays, and launch.jobs is {job.jobs}"
        raise SettingsError(problem, "remove launch.jobs")
    if job.stages and not launcher.supports_stages:
        problem = f"target '{launcher.kind}' does not support jobs that wait for each other"
        remedy = "launch the pipeline with --on aws_batch, kubernetes or slurm"
        raise SettingsError(problem, remedy)
    if job.is_elastic and not launcher.supports_elastic:
        problem = f"target '{launcher.kind}' cannot change the number of nodes of a job"
        remedy = f"set execution.nodes.count to {job.max_nodes}, or launch with --on kubernetes"
        raise SettingsError(problem, remedy)
    plan = launcher.plan(job)
    notes = [note for part in plan.stages or (plan,) for note in _list_unused(part)]
    return replace(plan, notes=(*plan.notes, *dict.fromkeys(notes)))


def _list_unused(plan: LaunchPlan) -> Iterator[str]:
    """Yield a note for each job setting missing from all documents.

    One [launch] table describes a job for several targets.
    """
    defaults = JobSpec("", "", (), 1, 1, "auto")
    for field in fields(JobSpec):
        is_set = getattr(plan.job, field.name) != getattr(defaults, field.name)
        if is_set and field.name not in plan.used | ALWAYS_USED:
            yield f"{KEYS.get(field.name, f'launch.{field.name}')} has no effect on this target."


def check_lints(plan: LaunchPlan) -> list[Lint]:
    """Return a plan's warnings; raises SettingsError for the first error."""
    lints = [lint for part in plan.stages or (plan,) for lint in run_lints(part)]
    lints = list(dict.fromkeys(lints))
    raise_errors(lints)
    return lints


def describe_plan(plan: LaunchPlan) -> dict[str, Any]:
    """Return a plan with the price as JSON-ready values.

    The run file text appears in the documents that need it. Stage fields are left out of a job
    without stages.
    """
    job = asdict(plan.job)
    for spec in (job, *job["stages"]):
        unset = {name for name in (*PIPELINE_FIELDS, "server") if not spec[name]}
        for name in {"run_file_text", *unset}:
            del spec[name]
        spec["volumes"] = [volume.model_dump() for volume in spec["volumes"]]
    return {
        "job": job,
        "documents": [{"name": item.name, "content": item.content} for item in plan.documents],
        "commands": [list(command) for command in plan.commands],
        "notes": list(plan.notes),
        "restart_policy": plan.restart_policy,
        "price": describe_price(plan.job),
    }


def describe_price(job: JobSpec) -> str:
    """Return the hourly price for all nodes, with the price date, as text."""
    machine = job.machine
    if job.usd_per_hour is None:
        return "unknown"
    source = machine.price_source.removeprefix("catalog, ") if machine else "run file"
    date = f", {job.price_date}" if job.price_date else ""
    name = machine.name if machine else "node"
    count = job.max_nodes * job.jobs
    return f"{job.usd_per_hour:.2f} USD per hour ({count} x {name}, {source}{date})"
