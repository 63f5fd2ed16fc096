"""Writes the job script for `sbatch`, and reads node commands back from it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from regauge.jobs.targets import JobSpec, is_local_folder
from regauge.jobs.targets._secret_files import parse_secret_path
from regauge.jobs.targets._slurm_jobs import COMMENT_PREFIX, build_comment
from regauge.jobs.targets._slurm_target import SlurmTarget
from regauge.jobs.targets._templates import build_environment
from regauge.system.errors import RESTART_CODES, SettingsError
from regauge.system.units import SECONDS_PER_MINUTE

TEMPLATE = Path(__file__).with_name("slurm_job.sh.jinja")
_PLAIN = re.compile(r"[^\s'\"\\#]+")
"""`#SBATCH` option values that do not need quotes."""


def render_script(job: JobSpec, target: SlurmTarget) -> str:
    environment = build_environment()
    environment.filters["quote"] = shlex.quote
    options = [*list_options(job, target), *sorted(target.options.items())]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        job=job,
        target=target,
        options=[_format_option(name, value) for name, value in options],
        logs=find_log_folder(job, target),
        comment=render_comment(job, target),
        restart_codes=RESTART_CODES,
        secrets={name: parse_secret_path(path) for name, path in job.secrets.items()},
    )


def find_log_folder(job: JobSpec, target: SlurmTarget) -> str:
    """Return the log folder: next to the output folder, or named like the job.

    Slurm puts the working folder before a relative path, and also expands patterns in it.
    """
    stem = job.output.rstrip("/") if is_local_folder(job.output) else job.name
    folder = target.logs or f"{stem}.slurm"
    return str(Path.cwd() / folder) if "%" in str(Path.cwd()) else folder


def render_comment(job: JobSpec, target: SlurmTarget) -> str:
    """Return a job's comment, from which `status` reads price, folders and processes."""
    facts = {
        "usd_per_hour": "" if job.usd_per_hour is None else f"{job.usd_per_hour:.6g}",
        "price_date": job.price_date or "",
        "processes": str(job.processes),
        "attempts": str(job.max_attempts),
        "output": job.output,
        "logs": find_log_folder(job, target),
        "stage": job.stage,
        **{f"label.{name}": value for name, value in job.labels.items()},
    }
    return build_comment({name: value for name, value in facts.items() if value})


def list_stage_options(previous: str) -> tuple[str, ...]:
    """Return options for a stage that starts after another job has succeeded.

    If that job fails, Slurm cancels the stage.
    """
    return (f"--dependency=afterok:{previous}", "--kill-on-invalid-dep=yes")


def list_submit_options(comment: str, earlier: Mapping[str, str]) -> tuple[str, ...]:
    """Return a stage's options, with the earlier stages in the comment.

    `earlier` maps names to job ids, at least one.
    """
    chain = build_comment({"after": ",".join(f"{name}:{job}" for name, job in earlier.items())})
    option = f"--comment={comment}&{chain.removeprefix(COMMENT_PREFIX)}"
    return (*list_stage_options([*earlier.values()][-1]), option)


def escape_pattern(path: str) -> str:
    """Escape a path in a Slurm option whose `%j` stands for the job number.

    >>> escape_pattern("top 50%jobs")
    'top 50%%jobs'
    """
    return path.replace("%", "%%")


def list_options(job: JobSpec, target: SlurmTarget) -> Iterator[tuple[str, str | None]]:
    """Yield `sbatch` options with values; None for an option without a value."""
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
    folder = find_log_folder(job, target)
    if "\\" in str(Path.cwd() / folder):  # it turns off the pattern, and with it the job number
        problem = f"Slurm cannot write logs to '{Path.cwd() / folder}', which contains a backslash"
        raise SettingsError(problem, "set launch.target.logs, or another output.folder")
    yield "output", f"{escape_pattern(folder)}/{name}.log"


def _list_resources(job: JobSpec, target: SlurmTarget) -> Iterator[tuple[str, str | None]]:
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
    if job.jobs > 1:
        yield "array", f"0-{job.jobs - 1}"
    if job.limit_seconds is not None:
        minutes, seconds = divmod(max(1, job.limit_seconds), SECONDS_PER_MINUTE)
        yield "time", f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    if target.grace_seconds:  # to the script, which passes it to the nodes and asks for a requeue
        yield "signal", f"B:TERM@{target.grace_seconds}"
    yield ("requeue" if target.requeue == "auto" else "no-requeue"), None


def _format_option(name: str, value: str | int | None) -> str:
    """Format an option for `sbatch`; None or true is an option without a value."""
    if value is None or value is True:
        return f"--{name}"
    value = str(value)
    if not _PLAIN.fullmatch(value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"--{name}={value}"


def read_command(script: str) -> tuple[str, ...]:
    """Return the node command line in a job script."""
    return tuple(shlex.split(script.partition("\nnode_command=(\n")[2].partition("\n)\n")[0]))


def read_environment(script: str) -> dict[str, str]:
    """Return variables that a job script exports with constant values."""
    text = script.partition("\nbegin_attempt\n")[2].partition("\nrun_attempts ")[0]
    lines = (line for line in text.splitlines() if line.startswith("export "))
    words = (word for line in lines for word in shlex.split(line)[1:])
    return dict(word.split("=", 1) for word in words)
