"""Slurm job script checks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from regauge.jobs.lints import Check, Lint
from regauge.jobs.targets import LaunchPlan
from regauge.system.units import SECONDS_PER_HOUR

SBATCH_MANUAL = "https://slurm.schedmd.com/sbatch.html"


def read_options(plan: LaunchPlan) -> dict[str, str]:
    """Return a plan's `#SBATCH` options; empty for other schedulers."""
    scripts = [text for document in plan.documents if isinstance(text := document.content, str)]
    lines = (line for script in scripts for line in script.splitlines())
    options = (match for line in lines if (match := re.match(r"#SBATCH --([\w-]+)=?(.*)", line)))
    return {match[1]: match[2].strip('"') for match in options}


def check_signal(plan: LaunchPlan) -> Iterator[Lint]:
    """Report a grace period that is not shorter than the time limit; warn without a limit."""
    options = read_options(plan)
    grace = options.get("signal", "").partition("@")[2]
    if not grace:
        return
    if plan.job.hours is None:
        yield Lint(
            "slurm-time-limit",
            "the job has no time limit, so grace_seconds counts from the partition's limit",
            "set launch.hours",
            f"{SBATCH_MANUAL}#OPT_signal",
            is_error=False,
        )
    elif int(grace) >= plan.job.hours * SECONDS_PER_HOUR:
        yield Lint(
            "slurm-grace",
            f"grace_seconds = {grace} is not shorter than launch.hours = {plan.job.hours:g}",
            "set grace_seconds of the target to less than the time limit",
            f"{SBATCH_MANUAL}#OPT_signal",
        )


def check_gres(plan: LaunchPlan) -> Iterator[Lint]:
    """Report more processes per node than requested devices."""
    gres = read_options(plan).get("gres", "")
    processes = plan.job.processes
    counts = [int(number) for number in re.findall(r"gpu(?::[^:,]*[a-z][^:,]*)?:(\d+)", gres)]
    if counts and isinstance(processes, int) and processes > sum(counts):
        yield Lint(
            "slurm-gres",
            f"execution.processes = {processes}, but gres = '{gres}' has {sum(counts)} devices",
            "set gres of the target or execution.processes",
            "https://slurm.schedmd.com/gres.html",
        )


def check_requeue(plan: LaunchPlan) -> Iterator[Lint]:
    """Report attempts that cannot begin because the script does not requeue."""
    if "no-requeue" in read_options(plan) and plan.job.max_attempts > 1:
        yield Lint(
            "slurm-requeue",
            f"launch.max_attempts = {plan.job.max_attempts}, but requeue is 'never'",
            "set requeue to 'auto', or launch.max_attempts to 1",
            "https://github.com/NVIDIA/Model-Optimizer/pull/1696",
            is_error=False,
        )


def check_cores(plan: LaunchPlan) -> Iterator[Lint]:
    """Warn about fewer cores than processes, which then share cores."""
    cores, processes = read_options(plan).get("cpus-per-task"), plan.job.processes
    if cores and isinstance(processes, int) and processes > int(cores):
        yield Lint(
            "slurm-cores",
            f"execution.processes = {processes}, but cpus = {cores}",
            "set cpus of the target to at least one core per process",
            f"{SBATCH_MANUAL}#OPT_cpus-per-task",
            is_error=False,
        )


CHECKS: tuple[Check, ...] = (check_signal, check_gres, check_requeue, check_cores)
