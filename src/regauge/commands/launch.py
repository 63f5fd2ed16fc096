"""Run a verb on a scheduler: Slurm, AWS Batch, Kubernetes, Ray, or simulated nodes here.

For example:

    $ regauge launch run.toml train --on slurm
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import commands, config
from regauge.jobs.job_spec import SERVE, LaunchRequest, StageRequest
from regauge.jobs.launched_jobs import record_job
from regauge.jobs.planning import check_lints, describe_plan, plan_job, select_launcher
from regauge.jobs.settings import LaunchSettings
from regauge.jobs.targets import LaunchPlan
from regauge.planner.run_plans.job_forecast import forecast_job
from regauge.planner.run_plans.plan_document import format_answer
from regauge.system import choices, log
from regauge.system.errors import SettingsError

ROOT = LaunchSettings
VERBS = ("compile", "evaluate", "export", "pipeline", "predict", "prepare", "serve", "train")
"""Verbs that can run as a job; each pipeline stage is a job, and a server never ends."""
PIPELINE = "pipeline"
PREFIX = "launch."
"""Overrides with this prefix change the job, not the launched verb."""


def main(
    run_file: commands.RunFile,
    verb: Annotated[str, Parameter(help="Verb to run, such as train or predict.")],
    *overrides: commands.Override,
    on: Annotated[
        str,
        Parameter(help="Target: local, slurm, aws_batch, kubernetes, ray, skypilot or sagemaker."),
    ] = "local",
    dry_run: commands.DryRun = False,
    rehearse: Annotated[
        bool, Parameter(help="Run the job here with small shapes, and lose a node.")
    ] = False,
    json: commands.OutputFormat = commands.TEXT,
) -> dict[str, Any]:
    """Submit a run file's verb as a job, and print its handle for `regauge job`.

    With --dry-run, print the exact documents and commands instead, without network or credentials.

    For example:

        >>> regauge.launch("run.toml", "train", on="slurm")
    """
    if dry_run and rehearse:
        problem = "--dry-run runs nothing, and --rehearse runs the job"
        raise SettingsError(problem, "use one of them")
    if rehearse and verb == SERVE:
        problem = "--rehearse runs a job to its end, and a server has none"
        raise SettingsError(problem, "launch it with --on local")
    request, settings = read_request(run_file, verb, overrides)
    launcher = select_launcher(settings.launch, on)
    plan = plan_job(request, settings.launch, launcher)
    warnings = [f"{lint.problem}; {lint.remedy}" for lint in check_lints(plan)]
    if rehearse:
        from regauge.jobs.rehearsal import rehearse_job

        report = rehearse_job(request, settings.launch, launcher)
        return commands.show(asdict(report), as_json=json.is_json)
    answer = describe_plan(plan) | {"warnings": warnings}
    machine = plan.job.machine
    if verb == "train" and machine is not None:
        answer["forecast"] = forecast_job(
            request.tables, run_file, machine.name, plan.job.max_nodes
        )
    if not json.is_json:
        _print_plan(plan, answer, with_documents=dry_run)
    if not dry_run:
        handle = launcher.submit(plan)
        record_job(handle, plan.job)
        answer["handle"] = str(handle)
    if json.is_json:
        log.print_json(answer)
    elif not dry_run:
        commands.show({"handle": answer["handle"]}, as_json=False)
    return answer


def read_request(
    run_file: commands.RunFile, verb: str, overrides: tuple[str, ...]
) -> tuple[LaunchRequest, LaunchSettings]:
    """Read a run file for a verb and check the tables; raises SettingsError."""
    root = _find_root(verb)
    is_pipeline = verb == PIPELINE
    job_overrides = tuple(text for text in overrides if text.startswith(PREFIX))
    tables = config.apply_overrides(
        config.read(run_file), job_overrides if is_pipeline else overrides, LaunchSettings, root
    )
    tables = commands.allow_user_code(run_file, tables)
    known = tuple({*LaunchSettings.model_fields, *root.model_fields})
    names = known if tables.keys() <= set(known) else commands.table_names()
    settings = config.build(LaunchSettings, tables, names, str(run_file))
    verb_overrides = tuple(text for text in overrides if not text.startswith(PREFIX))
    if is_pipeline:
        return _read_pipeline(run_file, verb_overrides), settings
    fill_tables = getattr(commands.import_verb(verb), "fill_tables", dict)
    config.build(root, fill_tables(tables), names, str(run_file))
    return LaunchRequest(run_file, verb, verb_overrides, tables), settings


def _read_pipeline(run_file: Path, overrides: tuple[str, ...]) -> LaunchRequest:
    from regauge.commands._stages.pipeline_file import read_pipeline_file, resolve_without_data

    pipeline = read_pipeline_file(run_file, overrides)
    stages = tuple(
        StageRequest(
            stage.name,
            stage.verb.partition(" ")[0],
            config.dump(stage.settings, with_defaults=False),
        )
        for stage in resolve_without_data(pipeline)
    )
    tables = {**pipeline.shared, "output": {"folder": str(pipeline.folder)}}
    return LaunchRequest(run_file, PIPELINE, overrides, tables, stages)


def _find_root(verb: str) -> type[config.Settings]:
    if verb not in VERBS:
        remedy = choices.did_you_mean(verb, VERBS)
        raise SettingsError(f"'{verb}' cannot be launched", remedy)
    root: type[config.Settings] = commands.import_verb(verb).ROOT
    return root


def _print_plan(plan: LaunchPlan, answer: dict[str, Any], *, with_documents: bool) -> None:
    for document in plan.documents if with_documents else ():
        log.stdout.print(f"# {document.name}\n{document.text}", markup=False, soft_wrap=True)
    names = ("commands", "notes", "restart_policy", "price", "forecast", "warnings")
    lines = [shlex.join(command) for command in plan.commands]
    shown = {"commands": lines} | {key: answer[key] for key in names[1:] if answer.get(key)}
    commands.show(format_answer(shown), as_json=False)
