"""The jobs of a pipeline: one per stage, each after the job of the stage before it.

A job runs `regauge pipeline FILE --wait --until STAGE`, which skips the finished stages. Training
has the nodes of `execution.nodes`; every other stage runs on one machine. With `--wait`, a job that
restarts waits until the lock of its lost machine is released.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from regauge.jobs.job_spec import build_command, build_job, resolve_name
from regauge.jobs.settings import is_job_name
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.jobs.job_spec import LaunchRequest
    from regauge.jobs.settings import Launch
    from regauge.jobs.targets import JobSpec, Launcher


def build_pipeline(request: LaunchRequest, launch: Launch, launcher: Launcher) -> JobSpec:
    """Return the job of a pipeline with the jobs of its stages.

    Raises SettingsError for settings that contradict each other.
    """
    if launch.jobs > 1:
        problem = f"launch.jobs = {launch.jobs} is for 'predict' alone, not for a pipeline"
        raise SettingsError(problem, "remove it")
    jobs: list[JobSpec] = []
    price = {"price": request.tables.get("execution", {}).get("price", {})}
    for stage in request.stages:
        execution = {**price, **stage.tables.get("execution", {})}
        common = {"output": request.tables["output"], "execution": execution}
        tables = {**stage.tables, **common}
        job = build_job(replace(request, verb=stage.verb, tables=tables), launch, launcher)
        command = build_command(request, launch.jobs, is_container=launcher.is_container)
        jobs.append(
            replace(
                job,
                name=_name_job(job.name, stage.name, {item.name for item in jobs}),
                command=(*command, "--wait", "--until", stage.name),
                stage=stage.name,
                after=jobs[-1].name if jobs else "",
            )
        )
    return replace(
        max(jobs, key=lambda job: job.max_nodes),
        name=resolve_name(launch.name, request.run_file),
        verb=request.verb,
        command=build_command(request, launch.jobs, is_container=launcher.is_container),
        stages=tuple(jobs),
        stage="",
        after="",
    )


def _name_job(pipeline: str, stage: str, names: set[str]) -> str:
    """Return the name of the job of a stage; raises SettingsError if it is too long or taken."""
    name = f"{pipeline}-{re.sub('[^a-z0-9]+', '-', stage).strip('-')}"
    if not is_job_name(name):
        problem = f"'{name}' is too long for the name of a job"
        raise SettingsError(problem, f"shorten launch.name, or the name of stage '{stage}'")
    if name in names:
        problem = f"the jobs of two stages are named '{name}'"
        raise SettingsError(problem, f"give stage '{stage}' another name")
    return name
