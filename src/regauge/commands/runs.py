"""List the runs below a folder; show, compare or remove one.

For example:

    $ regauge runs diff out/first out/second
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from regauge import commands
from regauge.run_folders import formatting
from regauge.run_folders.run_difference import find_differences
from regauge.run_folders.run_folder import read_run_folder
from regauge.run_folders.run_list import filter_runs, list_runs, sort_runs, summarize_run
from regauge.run_folders.run_removal import check_removable, remove_run
from regauge.system import log
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.run_folders.run_list import RunSummary

Action = Literal["list", "show", "diff", "rm"]
DEFAULT_ROOT = Path("out")
NUM_FOLDERS = {"list": (0, 1), "show": (1, 1), "diff": (2, 2), "rm": (1, 1)}
"""Action -> minimum and maximum folder count."""
LISTED = ("name", "verb", "state", "step", "metric", "usd", "goodput", "host")
"""List columns; `--json` has all of them."""
DISPENSABLE = ("host", "verb", "goodput", "usd")
"""Columns hidden on a narrow terminal, the first one first."""
NUMERIC = ("step", "usd", "goodput")


def main(
    action: Annotated[Action, Parameter(help="Action on the runs.")] = "list",
    *folders: Annotated[
        Path, Parameter(help="With list: the root (default: `out`); otherwise output folders.")
    ],
    filter: Annotated[  # noqa: A002  (the option's name)
        tuple[str, ...],
        Parameter(help="With list: key=pattern, a column or a setting; may be repeated."),
    ] = (),
    sort: Annotated[str, Parameter(help="With list: the column or setting to sort by.")] = "name",
    reverse: Annotated[bool, Parameter(help="With list: reverse the order.")] = False,
    root: Annotated[
        Path, Parameter(help="With rm: folder whose runs and registries may use the run.")
    ] = DEFAULT_ROOT,
    yes: Annotated[bool, Parameter(help="With rm: do not ask.")] = False,
    json: commands.OutputFormat = commands.TEXT,
) -> dict[str, Any]:
    """List every run below a folder with its state, step, metric, cost and host.

    `show` prints one run. `diff` prints the differences between two runs: settings, data, weights,
    code and environment. `rm` removes a run that is not running and that no other work depends on.

    For example:

        >>> regauge.runs("diff", "out/first", "out/second")
    """
    _check_count(action, folders)
    if action == "show":
        return _show_run(folders[0], as_json=json.is_json)
    if action == "diff":
        differences = find_differences(*folders)
        answer = {name: rows or "equal" for name, rows in differences.items()}
        return commands.show(differences if json.is_json else answer, as_json=json.is_json)
    if action == "rm":
        return _remove(folders[0], root, is_confirmed=yes, as_json=json.is_json)
    runs = list_runs(folders[0] if folders else DEFAULT_ROOT)
    selected = sort_runs(filter_runs(runs, filter), sort, is_reversed=reverse)
    return _list(selected, as_json=json.is_json)


def _check_count(action: Action, folders: tuple[Path, ...]) -> None:
    least, most = NUM_FOLDERS[action]
    if not least <= len(folders) <= most:
        needed = {"list": "at most one folder", "diff": "two folders"}.get(action, "one folder")
        problem = f"'runs {action}' needs {needed}, got {len(folders)}"
        raise SettingsError(problem, "see 'regauge runs --help'")


def _list(runs: Iterable[RunSummary], *, as_json: bool) -> dict[str, Any]:
    rows = [run.row for run in runs]
    if as_json or log.is_embedded():
        return commands.show({"runs": rows}, as_json=as_json) if as_json else {"runs": rows}
    log.stdout.print(_build_table(rows) if rows else "no runs", soft_wrap=False)
    return {"runs": rows}


def _build_table(rows: list[dict[str, Any]]) -> Table:
    cells = {column: [str(_format(column, row)) for row in rows] for column in LISTED}
    sizes = {column: max(len(column), *map(len, cells[column])) + 2 for column in LISTED}
    columns = list(LISTED)
    for column in DISPENSABLE:
        if sum(sizes[name] for name in columns) > log.stdout.width + 2:
            columns.remove(column)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in NUMERIC else "left"
        table.add_column(column.upper(), justify=justify, no_wrap=True, overflow="ellipsis")
    for row in zip(*(cells[column] for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def _format(key: str, row: dict[str, Any]) -> Any:
    value = row[key]
    if value is None:
        return "-"
    if key == "step" and row["steps"]:
        return f"{value:,}/{row['steps']:,}"
    if key == "metric":
        is_earlier = row["value_step"] is not None and row["value_step"] != row["step"]
        step = f" at step {row['value_step']:,}" if is_earlier else ""
        return f"{value} {formatting.number(row['value'])}{step}"
    formats = {
        "usd": formatting.dollars,
        "goodput": formatting.percent,
        "step": formatting.number,
    }
    return formats[key](value) if key in formats else value


def _show_run(folder: Path, *, as_json: bool) -> dict[str, Any]:
    run, summary = read_run_folder(folder), summarize_run(folder, folder)
    summary = replace(summary, name=str(folder))
    answer = {
        **summary.row,
        "run_id": run.identity.get("run_id"),
        "data_fingerprint": run.identity.get("data_fingerprint"),
        "failures": [
            {key: failure.get(key) for key in ("attempt", "kind", "rank", "step", "problem")}
            for failure in run.failures
        ],
        "environment": run.environment,
        "settings": dict(summary.settings) if as_json or log.is_embedded() else {},
        "warnings": list(run.warnings),
    }
    if not (as_json or log.is_embedded()):
        answer = {key: value for key, value in answer.items() if value not in (None, {}, [])}
    return commands.show(answer, as_json=as_json)


def _remove(folder: Path, root: Path, *, is_confirmed: bool, as_json: bool) -> dict[str, Any]:
    check_removable(folder, root)
    if not is_confirmed:
        _confirm(folder)
    remove_run(folder, root)
    return commands.show({"removed": str(folder)}, as_json=as_json)


def _confirm(folder: Path) -> None:
    """Ask whether to remove a run; raises SettingsError if not, and without a terminal."""
    from rich.prompt import Confirm

    if not (log.is_interactive() and sys.stdin.isatty()):
        raise SettingsError(f"{folder} is not removed without confirmation", "add --yes")
    if not Confirm.ask(f"Remove {folder} and its checkpoints?", console=log.stderr, default=False):
        raise SettingsError(f"{folder} is not removed", "answer y, or add --yes")
