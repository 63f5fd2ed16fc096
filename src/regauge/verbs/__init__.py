"""One file per verb: its settings root (`ROOT`) and a `main` that reads top to bottom.

A verb file imports its machinery inside of its functions, so that a run file is checked, and help
printed, without torch. `OUTPUT` is the key under which a pipeline hands a verb its output folder.
A verb that reads other tables under a flag names them in `ALSO`, by that flag.
"""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from regauge import config, log, processes, registry
from regauge.errors import ChildError
from regauge.reporting.words import UNKNOWN

if TYPE_CHECKING:
    from types import ModuleType

S = TypeVar("S", bound=config.Settings)

# The parameters that every verb with a run file has, with their help on the command line.
RunFile = Annotated[Path, Parameter(help="a run file (TOML), or the run.json of an earlier run")]
Override = Annotated[str, Parameter(help="key.path=value, laid over the run file")]
DryRun = Annotated[bool, Parameter(help="show what would happen, and do nothing")]
AsJson = Annotated[bool, Parameter(help="print one JSON document on standard output")]


def module(verb: str) -> ModuleType:
    """Return the file of a verb, which may have a flag behind it, imported."""
    return importlib.import_module(registry.module_name("verbs", verb.partition(" ")[0]))


def roots() -> dict[str, type[config.Settings]]:
    """Return every settings root by its verb, or by `verb --flag` where a flag asks for another."""
    found: dict[str, type[config.Settings]] = {}
    for verb in registry.names("verbs"):
        file = module(verb)
        if hasattr(file, "ROOT"):
            found[verb] = file.ROOT
        found |= {f"{verb} {flag}": root for flag, root in getattr(file, "ALSO", {}).items()}
    return found


def tables() -> tuple[str, ...]:
    """Return every table name that some verb reads."""
    return tuple(sorted({name for root in roots().values() for name in root.model_fields}))


def load(root: type[S], run_file: Path, overrides: tuple[str, ...]) -> S:
    """Return a verb's settings out of a run file and the command line's assignments."""
    assigned = own(run_file, config.override(config.read(run_file), overrides))
    return config.build(root, assigned, tables(), str(run_file))


def own(run_file: Path, tables: config.Tables) -> config.Tables:
    """Return the tables that a user gives to a verb; the code that they name may be imported.

    A `run.json` may lie anywhere: modules are looked for beside a run file alone.
    """
    registry.allow(tables, run_file.parent if run_file.suffix != ".json" else None)
    return tables


def show(answer: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Print a verb's answer: JSON for machines, one `name: value` line each for people."""
    if as_json:
        log.answer(answer)
    else:
        for name, value in answer.items():
            _show_value(name.replace("_", " "), value)
    return answer


def is_table(value: Any) -> bool:
    """Return whether a value of an answer is a list of rows."""
    rows = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return rows and all(isinstance(row, Mapping) for row in value)


def _show_value(name: str, value: Any) -> None:
    """Print mappings as a table, a mapping or sentences as a line each, anything else as one."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _show_value(f"{name} {key}".replace("_", " "), item)
    elif is_table(value):
        log.stdout.print(_table(name, value), soft_wrap=False)
    elif isinstance(value, tuple | list) and any(" " in str(item) for item in value):
        log.stdout.print(f"{name}:", *value, sep="\n  ", markup=False)
    else:
        log.stdout.print(f"{name}: {_text(value)}", markup=False)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows as a table, with every column that some row has."""
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(key for row in rows for key in row))
    names.sort(key=lambda name: name != "name")
    columns = [[Text(_text(row.get(name, ""))) for row in rows] for name in names]
    headings = [_heading(name, cells) for name, cells in zip(names, columns, strict=True)]
    numbers = [
        any(row.get(name, "") is None or isinstance(row.get(name), int | float) for row in rows)
        for name in names
    ]
    widths = [
        max(text.cell_len for text in (*Text(heading).split(), *cells)) + len("│  ")
        for heading, cells in zip(headings, columns, strict=True)
    ]
    room = log.stdout.width - sum(widths) - len("│")
    words = sum(width for width, number in zip(widths, numbers, strict=True) if not number)
    for heading, number in zip(headings, numbers, strict=True):
        whole = room >= 0 or (number and room + words // 2 >= 0)  # words are folded before numbers
        justify: Literal["left", "right"] = "right" if number else "left"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=whole)
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    return table


def _heading(name: str, cells: Sequence[Text]) -> str:
    """Return a column's name on as many lines as keep the column as narrow as its cells."""
    words = name.replace("_", " ")
    width = max(map(len, words.split())) if words.split() else 1
    return "\n".join(textwrap.wrap(words, max(width, *(cell.cell_len for cell in cells))))


def _text(value: Any) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def spread(
    verb: str,
    settings: config.Settings,
    size: int,
    folder: Path,
    arguments: tuple[str, ...] = (),
) -> None:
    """Run a verb on resolved settings as `size` processes of this machine.

    Raises ChildError with the code of the first process that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = folder / ".request.json"
    request.write_text(json.dumps(config.dump(settings)))
    command = [sys.executable, "-m", "regauge", verb, str(request), *arguments]
    code = processes.start(command, size, folder / "ranks")
    if code:
        problem = f"a process of '{verb}' ended with code {code}"
        raise ChildError(code, f"{problem}; see {folder / 'ranks'}, then start it again")
