"""`slurm` target settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from regauge.jobs.targets import Launcher

OPTION = re.compile(r"[a-z][a-z0-9-]+")


class SlurmTarget(Launcher):
    """`sbatch` options, and the restart policy."""

    partition: str | None = None
    """Job partition; by default the cluster's default partition."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service (QOS)."""
    constraint: str | None = None
    """Required node features."""
    reservation: str | None = None
    """Reservation whose nodes are used."""
    gres: str | None = None
    """Generic resources per node, such as `gpu:8`; by default the machine's accelerators, and none
    for an empty text."""
    cpus: int | None = Field(default=None, ge=1)
    """CPU cores per node; by default the job has whole nodes (`--exclusive`)."""
    grace_seconds: int = Field(default=120, ge=0, le=65535)
    """Seconds from SIGTERM to the time limit, in which the run saves; 0 sends no signal."""
    requeue: Literal["auto", "never"] = "auto"
    """`auto` restarts a job after a preemption or exit code 75, 76 or 143; `never` does not."""
    setup: tuple[str, ...] = ()
    """Shell lines that run before the command in every attempt, such as `module load`."""
    options: Mapping[str, str | int | bool] = Field(default_factory=dict)
    """More `sbatch` options by long name; true for an option without a value."""
    logs: str | None = None
    """Log folder on the shared file system; by default `<output folder>.slurm`."""

    @field_validator("options")
    @classmethod
    def _check_options(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, text in value.items():
            if not OPTION.fullmatch(name):
                raise ValueError(f"{name!r} is not the long name of an option, such as mail-user")
            if text is False or "\n" in str(text):
                raise ValueError(f"{name} has no value; remove it, or write true")
        return value

    @field_validator("partition", "account", "qos", "constraint", "reservation", "gres", "logs")
    @classmethod
    def _check_line(cls, value: str | None) -> str | None:
        if value is not None and not value.isprintable():
            raise ValueError(f"{value!r} has control characters; remove them")
        return value
