"""The [launch] table. This module does not import torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from regauge.config import Settings, choice_of
from regauge.config.validation import require_pattern
from regauge.jobs.targets import Launcher, Volume

MAX_NAME = 63
"""Maximum RFC 1035 label length, in characters."""
_LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
Label = Annotated[
    str,
    require_pattern(
        _LABEL,
        "an RFC 1035 label; write at most 63 lowercase letters, digits and hyphens, a letter first",
    ),
]
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class NodeSettings(Settings):
    """Machine, image, environment variables and volumes for every node."""

    instance: str | None = None
    """Machine type for every node; by default `execution.price.instance`."""
    spot: bool = False
    """Whether to use Spot machines, which cost less and may be interrupted."""
    image: str | None = None
    """Container image with tag or digest, for targets that run containers."""
    environment: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables on every node; do not put secrets here."""
    secrets: Mapping[str, str] = Field(default_factory=dict)
    """Environment variable -> secret reference, in the form the target expects."""
    volumes: tuple[Volume, ...] = ()
    """File systems mounted on every node."""
    shared_memory_gib: float | None = Field(default=None, gt=0)
    """Size of /dev/shm in GiB; by default a quarter of the machine memory."""

    @field_validator("environment", "secrets")
    @classmethod
    def _check_variables(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name in value:
            if not _VARIABLE.fullmatch(name):
                problem = f"{name!r} is not the name of an environment variable"
                raise ValueError(f"{problem}; write letters, digits and _")
        return value

    @model_validator(mode="after")
    def _check_variable_names(self) -> Self:
        if names := self.environment.keys() & self.secrets.keys():
            raise ValueError(f"{min(names)} is in environment and in secrets; remove one of them")
        return self


class Launch(NodeSettings):
    """A launched job: nodes, limits, and settings for each target."""

    name: Label | None = None
    """Job name; by default the run file name."""
    jobs: int = Field(default=1, ge=1)
    """Number of array jobs that share the `predict` work, or of server replicas."""
    max_attempts: int = Field(default=3, ge=1)
    """Maximum number of attempts; the exit code decides whether another one begins. On Slurm, a
    preemption or time limit does not count."""
    hours: float | None = Field(default=None, gt=0)
    """Job time limit in hours."""
    labels: Mapping[str, str] = Field(default_factory=dict)
    """Labels or tags for the job and all resources created for it."""
    target: tuple[Annotated[SerializeAsAny[Launcher], choice_of("launchers")], ...] = ()
    """Target settings, at most one table per kind; `--on` selects one."""

    @model_validator(mode="after")
    def _check_unique(self) -> Self:
        kinds = Counter(target.kind for target in self.target)
        if repeated := [kind for kind, count in kinds.items() if count > 1]:
            raise ValueError(f"there are several targets of kind '{repeated[0]}'; keep one")
        return self


class LaunchSettings(Settings):
    """The table that `launch` reads in addition to the launched verb's tables."""

    launch: Launch = Launch()


def is_job_name(text: str) -> bool:
    """Return whether a text is a lowercase RFC 1035 label."""
    return re.fullmatch(_LABEL, text) is not None
