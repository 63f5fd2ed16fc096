"""Machine price settings: the [execution.price] table. This module does not import torch."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from regauge.config import Settings


class Price(Settings):
    """One machine's price; without it, costs in dollars are unknown."""

    exclusive_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "instance": ("usd_per_hour", "market", "as_of"),
        "usd_per_hour": ("as_of", "discounts", "region"),
    }

    instance: str | None = None
    """Machine type in the catalog, such as `trn1.32xlarge`; sets its dated on-demand price."""
    region: str = "us-east-1"
    """Price region. The package has prices in six regions; `regauge catalog` adds others."""
    usd_per_hour: float | None = Field(default=None, ge=0)
    """Price per machine and hour; replaces the catalog price."""
    market: Literal["on-demand", "reserved", "spot", "own"] = "on-demand"
    """Price market; the catalog has only on-demand prices."""
    as_of: dt.date | None = Field(default=None, strict=False)
    """Price date."""
    discounts: dict[str, Annotated[float, Field(ge=0, lt=1)]] = {}
    """Discounts on the catalog's prices as fractions: by machine type, by family such as `p5`, or
    `*` for all others."""

    @model_validator(mode="after")
    def _check_own_price(self) -> Price:
        if self.market != "on-demand" and self.usd_per_hour is None:
            raise ValueError(f"market '{self.market}' is not in the catalog; set its usd_per_hour")
        if self.as_of is not None and self.usd_per_hour is None:
            raise ValueError("as_of is the date of usd_per_hour; set both")
        if self.discounts and self.usd_per_hour is not None:
            raise ValueError("discounts reduce the catalog's prices; remove them or usd_per_hour")
        return self
