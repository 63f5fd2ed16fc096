"""Choices are found by their file names; a folder is the registry.

`strategies/ddp.py` is the choice `ddp` of the folder `strategies`, and adding it edits no other
file. A package outside of Regauge adds a choice through an entry point of the group
`regauge.<folder>`. A file whose name starts with an underscore is a part, not a choice.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.metadata
import inspect
from functools import cache
from pathlib import Path
from typing import Any

from regauge.errors import SettingsError

PACKAGE = Path(__file__).parent


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return the remedy for a misspelt word: the nearest known one, or all of them."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {', '.join(sorted(known))}"


@cache
def names(folder: str) -> tuple[str, ...]:
    """Return the names of the choices of a folder, sorted; `-` stands for `_` in a file name."""
    files = (path.stem for path in (PACKAGE / folder).glob("*.py"))
    built_in = {stem.rstrip("_").replace("_", "-") for stem in files if not stem.startswith("_")}
    group = importlib.metadata.entry_points(group=f"regauge.{folder.replace('/', '.')}")
    return tuple(sorted(built_in | {point.name for point in group}))


def module_name(folder: str, name: str) -> str:
    """Return the dotted name of the file that holds a choice."""
    stem = name.replace("-", "_")
    if (PACKAGE / folder / f"{stem}_.py").exists():
        stem += "_"
    return f"regauge.{folder.replace('/', '.')}.{stem}"


@cache
def load(folder: str, name: str) -> type[Any]:
    """Return the class of a choice: the only class its file defines with a `kind` of its own.

    Raises SettingsError for a name that no file and no entry point has.
    """
    if name not in names(folder):
        what = folder.rsplit("/", maxsplit=1)[-1]
        raise SettingsError(f"no {what} named '{name}'", did_you_mean(name, names(folder)))
    for point in importlib.metadata.entry_points(group=f"regauge.{folder.replace('/', '.')}"):
        if point.name == name:
            return point.load()  # type: ignore[no-any-return]
    module = importlib.import_module(module_name(folder, name))
    found = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__ and "kind" in vars(member)
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} must define exactly one choice, found {found}")
    return found[0]


def summary(folder: str, name: str) -> str:
    """Return the first line of a choice's docstring without importing its file."""
    path = PACKAGE.parent / (module_name(folder, name).replace(".", "/") + ".py")
    if not path.exists():
        return "from another package"
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
