"""Plans as text for people: a summary with intervals, then tables, evidence and notes.

Numbers have 3 significant digits. The JSON document has more, with units in its names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from regauge import commands
from regauge.system import log
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DIGITS = 3
_NUMBER = re.compile(r"-?[\d,.]+(e[+-]\d+)?")
SUMMARY = {
    "memory_gb": "memory of one device, GB",
    "step_seconds": "step, s",
    "tokens_per_second": "tokens/s",
    "hours": "hours",
    "usd": "USD",
}
"""Plan intervals in the summary -> labels with units."""
VERDICTS = {
    "fits": "It fits",
    "undecided": "Undecided",
    "does not fit": "It does not fit",
}
COLUMNS = {
    "batch_rows": "rows of a batch",
    "efficiency": "eff.",
    "error_percent": "error %",
    "gb": "GB",
    "latency_ms": "latency ms",
    "measured_seconds": "measured s",
    "microbatch_rows": "rows",
    "milliseconds": "ms",
    "percent": "%",
    "planned_seconds": "planned s",
    "recomputation": "recompute",
    "rows_per_second": "rows/s",
    "step_seconds": "step s",
    "tokens_per_second": "tokens/s",
    "usd": "USD",
    "usd_per_million": "USD per million",
    "usd_per_million_tokens": "USD per million tokens",
    "weak_scaling_efficiency": "weak eff.",
}
"""Column headings; others are the names without underscores."""
PARTS = {
    "activations": "activations",
    "bubble": "pipeline bubble",
    "context": "libraries and buffers",
    "exposed": "exposed communication",
    "fixed": "fixed",
    "traffic": "activation traffic",
    "growth": "stragglers",
    "matmul": "matrix products",
    "working_set": "gathered layers, casts",
}
"""Labels for parts of memory and time; others are their names."""


def show(answer: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Print a plan, as JSON or as text, and return it."""
    if as_json:
        return commands.show(answer, as_json=True)
    if "fits" in answer:
        _show_option(answer)
    elif "options" in answer:
        _show_options(answer)
    else:
        commands.show(answer, as_json=False)
    for name in ("notes", "warnings"):
        _print_list(name.capitalize(), answer.get(name, ()))
    return answer


def format_number(value: float | None) -> str:
    """Return a number with 3 significant digits, and commas between thousands."""
    if value is None:
        return "unknown"
    rounded = float(f"{value:.{DIGITS}g}")
    if rounded and abs(rounded) < 1e-4:  # noqa: PLR2004 - smaller numbers have exponents
        return f"{rounded:.{DIGITS}g}"
    whole = len(str(int(abs(rounded)))) if abs(rounded) >= 1 else 0
    text = f"{rounded:,.{max(DIGITS - whole, 0)}f}" if whole else f"{rounded:.{DIGITS}g}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _show_option(answer: dict[str, Any]) -> None:
    settings = answer["settings"]
    _print(f"{format_number(answer['parameters'])} parameters on {answer['machines']}")
    memory, capacity = answer["memory_gb"]["p50"], answer["capacity_gb"]
    verdict = VERDICTS[answer["fits"]]
    used = f"{format_number(memory)} of {format_number(capacity)} GB on each device"
    _print(f"{verdict}: {used}.")
    if "change" in answer:
        _print(f"{answer['change'][:1].upper()}{answer['change'][1:]}.")
    _print("")
    for line in _format_summary(answer):
        _print(line)
    _print("")
    facts = {
        "settings": ", ".join(
            (
                f"strategy {settings['strategy.kind']}",
                f"activation checkpointing {settings['execution.activation_checkpointing']}",
                f"{settings['batch.rows']:,} rows for each update",
                f"{settings['batch.microbatch_rows']:,} in a microbatch",
                f"accumulation {settings['accumulation']:,}",
            )
        ),
        "steps": "unknown" if answer["steps"] is None else f"{answer['steps']:,}",
        "utilization": _format_utilization(answer),
        "lengths": f"{answer['real_token_fraction']:.1%} real tokens, by {answer['lengths_from']}",
        "batch shapes": f"{', '.join(answer['batch_shapes'])}"
        f" ({answer['num_graphs']} graphs, if the device compiles each shape)",
        "price": answer["price"],
    }
    _print_facts(facts)
    _print_table("Memory of one device, by the formulas", answer["memory"])
    name = answer["tasks"][0]["task"] if "tasks" in answer else ""
    suffix = f" of the task {name}" if name else ""
    _print_table(f"One step{suffix}, by the formulas", answer["step"])
    if "tasks" in answer:
        rows = [row | {"batch_shapes": ", ".join(row["batch_shapes"])} for row in answer["tasks"]]
        _print_table("Tasks, by the formulas", rows)
    _print_table("Scaling", answer["scaling"])
    _show_evidence(answer)


def _format_summary(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield aligned lines with p50, p10 and p90, without unknown figures."""
    rows: list[tuple[str, ...]] = [("", "p50", "p10", "p90")]
    for name, label in SUMMARY.items():
        if estimate := answer.get(name):
            rows.append((label, *(format_number(estimate[key]) for key in ("p50", "p10", "p90"))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for label, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join((label.ljust(widths[0]), *numbers))


def _format_utilization(answer: Mapping[str, Any]) -> str:
    mfu, hfu = answer["mfu"], answer["hfu"]
    text = "MFU unknown" if mfu is None else f"MFU {mfu:.1%}"
    if hfu is not None and hfu != mfu:
        text += f", HFU {hfu:.1%} with recomputation"
    return f"{text}, goodput {answer['goodput']:.1%}"


def _show_evidence(answer: Mapping[str, Any]) -> None:
    _print("")
    _print_facts({"speed from": answer["speed_from"]})
    _print_list("Nearest measured runs", [_format_row(row) for row in answer["nearest"]])
    if "own_runs" in answer:
        number = format_count(answer["own_runs"], "run")
        mean, median = answer["own_mean_error_percent"], answer["own_median_error_percent"]
        title = f"Earlier plans of your {number}: mean error {mean:g} %, median {median:g} %"
        _print_list(title, [_format_own_run(row) for row in answer["own_latest"]])
    _print_list("Formulas", answer.get("formulas", ()))


def _format_row(row: Mapping[str, Any]) -> str:
    measured = format_number(row["measured_seconds"])
    prefix = "your run " if row["is_own"] else ""
    times = f"measured {measured} s, formulas {row['error_percent']:+g} %"
    return f"{prefix}{row['row']} ({row['chip']}), distance {row['distance']:g}: {times}"


def _format_own_run(row: Mapping[str, Any]) -> str:
    measured = format_number(row["measured_seconds"])
    planned = format_number(row["planned_seconds"])
    times = f"planned {planned} s, measured {measured} s ({row['error_percent']:+g} %)"
    return f"{row['date']} {row['run']}: {times}"


def _show_options(answer: dict[str, Any]) -> None:
    skipped = ("options", "notes", "warnings", "more_options")
    facts = {
        name.replace("_", " "): _format_value(value)
        for name, value in answer.items()
        if name not in skipped and value not in ([], None)
    }
    _print_facts(facts)
    _print_table("Options, cheapest first", answer["options"])
    if more := answer.get("more_options"):
        _print(f"{more:,} more options: list them with --all")


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        cells = {key: format_number(item) for key, item in value.items()}
        return f"{cells['p50']} (p10 {cells['p10']}, p90 {cells['p90']})"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return format_number(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        commands.show({title: _align([_shorten(row) for row in rows])}, as_json=False)


def _align(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows whose numbers, which are texts here, are right-aligned in their columns."""
    widths: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, str) and _NUMBER.fullmatch(value):
                widths[name] = max(widths.get(name, 0), len(value))
    return [
        {
            name: value.rjust(widths[name]) if name in widths and isinstance(value, str) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def _shorten(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table row with short headings, and intervals in one cell."""
    short: dict[str, Any] = {}
    for name, value in row.items():
        if name.endswith(("_p10", "_p90")):
            continue
        heading = COLUMNS.get(name, name.replace("_", " "))
        if f"{name}_p90" in row and value is not None:
            low, high = (format_number(row[f"{name}_{key}"]) for key in ("p10", "p90"))
            interval = "" if low == high else f" ({low} to {high})"
            short[heading] = f"{format_number(value)}{interval}"
        elif name == "part":
            short[heading] = PARTS.get(value, value)
        else:
            short[heading] = format_number(value) if isinstance(value, float) else value
    return short


def _print_facts(facts: Mapping[str, str]) -> None:
    for name, text in facts.items():
        _print(f"{name[:1].upper()}{name[1:]}: {text}")


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        _print(f"{title}:")
        for line in lines:
            _print(f"  {line}")


def _print(line: str) -> None:
    log.stdout.print(line, markup=False)
