"""The profiled steps of a run, in words: where a step went, and what to change first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.results import formatting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KINDS = {
    "products": "products of matrices",
    "other": "what is computed between them",
    "optimizer": "the update of the weights",
    "communication": "sums over processes that no computing hides",
    "data": "steps waited for rows",
    "host": "the device waited for Python",
    "graphs": "whole graphs: a lazy device shows no parts of them",
}
SHOWN = 12
"""Parts of the model: the rest of them are added up."""
REST = "the rest"


@dataclass(frozen=True)
class Row:
    """A kind of work or a part of the model."""

    name: str
    meaning: str
    seconds: float
    """Of a step."""
    share: float
    cells: tuple[str, ...] = ()
    """Of a part: forward and backward in ms, GFLOP/s and GB/s of its products."""


@dataclass(frozen=True)
class Closer:
    """What a profile says."""

    sentence: str
    kinds: tuple[Row, ...]
    parts: tuple[Row, ...]
    advice: tuple[str, ...]
    trace: str
    """The file for chrome://tracing or Perfetto."""


def closer(profile: Mapping[str, Any]) -> Closer | None:
    """Return what the document of a profile says, or None where there is none."""
    if not profile.get("seconds_per_step"):
        return None
    step = float(profile["seconds_per_step"])
    kinds = tuple(
        Row(name, KINDS.get(name, ""), seconds, seconds / step)
        for name, seconds in sorted(profile["kinds"].items(), key=lambda item: -item[1])
    )
    return Closer(
        sentence=" ".join(_sentences(profile, step)),
        kinds=kinds,
        parts=tuple(_parts(profile["parts"], step)),
        advice=tuple(
            f"{each['change']}: at most {_time(each['seconds'])} a step "
            f"({formatting.share(each['seconds'] / step)}); {each['reason']}."
            for each in profile["advice"]
        ),
        trace=str(profile["trace"]),
    )


def _sentences(profile: Mapping[str, Any], step: float) -> Iterator[str]:
    first, last = profile["steps"]
    yield (
        f"Steps {first} to {last} of the first process: {_time(step)} a step, "
        f"{_time(profile['seconds_of_the_step_before'])} before the profiler watched."
    )
    chip, products = profile["chip"], profile["products"]
    peak = chip["flops_per_second"]
    if products["flops_per_second"]:
        share = formatting.share(products["share_of_peak"])
        beside = f" of {_scaled(peak, 1e9)} ({share}; {chip['source']})" if peak else ""
        yield (
            f"Products reach {_scaled(products['flops_per_second'], 1e9)} GFLOP/s{beside} and read "
            f"and write {_scaled(products['bytes_per_second'], 1e9)} GB/s "
            f"of {_scaled(chip['bytes_per_second'], 1e9)}."
        )
    yield f"MFU {formatting.share(profile['mfu'])}: {profile['mfu_formula']}."
    if hidden := profile["hidden_communication"]:
        yield f"Behind computing, {_time(hidden)} of communication a step are hidden."


def _parts(parts: list[dict[str, Any]], step: float) -> Iterator[Row]:
    for part in parts[:SHOWN]:
        cells = (
            _scaled(part["forward"], 1e-3),
            _scaled(part["backward"], 1e-3),
            _scaled(part["flops_per_second"], 1e9),
            _scaled(part["bytes_per_second"], 1e9),
        )
        yield Row(
            part["name"].removeprefix("model."), "", part["seconds"], part["seconds"] / step, cells
        )
    if parts[SHOWN:]:
        names = ("seconds", "forward", "backward")
        seconds, *both = (sum(part[name] for part in parts[SHOWN:]) for name in names)
        yield Row(
            REST, "", seconds, seconds / step, (*(_scaled(each, 1e-3) for each in both), "", "")
        )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _scaled(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.1f}"
