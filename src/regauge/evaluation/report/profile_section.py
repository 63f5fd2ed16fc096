"""Report section on profiled steps: time by kind and by module, and recommendations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.evaluation.report.figures import TimeShare
from regauge.run_folders import formatting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KIND_DESCRIPTIONS = {
    "matmul": "matrix multiplications",
    "other": "all other kernels",
    "optimizer": "weight update",
    "communication": "collectives that no computation hides",
    "data": "waiting for the next batch",
    "host": "the device waits for Python",
    "graphs": "whole graphs; a lazy device does not report their operations",
}
"""Operation kind in a profile -> description."""
MAX_MODULES = 12
"""Maximum table modules; the remaining ones share one row."""
REST = "all other modules"


@dataclass(frozen=True)
class ProfileRow(TimeShare):
    """Time per step for one operation kind or one module."""

    cells: tuple[str, ...] = ()
    """For a module: forward ms, backward ms, and matmul GFLOP/s and GB/s."""


@dataclass(frozen=True)
class ProfileSection:
    """Formatted training step profile."""

    sentence: str
    work_rows: tuple[ProfileRow, ...]
    module_rows: tuple[ProfileRow, ...]
    advice: tuple[str, ...]
    """Recommended changes, the most effective first."""
    trace: str
    """Trace file for Perfetto or chrome://tracing."""


def build_profile_section(profile: Mapping[str, Any]) -> ProfileSection | None:
    """Return the section for a `profile.json` document; None if the document is empty."""
    if not profile.get("seconds_per_step"):
        return None
    step = float(profile["seconds_per_step"])
    kinds = tuple(
        ProfileRow(name, KIND_DESCRIPTIONS.get(name, ""), seconds, seconds / step)
        for name, seconds in sorted(profile["by_kind"].items(), key=lambda item: -item[1])
    )
    return ProfileSection(
        sentence=" ".join(_describe_profile(profile, step)),
        work_rows=kinds,
        module_rows=tuple(_build_module_rows(profile["by_module"], step)),
        advice=tuple(
            f"{advice['change']}: saves at most {_format_seconds(advice['max_saved_seconds'])} "
            f"per step ({formatting.percent(advice['max_saved_seconds'] / step)}); "
            f"{advice['reason']}."
            for advice in profile["advice"]
        ),
        trace=str(profile["trace_file"]),
    )


def _describe_profile(profile: Mapping[str, Any], step: float) -> Iterator[str]:
    first, last = profile["steps"]
    yield (
        f"Steps {first} to {last} of rank 0: {_format_seconds(step)} per step, "
        f"{_format_seconds(profile['unprofiled_step_seconds'])} without the profiler."
    )
    chip, matmul = profile["chip"], profile["matmul"]
    peak = chip["peak_flops_per_second"]
    if matmul["flops_per_second"]:
        share = formatting.percent(matmul["peak_fraction"])
        flops = _format_scaled(matmul["flops_per_second"], 1e9)
        of_peak = (
            f" of {_format_scaled(peak, 1e9)} ({share}; {chip['peak_source']})" if peak else ""
        )
        bandwidth = _format_scaled(matmul["bytes_per_second"], 1e9)
        peak_bandwidth = _format_scaled(chip["memory_bytes_per_second"], 1e9)
        yield (
            f"Matrix multiplications reach {flops} GFLOP/s{of_peak} "
            f"and {bandwidth} GB/s of {peak_bandwidth}."
        )
    yield f"MFU {formatting.percent(profile['mfu'])}: {profile['mfu_formula']}."
    if hidden := profile["overlapped_communication"]:
        yield f"Computation hides {_format_seconds(hidden)} of communication per step."


def _build_module_rows(modules: list[dict[str, Any]], step: float) -> Iterator[ProfileRow]:
    for module in modules[:MAX_MODULES]:
        name, seconds = module["name"].removeprefix("model."), module["seconds"]
        cells = (
            _format_scaled(module["forward_seconds"], 1e-3),
            _format_scaled(module["backward_seconds"], 1e-3),
            _format_scaled(module["flops_per_second"], 1e9),
            _format_scaled(module["bytes_per_second"], 1e9),
        )
        yield ProfileRow(name, "", seconds, seconds / step, cells)
    if rest := modules[MAX_MODULES:]:
        names = ("seconds", "forward_seconds", "backward_seconds")
        seconds, *passes = (sum(module[name] for module in rest) for name in names)
        milliseconds = (_format_scaled(duration, 1e-3) for duration in passes)
        yield ProfileRow(REST, "", seconds, seconds / step, (*milliseconds, "", ""))


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _format_scaled(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.1f}"
