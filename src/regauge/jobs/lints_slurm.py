"""Slurm job script checks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from regauge.jobs.lints import Check, Lint, build_lint
from regauge.jobs.targets import LaunchPlan
from regauge.system.units import SECONDS_PER_HOUR


def check_script(plan: LaunchPlan) -> Iterator[Lint]:
    """Report `#SBATCH` options that contradict the job; yields nothing for other schedulers."""
    job, options = plan.job, _read_options(plan)
    grace = options.get("signal", "").partition("@")[2]
    if grace and job.hours is None:
        yield build_lint("slurm-time-limit")
    elif grace and int(grace) >= (job.hours or 0) * SECONDS_PER_HOUR:
        yield build_lint("slurm-grace", grace=grace, hours=job.hours)
    if "no-requeue" in options and job.max_attempts > 1:
        yield build_lint("slurm-requeue", attempts=job.max_attempts)
    if not isinstance(job.processes, int):
        return
    gres, cores = options.get("gres", ""), options.get("cpus-per-task")
    counts = [int(number) for number in re.findall(r"gpu(?::[^:,]*[a-z][^:,]*)?:(\d+)", gres)]
    if counts and job.processes > sum(counts):
        yield build_lint("slurm-gres", processes=job.processes, gres=gres, devices=sum(counts))
    if cores and job.processes > int(cores):
        yield build_lint("slurm-cores", processes=job.processes, cores=cores)


def _read_options(plan: LaunchPlan) -> dict[str, str]:
    scripts = [text for document in plan.documents if isinstance(text := document.content, str)]
    lines = (line for script in scripts for line in script.splitlines())
    options = (match for line in lines if (match := re.match(r"#SBATCH --([\w-]+)=?(.*)", line)))
    return {match[1]: match[2].strip('"') for match in options}


CHECKS: tuple[Check, ...] = (check_script,)
