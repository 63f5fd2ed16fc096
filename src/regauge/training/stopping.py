"""Reasons to stop before the end, agreed by all processes.

Each process looks at its signals, the first one at the clock and the dollars; what the worst of
them found is known to all one step later, so that no step waits for the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from regauge.errors import LimitReachedError, PreemptedError, RegaugeError
from regauge.supervision.signals import Caught

if TYPE_CHECKING:
    from regauge.training.session import Session

NOTHING, SECONDS, USD, TOKENS, SIGNAL = range(5)
AGAIN = "the same command goes on from there"


class Stopping(Caught):
    """Watches signals and limits while its block runs; a second signal is not caught."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._signalled = False
        self._asked: torch.Tensor | None = None

    def reason(self) -> int:
        """Return why all processes stop after this step, or NOTHING; called once a step."""
        found = self._found()
        if self._session.world.size == 1:
            return found
        told = int(self._asked) if self._asked is not None else NOTHING
        self._asked = torch.tensor(found, device=self._session.device)
        dist.all_reduce(self._asked, dist.ReduceOp.MAX)
        return told

    def caught(self, number: int) -> None:
        """Note a signal; the next one ends the process."""
        self._signalled = True
        self.give_back(number)

    def error(self, reason: int) -> RegaugeError:
        """Return the error that says how the run was stopped."""
        step = self._session.step
        if reason == SIGNAL:
            return PreemptedError(f"told to stop, and saved at step {step}", AGAIN)
        limit = {SECONDS: "stop.seconds", USD: "stop.usd", TOKENS: "stop.tokens"}[reason]
        remedy = f"raise {limit}, and {AGAIN}"
        return LimitReachedError(f"{limit} was reached and the run saved at step {step}", remedy)

    def _found(self) -> int:
        limits, ledger = self._session.settings.stop, self._session.ledger
        if self._signalled:
            return SIGNAL
        if limits.tokens is not None and ledger.tokens >= limits.tokens:
            return TOKENS
        if not self._session.world.first:
            return NOTHING
        if limits.seconds is not None and ledger.total_seconds >= limits.seconds:
            return SECONDS
        usd = ledger.paid.usd
        return USD if limits.usd is not None and usd is not None and usd >= limits.usd else NOTHING
