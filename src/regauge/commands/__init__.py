"""The commands of Regauge, one file for each.

A command file defines `main`, whose parameters are the command line; `ROOT`, its settings root; and
`plan` and `run`, which take the settings. `OUTPUT` is the settings key of the output folder, which
a pipeline sets. `FLAG_ROOTS` maps flags that read other tables to their roots. A command imports
its machinery inside its functions, so `--help` and checking a run file do not need torch.
"""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from regauge import config
from regauge.run_folders.formatting import UNKNOWN
from regauge.system import children, choices, log, stop_signals
from regauge.system.errors import ChildError
from regauge.system.files import write_atomic

if TYPE_CHECKING:
    from types import ModuleType

    from cyclopts.completion import CompletionContext

S = TypeVar("S", bound=config.Settings)


def complete_override(context: CompletionContext) -> dict[str, str]:
    """Return shell completion candidates for an override; the completer is imported when called."""
    from regauge.commands._reference import complete_override

    return complete_override(context)


# Parameters shared by several verbs, with their command line help.
RunFile = Annotated[Path, Parameter(help="Run file (TOML or JSON), such as a run's run.json.")]
Override = Annotated[
    str,
    Parameter(help="Run file overrides, as key.path=value.", completer=complete_override),
]
Overwrite = Annotated[
    bool, Parameter(help="Replace an earlier command's output in the same folder.")
]
DryRun = Annotated[bool, Parameter(help="Print what would be done, without doing it.")]
AsJson = Annotated[bool, Parameter(help="Print one JSON document to standard output.")]
RUN_FILE_SUFFIXES = (".toml", ".json")


@Parameter(name="*")
@dataclass(frozen=True)
class OutputFormat:
    """Output format; `--json` is the same as `--output json` and `-o json`."""

    json: AsJson = False
    output: Annotated[
        Literal["text", "json"], Parameter(name=("--output", "-o"), help="Output format.")
    ] = "text"

    @property
    def is_json(self) -> bool:
        return self.json or self.output == "json"


TEXT = OutputFormat()


def import_verb(verb: str) -> ModuleType:
    """Import a verb's module; a flag after the verb's name is ignored."""
    return importlib.import_module(choices.module_name("verbs", verb.partition(" ")[0]))


def settings_roots() -> dict[str, type[config.Settings]]:
    """Return verb -> settings root, including every `verb --flag` with another root."""
    roots: dict[str, type[config.Settings]] = {}
    for verb in choices.names("verbs"):
        module = import_verb(verb)
        if hasattr(module, "ROOT"):
            roots[verb] = module.ROOT
        flag_roots = getattr(module, "FLAG_ROOTS", {})
        roots |= {f"{verb} {flag}": root for flag, root in flag_roots.items()}
    return roots


def table_names() -> tuple[str, ...]:
    """Return the names of all tables read by verbs, sorted."""
    return tuple(sorted({name for root in settings_roots().values() for name in root.model_fields}))


def load_settings(root: type[S], run_file: Path, overrides: tuple[str, ...]) -> S:
    """Build a verb's settings from a run file and command line overrides."""
    stop_signals.check_stop()
    tables = allow_user_code(
        run_file, config.apply_overrides(config.read(run_file), overrides, root)
    )
    has_other_tables = not tables.keys() <= root.model_fields.keys()
    return config.build(root, tables, table_names() if has_other_tables else (), str(run_file))


def allow_user_code(run_file: Path, tables: config.Tables) -> config.Tables:
    """Permit importing the custom code named in a user's tables; return the tables.

    Modules are searched in a TOML run file's folder, but not in a `run.json` folder.
    """
    choices.allow_imports(tables, run_file.parent if run_file.suffix != ".json" else None)
    return tables


def show(answer: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Print a verb's answer, as JSON or as one `name: value` line per entry, and return it."""
    if as_json:
        log.print_json(answer)
    else:
        lines = {name: answer[name] for name in answer if name != "code" or "error" not in answer}
        for name, value in lines.items():
            _show_value(name.replace("_", " "), value)
    return answer


def is_table(value: Any) -> bool:
    """Return whether an answer's value is a nonempty list of mappings, the rows of a table."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_list and all(isinstance(row, Mapping) for row in value)


def _show_value(name: str, value: Any) -> None:
    """Print rows as a table, a mapping or texts as several lines, any other value as one line."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _show_value(f"{name} {key}".replace("_", " "), item)
    elif is_table(value):
        log.stdout.print(_build_table(name, value), soft_wrap=False)
    elif isinstance(value, tuple | list) and any(" " in str(item) for item in value):
        log.stdout.print(f"{name}:", *value, sep="\n  ", markup=False)
    else:
        log.stdout.print(f"{name}: {_format_value(value)}", markup=False)


def _build_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Build a table with all rows' columns; the column `name` comes first."""
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(key for row in rows for key in row))
    names.sort(key=lambda name: name != "name")
    columns = [_build_column(name, rows) for name in names]
    spare_width = log.stdout.width - sum(column.width for column in columns) - len("│")
    text_width = sum(column.width for column in columns if not column.is_numeric)
    for column in columns:
        # If the table is too wide, text columns are folded before numeric columns.
        no_wrap = spare_width >= 0 or (column.is_numeric and spare_width + text_width // 2 >= 0)
        justify: Literal["left", "right"] = "right" if column.is_numeric else "left"
        table.add_column(column.heading, justify=justify, overflow="fold", no_wrap=no_wrap)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


class _Column(NamedTuple):
    """A table column; its heading is folded to the cell width."""

    heading: str
    cells: list[Text]
    is_numeric: bool

    @property
    def width(self) -> int:
        """Width in characters, with one border and the spaces around the cells."""
        texts = (*Text(self.heading).split(), *self.cells)
        max_length: int = max(text.cell_len for text in texts)
        return max_length + len("│  ")


def _build_column(name: str, rows: Sequence[Mapping[str, Any]]) -> _Column:
    values = [row.get(name, "") for row in rows]
    cells = [Text(_format_value(value)) for value in values]
    heading = name.replace("_", " ")
    min_width = max(map(len, heading.split()), default=1)
    lines = textwrap.wrap(heading, max(min_width, *(cell.cell_len for cell in cells)))
    is_numeric = any(_is_number(value) for value in values)
    return _Column("\n".join(lines), cells, is_numeric)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _format_value(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ", ".join(map(_format_value, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def run_in_processes(
    verb: str,
    settings: config.Settings,
    size: int,
    folder: Path,
    arguments: tuple[str, ...] = (),
) -> None:
    """Run a verb with resolved settings in `size` local processes.

    `arguments` are appended to its command line. Raises ChildError with the exit code of the first
    process that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = folder / ".request.json"
    write_atomic(request, json.dumps(config.dump(settings)), durable=False)
    command = [sys.executable, "-m", "regauge", verb, str(request), *arguments]
    code = children.run_processes(command, size, folder / "ranks", quiet=log.is_embedded())
    if code:
        problem = f"a process of '{verb}' ended with exit code {code}"
        raise ChildError(code, f"{problem}; see the logs in {folder / 'ranks'}, then run it again")
