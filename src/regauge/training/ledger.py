"""Where time and money went, over all attempts of a run."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from regauge.supervision.cost_meter import reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.supervision.cost_meter import Meter, Reading

ACCOUNTS = ("init", "compile", "data_wait", "step", "evaluate", "checkpoint", "lost")


class Ledger:
    """Seconds by account, real tokens and padded slots; they go on when a run resumes.

    `meter` counts what is paid for, `told` is called with each account that time begins to go to.
    """

    def __init__(self, meter: Meter, told: Callable[[str | None], None] | None = None) -> None:
        self._booked = dict.fromkeys(ACCOUNTS, 0.0)
        self.tokens = 0
        self.slots = 0
        self._meter = meter
        self._told = told
        self._account: str | None = None
        self._since = time.perf_counter()

    def book(self, account: str, seconds: float) -> None:
        """Add time that was measured elsewhere to an account."""
        self._booked[account] += seconds

    def move(self, account: str, seconds: float) -> None:
        """Book time of the account that is open to another one; nothing where none is."""
        if self._account is not None:
            self._booked[self._account] -= seconds
            self._booked[account] += seconds

    @contextmanager
    def spend(self, account: str) -> Iterator[None]:
        """Book the time inside to an account, and not to the one around it."""
        outer = self._switch(account)
        try:
            yield
        finally:
            self._switch(outer)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by account, up to now."""
        self._switch(self._account)
        return dict(self._booked)

    def _switch(self, account: str | None) -> str | None:
        """Book the time since the last switch, and return the account that was open."""
        now = time.perf_counter()
        if self._account is not None:
            self._booked[self._account] += now - self._since
        self._since = now
        outer, self._account = self._account, account
        if self._told is not None and account != outer:
            self._told(account)
        return outer

    @property
    def training_seconds(self) -> float:
        """Seconds of steps, and of waiting for their data."""
        found = self.seconds
        return found["step"] + found["data_wait"]

    @property
    def total_seconds(self) -> float:
        """All time that was booked, lost work included."""
        return sum(self.seconds.values())

    @property
    def paid(self) -> Reading:
        """What was paid for so far, in dollars where a price is known."""
        return self._meter.read()

    @property
    def padding_share(self) -> float:
        """Share of the computed slots that held no real token."""
        return 1 - self.tokens / self.slots if self.slots else 0.0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "slots": self.slots,
            **self.paid.document,
        }

    def restore(self, state: dict[str, Any], last_known: dict[str, Any] | None) -> None:
        """Go on from a checkpoint; time after it, up to the last line written, was lost."""
        for name, seconds in state["seconds"].items():
            self._booked[name] += seconds
        self.tokens, self.slots = state["tokens"], state["slots"]
        self._meter = self._meter.at_least(reading(state))
        if last_known is not None:
            after = sum(last_known["seconds"].values()) - sum(state["seconds"].values())
            self._booked["lost"] += max(0.0, after)
