"""Two artifacts side by side: how many times the latency, the rate and the dollars of the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Document = dict[str, Any]

FORMULA = (
    "second / first, of p50_ms, inferences_per_second and usd_per_million_inferences; overlap: "
    "the p50_ms of some turn of one lies among those of the other"
)
RATIOS = {
    "latency": "p50_ms",
    "inferences_per_second": "inferences_per_second",
    "usd": "usd_per_million_inferences",
}
"""What is compared, and the figure of a closed loop that it is."""


def ratios(
    pairs: Sequence[tuple[str, str]], names: Sequence[str], rows: Sequence[Document]
) -> list[Document]:
    """Return the ratios of each pair by batch and length; without pairs of all by the first."""
    first, *others = names
    wanted = pairs or [(first, other) for other in others]
    return [each for pair in wanted for each in _of_pair(pair, rows)]


def _of_pair(pair: tuple[str, str], rows: Sequence[Document]) -> Iterator[Document]:
    first, second = (
        {(row["rows"], row["length"]): row["closed"] for row in rows if row["artifact"] == name}
        for name in pair
    )
    for (count, length), ours in first.items():
        theirs = second[count, length]
        where = {"first": pair[0], "second": pair[1], "rows": count, "length": length}
        found = {name: _ratio(theirs[key], ours[key]) for name, key in RATIOS.items()}
        yield {**where, **found, "overlap": _overlap(theirs, ours)}


def _overlap(second: Document, first: Document) -> bool | None:
    """Return whether turns of one lie among those of the other; None for a single turn of each."""
    if len(first["requests"]) == len(second["requests"]) == 1:
        return None
    (least, most), (low, high) = first["spread_p50_ms"], second["spread_p50_ms"]
    return bool(low <= most and least <= high)


def _ratio(second: float | None, first: float | None) -> float | None:
    return None if second is None or not first else second / first
