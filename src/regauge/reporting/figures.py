"""The figures of one run, in words, each with its formula or source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.results import formatting

if TYPE_CHECKING:
    from regauge.results.run_folder import Run


@dataclass(frozen=True)
class Figure:
    """One figure of importance, in words."""

    label: str
    value: str
    note: str = ""


def reliability(run: Run) -> tuple[Figure, ...]:
    """Return the goodput, and which process was slow."""
    if run.goodput is None:
        return ()
    count = len(run.goodput.ends)
    ends = "1 attempt" if count == 1 else f"{count} attempts"
    share = Figure(
        "goodput", formatting.share(run.goodput.share), f"steps and measurements; {ends}"
    )
    if not run.slowest:
        return (share,)
    late = formatting.duration(run.slowest["seconds"])
    note = f"it comes {late} later than the others in each step"
    return share, Figure("held up by", f"process {run.slowest['rank']}", note)


def throughput(ledger: dict[str, Any]) -> tuple[Figure, ...]:
    """Return the tokens, the speed, the padding, MFU and the dollars of a ledger."""
    seconds: dict[str, float] = ledger.get("seconds") or {}
    tokens = ledger.get("tokens")
    training = sum(seconds.get(name, 0.0) for name in ("step", "data_wait"))
    usd = ledger.get("usd")
    per_million = usd / tokens * 1e6 if usd is not None and tokens else None
    peak = ledger.get("peak_source") or formatting.UNKNOWN
    formula = ledger.get("mfu_formula") or "formula unknown"
    return (
        Figure("real tokens", _tokens(tokens), "padding not counted"),
        Figure(
            "real tokens/s in training",
            formatting.count(tokens / training if tokens and training else None),
            "real tokens / (step + data wait seconds)",
        ),
        Figure(
            "real tokens/s over all",
            formatting.count(
                tokens / sum(seconds.values()) if tokens and any(seconds.values()) else None
            ),
            "real tokens / all seconds of all attempts",
        ),
        Figure(
            "padding", formatting.share(ledger.get("padding_share")), "slots without a real token"
        ),
        Figure("MFU", formatting.share(ledger.get("mfu")), f"{formula}; peak: {peak}"),
        Figure(
            "dollars",
            formatting.dollars(usd),
            "over all attempts" if usd is not None else "no price was given",
        ),
        Figure(
            "dollars per million tokens", formatting.dollars(per_million), "dollars / real tokens"
        ),
    )


def _tokens(tokens: int | None) -> str:
    return formatting.UNKNOWN if tokens is None else f"{tokens:,}"
