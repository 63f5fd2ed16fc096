"""Section of a report on the profiled steps: time by kind and by module, and recommendations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.results import formatting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KIND_MEANINGS = {
    "products": "matrix multiplications",
    "other": "all other kernels",
    "optimizer": "weight update",
    "communication": "collectives that no computation hides",
    "data": "waiting for the next batch",
    "host": "the device waits for Python",
    "graphs": "whole graphs; a lazy device does not show their parts",
}
"""Kinds of work in a profile, and the meaning of each in a report."""
MAX_PARTS = 12
"""Most parts of the model in a table; the remaining parts are one row."""
REST = "all other parts"


@dataclass(frozen=True)
class ProfileRow:
    """Time of one kind of work or one part of the model."""

    name: str
    meaning: str
    seconds: float
    """Seconds per step."""
    share: float
    """Fraction of the step."""
    cells: tuple[str, ...] = ()
    """For a part: forward ms, backward ms, and GFLOP/s and GB/s of its matmuls."""


@dataclass(frozen=True)
class ProfileSection:
    """The profile of a training step, formatted."""

    sentence: str
    kinds: tuple[ProfileRow, ...]
    parts: tuple[ProfileRow, ...]
    advice: tuple[str, ...]
    """Recommended changes, the most effective first."""
    trace: str
    """Trace file for Perfetto or chrome://tracing."""


def build_profile_section(profile: Mapping[str, Any]) -> ProfileSection | None:
    """Return the section of a `profile.json` document; None if the document is empty."""
    if not profile.get("seconds_per_step"):
        return None
    step = float(profile["seconds_per_step"])
    kinds = tuple(
        ProfileRow(name, KIND_MEANINGS.get(name, ""), seconds, seconds / step)
        for name, seconds in sorted(profile["kinds"].items(), key=lambda item: -item[1])
    )
    return ProfileSection(
        sentence=" ".join(_describe_profile(profile, step)),
        kinds=kinds,
        parts=tuple(_build_part_rows(profile["parts"], step)),
        advice=tuple(
            f"{advice['change']}: saves at most {_format_seconds(advice['seconds'])} per step "
            f"({formatting.percent(advice['seconds'] / step)}); {advice['reason']}."
            for advice in profile["advice"]
        ),
        trace=str(profile["trace"]),
    )


def _describe_profile(profile: Mapping[str, Any], step: float) -> Iterator[str]:
    first, last = profile["steps"]
    yield (
        f"Steps {first} to {last} of rank 0: {_format_seconds(step)} per step, "
        f"{_format_seconds(profile['seconds_of_the_step_before'])} without the profiler."
    )
    chip, products = profile["chip"], profile["products"]
    peak = chip["flops_per_second"]
    if products["flops_per_second"]:
        share = formatting.percent(products["share_of_peak"])
        flops = _format_scaled(products["flops_per_second"], 1e9)
        of_peak = f" of {_format_scaled(peak, 1e9)} ({share}; {chip['source']})" if peak else ""
        bandwidth = _format_scaled(products["bytes_per_second"], 1e9)
        peak_bandwidth = _format_scaled(chip["bytes_per_second"], 1e9)
        yield (
            f"Matrix multiplications reach {flops} GFLOP/s{of_peak} "
            f"and {bandwidth} GB/s of {peak_bandwidth}."
        )
    yield f"MFU {formatting.percent(profile['mfu'])}: {profile['mfu_formula']}."
    if hidden := profile["hidden_communication"]:
        yield f"Computation hides {_format_seconds(hidden)} of communication per step."


def _build_part_rows(parts: list[dict[str, Any]], step: float) -> Iterator[ProfileRow]:
    for part in parts[:MAX_PARTS]:
        cells = (
            _format_scaled(part["forward"], 1e-3),
            _format_scaled(part["backward"], 1e-3),
            _format_scaled(part["flops_per_second"], 1e9),
            _format_scaled(part["bytes_per_second"], 1e9),
        )
        yield ProfileRow(
            part["name"].removeprefix("model."), "", part["seconds"], part["seconds"] / step, cells
        )
    if parts[MAX_PARTS:]:
        names = ("seconds", "forward", "backward")
        seconds, *passes = (sum(part[name] for part in parts[MAX_PARTS:]) for name in names)
        milliseconds = (_format_scaled(duration, 1e-3) for duration in passes)
        yield ProfileRow(REST, "", seconds, seconds / step, (*milliseconds, "", ""))


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _format_scaled(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.1f}"
