"""Writes the job script that `sbatch` receives, and reads the commands of its nodes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from regauge.jobs.targets import JobSpec, is_local_folder
from regauge.jobs.targets._secret_files import parse_secret_path
from regauge.jobs.targets._slurm_jobs import COMMENT_PREFIX, build_comment
from regauge.jobs.targets._slurm_target import SlurmTarget
from regauge.system.errors import RESTART_CODES
from regauge.system.units import SECONDS_PER_MINUTE

FUNCTIONS = Path(__file__).with_name("slurm_job.sh")
ARRAY_ID = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
NODE_COMMAND = "node_command"
"""Variable of the script with the command line of a node."""
BEGIN, RUN = "begin_attempt", "run_attempts"
"""Functions that the script calls before and after the setup of the user."""
_PLAIN = re.compile(r"[^\s'\"\\#]+")
"""Values of `#SBATCH` options that need no quotes."""


def render_script(job: JobSpec, target: SlurmTarget) -> str:
    """Return the job script of a job."""
    extra = (
        (name, None if value is True else str(value)) for name, value in target.options.items()
    )
    options = [*list_options(job, target), *sorted(extra)]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {_format_option(name, value)}" for name, value in options),
            "",
            "# A trap calls some functions, and values in single quotes are constants.",
            "# shellcheck disable=SC2016,SC2329",
            "set -eo pipefail",
            "export SLURM_EXPORT_ENV=ALL",
            f"logs={shlex.quote(find_log_folder(job, target))}",
            f"comment={shlex.quote(render_comment(job, target))}",
            f"max_attempts={job.max_attempts if target.requeue == 'auto' else 1}",
            f"restart_codes='{' '.join(map(str, RESTART_CODES))}'",
            f"is_elastic={int(job.is_elastic)}",
            f"is_stage={int(bool(job.stage))}",
            f"slurm_id={ARRAY_ID if job.jobs > 1 else '$SLURM_JOB_ID'}",
            "job=${1:-$slurm_id}",
            "num_signals=0 end='' successor=''",
            *_list_command(job),
            "",
            FUNCTIONS.read_text(encoding="utf-8").partition("\n\n")[2].rstrip("\n"),
            "",
            BEGIN,
            *(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()),
            *target.setup,
            *_list_secrets(job),
            f"{RUN} " + " ".join(list_step_options(job, target)),
            "",
        ]
    )


def find_log_folder(job: JobSpec, target: SlurmTarget) -> str:
    """Return the folder of the logs: next to the output folder, or named like the job."""
    if target.logs is not None:
        return target.logs
    stem = job.output.rstrip("/") if is_local_folder(job.output) else job.name
    return f"{stem}.slurm"


def render_comment(job: JobSpec, target: SlurmTarget) -> str:
    """Return the comment of a job, from which `status` reads its price, folders and processes."""
    machine = job.machine
    facts = {
        "usd_per_hour": "" if job.usd_per_hour is None else f"{job.usd_per_hour:.6g}",
        "price_date": (machine.price_date if machine else None) or "",
        "processes": str(job.processes),
        "attempts": str(job.max_attempts),
        "output": job.output,
        "logs": find_log_folder(job, target),
        "stage": job.stage,
        **{f"label.{name}": value for name, value in job.labels.items()},
    }
    return build_comment({name: value for name, value in facts.items() if value})


def list_stage_options(previous: str) -> tuple[str, ...]:
    """Return the options of a stage that starts after the success of another job.

    If that job fails, Slurm cancels the stage.
    """
    return (f"--dependency=afterok:{previous}", "--kill-on-invalid-dep=yes")


def list_submit_options(comment: str, earlier: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options of a stage, with the stages before it in its comment.

    `earlier` has the ids of their jobs by name, at least one.
    """
    chain = build_comment({"after": ",".join(f"{name}:{job}" for name, job in earlier.items())})
    option = f"--comment={comment}&{chain.removeprefix(COMMENT_PREFIX)}"
    return (*list_stage_options([*earlier.values()][-1]), option)


def list_options(job: JobSpec, target: SlurmTarget) -> Iterator[tuple[str, str | None]]:
    """Yield the options of `sbatch` with their values; None for an option without a value."""
    yield "job-name", job.name
    yield "comment", render_comment(job, target)
    yield from _list_resources(job, target)
    yield from _list_limits(job, target)
    for option in ("partition", "account", "qos", "constraint", "reservation"):
        if (value := getattr(target, option)) is not None:
            yield option, value
    name = "%A_%a" if job.jobs > 1 else "%j"
    yield "export", "NONE"
    yield "open-mode", "append"
    yield "output", f"{find_log_folder(job, target)}/{name}.log"


def _list_resources(job: JobSpec, target: SlurmTarget) -> Iterator[tuple[str, str | None]]:
    """Yield the options about nodes."""
    if job.is_elastic:  # with --ntasks-per-node, Slurm would wait for the maximum number
        yield "nodes", f"{job.min_nodes}-{job.max_nodes}"
        yield "no-kill", None
    else:
        yield "nodes", str(job.max_nodes)
        yield "ntasks-per-node", "1"
    if target.cpus is None:
        yield "exclusive", None
        yield "mem", "0"
    else:
        yield "cpus-per-task", str(target.cpus)
    gres = target.gres
    if gres is None and job.machine and job.machine.chips:
        gres = f"gpu:{job.machine.chips}"  # devices of every vendor (gres.conf, AutoDetect)
    if gres:
        yield "gres", gres


def _list_limits(job: JobSpec, target: SlurmTarget) -> Iterator[tuple[str, str | None]]:
    """Yield the options about the array, the time limit and restarts."""
    if job.jobs > 1:
        yield "array", f"0-{job.jobs - 1}"
    if job.limit_seconds is not None:
        minutes, seconds = divmod(max(1, job.limit_seconds), SECONDS_PER_MINUTE)
        yield "time", f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    if target.grace_seconds:  # to the script, which passes it to the nodes and asks for a requeue
        yield "signal", f"B:TERM@{target.grace_seconds}"
    yield ("requeue" if target.requeue == "auto" else "no-requeue"), None


def list_step_options(job: JobSpec, target: SlurmTarget) -> Iterator[str]:
    """Yield the options of `srun`, which starts the command once per node."""
    yield "--ntasks-per-node=1"
    yield f"--kill-on-bad-exit={int(not job.is_elastic)}"
    if job.is_elastic:
        yield "--no-kill"
    yield "--wait=0"
    yield "--cpu-bind=none"
    if target.cpus is not None:
        yield f"--cpus-per-task={target.cpus}"
    yield "--open-mode=append"


def _format_option(name: str, value: str | int | None) -> str:
    """Return an option as `sbatch` reads it; None or true is an option without a value."""
    if value is None or value is True:
        return f"--{name}"
    value = str(value)
    if not _PLAIN.fullmatch(value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"--{name}={value}"


def _list_command(job: JobSpec) -> list[str]:
    """Return the assignment of the command line of a node; a job of an array has its index."""
    words = [shlex.quote(word) for word in job.command]
    if job.jobs > 1:
        words.append('"predict.job_index=$SLURM_ARRAY_TASK_ID"')
    return [f"{NODE_COMMAND}=(", *(f"  {word}" for word in words), ")"]


def _list_secrets(job: JobSpec) -> Iterator[str]:
    """Yield the lines that read secrets on the first node; `srun` passes them to the others."""
    for name, reference in job.secrets.items():
        yield f"read_secret {name} {shlex.quote(parse_secret_path(reference))}"


def read_command(script: str) -> tuple[str, ...]:
    """Return the command line of a node in a job script."""
    text = script.partition(f"\n{NODE_COMMAND}=(\n")[2].partition("\n)\n")[0]
    return tuple(shlex.split(text))


def read_environment(script: str) -> dict[str, str]:
    """Return the variables that a job script exports with constant values."""
    lines = script.partition(f"\n{BEGIN}\n")[2].partition(f"\n{RUN} ")[0]
    words = [
        word
        for line in lines.splitlines()
        if line.startswith("export ")
        for word in shlex.split(line)[1:]
    ]
    return dict(word.split("=", 1) for word in words)
