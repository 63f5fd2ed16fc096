"""The table of a run file that `replay` reads; nothing here imports torch."""

from __future__ import annotations

from pydantic import Field

from regauge.config import Settings
from regauge.training.settings import Training


class Steps(Settings):
    """Which steps are computed again, and what is written down of them."""

    until: int = Field(ge=1)
    """Steps that are done at the end."""
    state: str | None = None
    """Folder of the checkpoint to begin from; the run's first weights without one."""
    watch: tuple[int, ...] = ()
    """Steps that are written down module by module, named by the steps done before them."""
    save: int | None = Field(default=None, ge=0)
    """Steps after which the state is saved."""
    faults: str | None = None
    """Plan of the faults that struck the run, to strike again."""
    noise: float = Field(default=0.0, ge=0)
    """Largest relative change, drawn at random, of what each smallest module returns."""
    float64: bool = False
    """Whether it is computed in fp64, on a CPU."""


class Replay(Training):
    """A run, and which of its steps are computed again."""

    replay: Steps
    """The steps."""
