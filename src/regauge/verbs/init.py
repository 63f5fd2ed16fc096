"""Write an example run file; without a name, list the examples."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import choices, verbs
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext


def complete_name(context: CompletionContext) -> dict[str, str]:
    """Return the names of example run files that begin with a word, for shell completion."""
    paths = sorted(find_folder().glob(f"{glob.escape(context.incomplete)}*.toml"))
    return {path.stem: _read_description(path) for path in paths}


def main(
    name: Annotated[
        str | None,
        Parameter(help="Name of an example run file, such as quickstart.", completer=complete_name),
    ] = None,
    file: Annotated[
        Path | None, Parameter(help="File to write; by default <name>.toml in this folder.")
    ] = None,
    *,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Write the example run file of this name; never overwrites a file."""
    examples = {path.stem: path for path in sorted(find_folder().glob("*.toml"))}
    if name is None:
        rows = [
            {"name": stem, "description": _read_description(path)}
            for stem, path in examples.items()
        ]
        return verbs.show({"run_files": rows}, as_json=json)
    if name not in examples:
        remedy = choices.did_you_mean(name, [*examples])
        raise SettingsError(f"no example run file '{name}'", remedy)
    example = examples[name]
    target = Path(f"{name}.toml") if file is None else Path(file)
    try:
        with target.open("x", encoding="utf-8") as new_file:
            new_file.write(example.read_text(encoding="utf-8"))
    except FileExistsError:
        raise SettingsError(f"{target} exists", "name another file to write") from None
    except FileNotFoundError:
        raise SettingsError(
            f"no folder {target.parent}", "create it, or name another file"
        ) from None
    return verbs.show(
        {"path": str(target), "description": _read_description(example)}, as_json=json
    )


def find_folder() -> Path:
    """Return the folder of the example run files, in the installed package or in the repository."""
    installed = choices.PACKAGE / "runs"
    return installed if installed.is_dir() else choices.PACKAGE.parent.parent / "runs"


def _read_description(path: Path) -> str:
    """Return the comment in the first line of a run file."""
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    return first_line.removeprefix("#").strip() if first_line.startswith("#") else ""
