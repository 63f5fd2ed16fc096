"""What a check of this machine has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Iterable

PAIRS = "pairs"
"""The check that names who the others do not understand."""
REMEDY = "leave it out or replace it, and see `regauge doctor`"


@dataclass(frozen=True)
class Finding:
    """One check of one place."""

    check: str
    where: str
    """The process and its host, or the folder."""
    value: str = ""
    """What was measured."""
    problem: str = ""
    """What is wrong; empty where nothing is."""
    ok: bool = True
    speed: float | None = None
    """In operations a second, to be compared with the others'."""
    rank: int | None = None
    """The process whose device it is of; None where that cannot be told."""

    @classmethod
    def bad(
        cls, check: str, where: str, problem: str, value: str = "", *, rank: int | None = None
    ) -> Finding:
        """Return a finding that a run should not start with."""
        return cls(check, where, value, problem, ok=False, rank=rank)

    def row(self) -> dict[str, str]:
        """Return it as a line of a table."""
        verdict = "ok" if self.ok else "BAD"
        found = {"check": self.check, "where": self.where, "verdict": verdict, "value": self.value}
        return {**found, "problem": self.problem}


@dataclass(frozen=True)
class Bandwidth:
    """A collective at one size, in the columns of nccl-tests and nccom-test."""

    op: str
    size: int
    """Bytes that each process holds."""
    count: int
    """Elements."""
    type: str
    time_us: float
    algbw_gbs: float
    """Size over time, in GB/s."""
    busbw_gbs: float
    """What the links carry: nccl-tests, PERFORMANCE.md, "Bandwidth"."""
    wrong: int
    """Elements that are not what they should be."""


def require(findings: Iterable[Finding]) -> None:
    """Raise PreflightError with the first finding that is bad, or with who is in all bad pairs."""
    first: Finding | None = None
    for finding in findings:
        if not finding.ok and (first is None or finding.check == PAIRS):
            first = finding
    if first is not None:
        raise PreflightError(f"{first.where}: {first.check}: {first.problem}", REMEDY)
