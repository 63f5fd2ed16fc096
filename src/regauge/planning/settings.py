"""The table of a run file that says what its machines cost; nothing here imports torch."""

from __future__ import annotations

import datetime as dt
from typing import Literal

from pydantic import Field, model_validator

from regauge.config import Settings


class Price(Settings):
    """What one of the run's machines costs; without it dollars are unknown."""

    instance: str | None = None
    """Machine type of the catalog, such as `trn1.32xlarge`: its on-demand price, with its date."""
    usd_per_hour: float | None = Field(default=None, ge=0)
    """Price of one machine for an hour, instead of the catalog's."""
    market: Literal["on-demand", "reserved", "spot", "own"] = "on-demand"
    """How it was bought; the catalog knows on-demand prices alone."""
    as_of: dt.date | None = Field(default=None, strict=False)
    """Day of your own price."""

    @model_validator(mode="after")
    def _known(self) -> Price:
        if self.market != "on-demand" and self.usd_per_hour is None:
            raise ValueError(f"a price of market '{self.market}' is yours: set its usd_per_hour")
        if self.as_of is not None and self.usd_per_hour is None:
            raise ValueError("as_of is the day of usd_per_hour: set both")
        return self
