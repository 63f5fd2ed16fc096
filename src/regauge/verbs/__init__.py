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
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from regauge import choices, config, log, processes
from regauge.errors import ChildError
from regauge.results.formatting import UNKNOWN

if TYPE_CHECKING:
    from types import ModuleType

S = TypeVar("S", bound=config.Settings)

# The parameters that every verb with a run file has, with their help on the command line.
RunFile = Annotated[Path, Parameter(help="a run file (TOML), or the run.json of an earlier run")]
Override = Annotated[str, Parameter(help="key.path=value, laid over the run file")]
DryRun = Annotated[bool, Parameter(help="show what would happen, and do nothing")]
AsJson = Annotated[bool, Parameter(help="print one JSON document on standard output")]
RUN_FILES = (".toml", ".json")
"""Ends of the names of run files."""


def module(verb: str) -> ModuleType:
    """Return the file of a verb, which may have a flag behind it, imported."""
    return importlib.import_module(choices.module_name("verbs", verb.partition(" ")[0]))


def roots() -> dict[str, type[config.Settings]]:
    """Return every settings root by its verb, or by `verb --flag` where a flag asks for another."""
    found: dict[str, type[config.Settings]] = {}
    for verb in choices.names("verbs"):
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
    choices.allow(tables, run_file.parent if run_file.suffix != ".json" else None)
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
    columns = [_column(name, rows) for name in names]
    room = log.stdout.width - sum(column.width for column in columns) - len("│")
    words = sum(column.width for column in columns if not column.number)
    for column in columns:
        # Words are folded before numbers are.
        whole = room >= 0 or (column.number and room + words // 2 >= 0)
        justify: Literal["left", "right"] = "right" if column.number else "left"
        table.add_column(column.heading, justify=justify, overflow="fold", no_wrap=whole)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


class _Column(NamedTuple):
    """A column of a table, with its name on as many lines as keep it as narrow as its cells."""

    heading: str
    cells: list[Text]
    number: bool

    @property
    def width(self) -> int:
        """Return the characters that it takes, with a line before it and spaces around it."""
        parts = (*Text(self.heading).split(), *self.cells)
        widest: int = max(text.cell_len for text in parts)
        return widest + len("│  ")


def _column(name: str, rows: Sequence[Mapping[str, Any]]) -> _Column:
    values = [row.get(name, "") for row in rows]
    cells = [Text(_text(value)) for value in values]
    words = name.replace("_", " ")
    narrowest = max(map(len, words.split()), default=1)
    lines = textwrap.wrap(words, max(narrowest, *(cell.cell_len for cell in cells)))
    number = any(value is None or isinstance(value, int | float) for value in values)
    return _Column("\n".join(lines), cells, number)


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
