"""Health check results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from regauge.system.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PAIRS = "pairs"
"""Check that blames a process after testing collectives with each other process."""
REMEDY = "replace or exclude it, then run `regauge doctor`"


@dataclass(frozen=True)
class Finding:
    """The result of one check at one location."""

    check: str
    location: str
    """The process and its host, or the folder."""
    value: str = ""
    """Measured value."""
    problem: str = ""
    """Empty if the check passed."""
    ok: bool = True
    flops_per_second: float | None = None
    """FLOP/s, for comparison with other devices."""
    rank: int | None = None
    """Process whose device was checked, if known."""
    may_be_load: bool = False
    """Whether other programs on the machine can cause the problem."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measured numbers; names include units, such as `bytes_per_second`."""

    @classmethod
    def bad(
        cls, check: str, where: str, problem: str, value: str = "", *, rank: int | None = None
    ) -> Finding:
        return cls(check, where, value, problem, ok=False, rank=rank)

    def to_row(self) -> dict[str, str]:
        """Return a table row."""
        return {
            "check": self.check,
            "location": self.location,
            "status": "ok" if self.ok else "BAD",
            "value": self.value,
            "problem": self.problem,
        }

    def to_document(self) -> dict[str, Any]:
        """Return JSON; names of numbers include units."""
        return {
            "check": self.check,
            "location": self.location,
            "ok": self.ok,
            "problem": self.problem,
            "description": self.value,
            **self.numbers,
        }


@dataclass(frozen=True)
class Bandwidth:
    """Speed of a collective at one size, in the columns of nccl-tests and nccom-test."""

    op: str
    size: int
    """Bytes per process."""
    count: int
    """Elements."""
    type: str
    time_us: float
    algbw_gbs: float
    """Size over time, in GB/s."""
    busbw_gbs: float
    """Link load in GB/s: nccl-tests, PERFORMANCE.md, "Bandwidth"."""
    wrong: int
    """Number of wrong elements."""


def raise_if_bad(findings: Iterable[Finding]) -> None:
    """Raise PreflightError for the first bad finding, or for the process blamed by all pairs."""
    first: Finding | None = None
    for finding in findings:
        if not finding.ok and (first is None or finding.check == PAIRS):
            first = finding
    if first is not None:
        raise PreflightError(f"{first.location}: {first.check}: {first.problem}", REMEDY)
