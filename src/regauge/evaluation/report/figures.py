"""Key figures for one run, each with a formula or source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.run_folders import formatting
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from regauge.run_folders.run_folder import RunFolder


@dataclass(frozen=True)
class KeyFigure:
    """One formatted report figure."""

    label: str
    value: str
    note: str = ""
    """Formula, source or explanation."""


@dataclass(frozen=True)
class TimeShare:
    name: str
    description: str
    seconds: float
    fraction: float
    """Fraction of the total time."""


def build_reliability_figures(run: RunFolder) -> tuple[KeyFigure, ...]:
    """Return the goodput, and the straggler if there was one."""
    if run.goodput is None:
        return ()
    count = len(run.goodput.outcomes)
    attempts = "1 attempt" if count == 1 else f"{format_count(count, 'attempt')}"
    note = f"time in steps and evaluations / total time; {attempts}"
    goodput = KeyFigure("goodput", formatting.percent(run.goodput.fraction), note)
    if not run.straggler:
        return (goodput,)
    delay = formatting.duration(run.straggler["delay_seconds"])
    note = f"{delay} later than the other ranks in each step"
    return goodput, KeyFigure("straggler", f"rank {run.straggler['rank']}", note)


def build_throughput_figures(ledger: dict[str, Any]) -> tuple[KeyFigure, ...]:
    """Return tokens, throughput, padding, MFU and cost from a ledger."""
    seconds: dict[str, float] = ledger.get("seconds") or {}
    tokens = ledger.get("tokens")
    training = sum(seconds.get(name, 0.0) for name in ("step", "data_wait"))
    usd = ledger.get("usd")
    per_million = usd / tokens * 1e6 if usd is not None and tokens else None
    peak = ledger.get("peak_source") or formatting.UNKNOWN
    formula = ledger.get("mfu_formula") or "formula unknown"
    return (
        KeyFigure("real tokens", _format_tokens(tokens), "without padding"),
        KeyFigure(
            "real tokens/s in training",
            formatting.count(tokens / training if tokens and training else None),
            "real tokens / (step + data wait seconds)",
        ),
        KeyFigure(
            "real tokens/s overall",
            formatting.count(
                tokens / sum(seconds.values()) if tokens and any(seconds.values()) else None
            ),
            "real tokens / wall-clock seconds of all attempts",
        ),
        KeyFigure(
            "padding",
            formatting.percent(ledger.get("padding_fraction")),
            "padding tokens / all tokens",
        ),
        KeyFigure("MFU", formatting.percent(ledger.get("mfu")), f"{formula}; peak: {peak}"),
        KeyFigure(
            "cost",
            formatting.dollars(usd),
            "over all attempts" if usd is not None else "no price is set",
        ),
        KeyFigure("cost per million tokens", formatting.dollars(per_million), "cost / real tokens"),
    )


def _format_tokens(tokens: int | None) -> str:
    return formatting.UNKNOWN if tokens is None else f"{tokens:,}"
