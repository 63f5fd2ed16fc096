"""Share of wall time spent training, when machines fail and checkpoints cost time.

Sources: Young, 1974; Daly, 2006: the interval sqrt(2 C M) between checkpoints minimizes the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from regauge.system.units import SECONDS_PER_HOUR

MACHINE_MTBF_HOURS = 6300.0
"""Mean hours between failures for one machine with 8 devices.

Source: Dubey et al., 2024 (Llama 3): 419 unexpected failures on 2,048 machines in 54 days.
"""


@dataclass(frozen=True)
class ExpectedGoodput:
    """Loss from failures and checkpoints, and the interval that minimizes it."""

    share: float
    """Training seconds per wall-clock second."""
    interval_seconds: float
    """Seconds between checkpoints."""
    failures_per_day: float


def plan_goodput(
    machines: int,
    checkpoint_seconds: float,
    restart_seconds: float,
    mtbf_hours: float = MACHINE_MTBF_HOURS,
) -> ExpectedGoodput:
    """Return the goodput 1 - C / tau - (tau / 2 + R) / M at tau = sqrt(2 C M).

    C: seconds that a checkpoint stops the training; R: seconds from a failure to the next step; M:
    seconds between job failures. The share is at least 0.
    """
    between = mtbf_hours * SECONDS_PER_HOUR / machines
    interval = math.sqrt(2 * checkpoint_seconds * between)
    pause = checkpoint_seconds / interval if interval else 0.0
    share = 1 - pause - (interval / 2 + restart_seconds) / between
    return ExpectedGoodput(max(share, 0.0), interval, 24 * SECONDS_PER_HOUR / between)
