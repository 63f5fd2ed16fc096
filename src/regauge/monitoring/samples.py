"""Metric values, independent of their format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regauge.monitoring.vocabulary import Metric


@dataclass(frozen=True)
class Sample:
    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    """Label values, in the metric's label order."""
