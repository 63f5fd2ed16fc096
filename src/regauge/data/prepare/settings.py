"""`prepare` settings: held-out rows from another source, and execution."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from regauge.config import Settings, choice_of
from regauge.data.sources import Source


class Validation(Settings):
    """Source of held-out rows, such as a validation file; nothing else is held out."""

    source: Annotated[SerializeAsAny[Source], choice_of("data/sources")]
    """Source of held-out rows. Without `kind`, missing keys are taken from `source`."""
    near_duplicates: Literal["drop", "keep"] = "drop"
    """`drop` leaves out training records that nearly duplicate validation records, and counts them;
    `keep` only counts them."""


class PrepareOptions(Settings):
    """How to run `prepare`; these options do not change the dataset."""

    processes: int = Field(default=0, ge=0)
    """Reading and encoding processes; 0 is one per CPU core."""
