"""The ledger: time and cost by account, over all attempts."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from regauge.run_folders.cost_meter import parse_cost
from regauge.system.hooks import Hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.run_folders.cost_meter import Cost, CostMeter

ACCOUNTS = ("init", "compile", "data_wait", "step", "evaluate", "checkpoint", "lost")


class Ledger(Hook):
    """Seconds by account, real and computed tokens; a resumed run continues all of them.

    As a hook it books each phase's time to the account with the phase's name, except the device's
    compile time, which goes to `compile`. `meter` counts the cost. `on_phase` is called with the
    name of each new phase. `compile_seconds` returns the device's compile time so far.
    """

    def __init__(
        self,
        meter: CostMeter,
        on_phase: Callable[[str | None], None] | None = None,
        compile_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._booked = dict.fromkeys(ACCOUNTS, 0.0)
        self.tokens = 0
        self.computed_tokens = 0
        self._meter = meter
        self._on_phase = on_phase
        self._compile_seconds = compile_seconds
        self._account: str | None = None
        self._since = time.perf_counter()

    def add(self, account: str, seconds: float) -> None:
        self._booked[account] += seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time within the block to an account, instead of the enclosing account."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    @contextmanager
    def compilation(self) -> Iterator[None]:
        """Book the device's compile time within the block to `compile`."""
        before = self._compile_seconds()
        yield
        spent = self._compile_seconds() - before
        if self._account is not None:
            self._booked[self._account] -= spent
            self._booked["compile"] += spent

    @property
    def seconds(self) -> dict[str, float]:
        seconds = dict(self._booked)
        if self._account is not None:
            seconds[self._account] += time.perf_counter() - self._since
        return seconds

    @property
    def training_seconds(self) -> float:
        seconds = self.seconds
        return seconds["step"] + seconds["data_wait"]

    @property
    def total_seconds(self) -> float:
        """All booked time, lost work included."""
        return sum(self.seconds.values())

    @property
    def cost(self) -> Cost:
        """Cost so far; dollars are None if no price is known."""
        return self._meter.read()

    @property
    def padding_fraction(self) -> float:
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0

    def state(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "computed_tokens": self.computed_tokens,
            **self.cost.document,
        }

    def restore(self, state: dict[str, Any], last_line: dict[str, Any] | None) -> None:
        """Continue from a checkpoint; the time after it, up to the last ledger line, is lost."""
        for name, seconds in state["seconds"].items():
            self._booked[name] += seconds
        self.tokens, self.computed_tokens = state["tokens"], state["computed_tokens"]
        self._meter = self._meter.resume_from(parse_cost(state))
        if last_line is not None:
            after = sum(last_line.get("seconds", {}).values()) - sum(state["seconds"].values())
            self._booked["lost"] += max(0.0, after)

    def _switch(self, account: str | None) -> str | None:
        """Book the time since the last switch; return the account that was open."""
        now = time.perf_counter()
        if self._account is not None:
            self._booked[self._account] += now - self._since
        self._since = now
        outer, self._account = self._account, account
        if self._on_phase is not None and account != outer:
            self._on_phase(account)
        return outer
