"""The tables of a run file that its supervisor reads; nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from regauge.config import Settings


class Supervision(Settings):
    """What happens when a process of the run dies, hangs or is told to stop."""

    attempts_at_a_step: int = Field(default=3, ge=1)
    """Attempts that may fail at the same step in the same way; then the run ends with code 66."""
    preflight: Literal["full", "brief"] = "full"
    """What is checked before the first attempt: the devices and their collectives, or storage."""
    hang_seconds: float = Field(default=60.0, gt=0)
    """Shortest silence of a process that counts as a hang; ten times what is usual, if longer."""
    notices: Literal["none", "ec2"] = "none"
    """Who tells that this machine will be taken away; the run then saves and stops."""


class Nodes(Settings):
    """The machines of a run, and where they meet; each of them runs the same command."""

    count: int | str | None = Field(default=None, union_mode="left_to_right")
    """Nodes, or the fewest and the most as `2:4`; by default as the launcher says, or 1."""
    rendezvous: Literal["c10d", "etcd"] | None = None
    """Where they meet: at one of them, or at an etcd that outlives any of them; by default c10d."""
    endpoint: str | None = None
    """Host and port of that; by default as the launcher says."""
    join_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for the fewest nodes; then the command ends with code 75."""
    last_call_seconds: float = Field(default=30.0, ge=0)
    """Wait for more nodes once the fewest are there, when the run starts."""
    lost_seconds: float = Field(default=5.0, gt=0)
    """Silence of a node after which the others go on without it."""

    @field_validator("count")
    @classmethod
    def _readable(cls, value: int | str | None) -> int | str | None:
        if value is not None:
            limits(value)
        return value


def limits(count: int | str) -> tuple[int, int]:
    """Return the fewest and the most nodes that `2` or `2:4` stands for; raises ValueError."""
    fewest, colon, most = str(count).partition(":")
    try:
        found = int(fewest), int(most if colon else fewest)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise ValueError(
            f"'{count}' is no number of nodes: write one, or the fewest and the most, 2:4"
        )
    return found
