"""Values of metrics, independent of their format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regauge.monitoring.vocabulary import Metric


@dataclass(frozen=True)
class Sample:
    """The value of one series."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    """The values of the labels, in the order of the metric's labels."""
