"""Choices are found by their file names; a folder is the registry.

`strategies/ddp.py` is the choice `ddp` of the folder `strategies`, and adding it edits no other
file. A package outside of Regauge adds a choice through an entry point of the group
`regauge.<folder>`. A file whose name starts with an underscore is a part, not a choice.

A name with a colon, `module:Class`, is a user's own code. It is imported only where the run file or
the command line of this command names it; what else is read, such as an earlier run, cannot ask.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from regauge.errors import DataError, SettingsError

PACKAGE = Path(__file__).parent
PLACES = "REGAUGE_PLACES"
"""Set by our own launcher: the folders where the modules of a run file are looked for."""

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_named: set[str] = set()
_places: list[str] = []


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return the remedy for a misspelt word: the nearest known one, or all of them, or none."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {', '.join(sorted(known)) or 'none'}"


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
    if ":" in name:
        return _own(folder, name)
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
    if ":" in name:
        return (load(folder, name).__doc__ or "").strip().partition("\n")[0]
    path = PACKAGE.parent / (module_name(folder, name).replace(".", "/") + ".py")
    if not path.exists():
        return "from another package"
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def allow(written: Any, beside: Path | None = None) -> None:
    """Let the import paths in what a user wrote be loaded, at any depth of its tables.

    Modules are looked for in the folder `beside`, then in the working directory, then among the
    installed ones.
    """
    if isinstance(written, dict | list | tuple):
        for item in written.values() if isinstance(written, dict) else written:
            allow(item, beside)
    elif isinstance(written, str) and _PATH.fullmatch(written):
        _named.add(written)
        for found in (beside, Path.cwd()):
            if found is not None and str(found.resolve()) not in _places:
                _places.append(str(found.resolve()))


def places() -> dict[str, str]:
    """Return the environment variable by which processes that are started find the same modules."""
    found = _looked()
    return {PLACES: os.pathsep.join(found)} if found else {}


def _looked() -> list[str]:
    """Return the folders that our launcher told, which a forked process hears late, and ours."""
    told = [found for found in os.environ.get(PLACES, "").split(os.pathsep) if found]
    return [*told, *(found for found in _places if found not in told)]


def function(path: str) -> Any:
    """Return the function at an import path of a user's own code.

    Raises SettingsError where this command's run file or command line does not name it, and for
    none.
    """
    module = _allowed(path, "give it there, if it is yours")
    name = path.rpartition(":")[2]
    if not callable(getattr(module, name, None)):
        where = getattr(module, "__file__", None) or module.__name__
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        remedy = did_you_mean(name, known) if known else f"define one: def {name}():"
        raise SettingsError(f"'{path}': {where} has no function '{name}'", remedy)
    return getattr(module, name)


def _allowed(path: str, remedy: str) -> ModuleType:
    """Return the module of an import path that a user named; raises SettingsError for another."""
    if path not in _named:
        problem = f"'{path}' is code, and the run file of this command does not name it"
        raise SettingsError(problem, remedy)
    return _imported(path.partition(":")[0], path)


def _own(folder: str, path: str) -> type[Any]:
    """Return the class at an import path, which is then its `kind`."""
    module = _allowed(path, f"give it there as a kind of {folder}, if it is yours")
    module_path, _, name = path.partition(":")
    interface = _interface(folder)
    fitting = [key for key, value in vars(module).items() if _fits(value, interface)]
    where = getattr(module, "__file__", None) or module_path
    if name not in vars(module):
        remedy = did_you_mean(name, fitting) if fitting else f"define one: class {name}(…)"
        raise SettingsError(f"'{path}': {where} has no class '{name}'", remedy)
    found = vars(module)[name]
    if not _fits(found, interface):
        wanted = f"{interface.__module__}.{interface.__name__}"
        raise SettingsError(f"'{path}' is no {interface.__name__}", f"let it inherit from {wanted}")
    chosen: type[Any] = found
    if not chosen.__module__.startswith("regauge."):
        chosen.kind = path
    return chosen


def _imported(module: str, path: str) -> ModuleType:
    """Import a user's module; raises SettingsError for none, DataError for one that fails."""
    sys.path[:0] = [found for found in _looked() if found not in sys.path]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(module, error) from error
        known = [file.stem for found in _looked() for file in Path(found).glob("*.py")]
        near = difflib.get_close_matches(module, known, n=1)
        remedy = f"did you mean '{near[0]}'?" if near else "put its file beside the run file"
        looked = ", ".join(_looked())
        raise SettingsError(f"'{path}': no module '{module}' in {looked}", remedy) from None
    except Exception as error:
        raise _failed(module, error) from error


def _failed(module: str, error: Exception) -> DataError:
    every = [each for each in traceback.extract_tb(error.__traceback__) if _outside(each)]
    frames = [frame for frame in every if _of_user(frame)] or every
    where = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    what = f"{type(error).__name__}{where}: {' '.join(str(error).split())}"
    return DataError(f"the module '{module}' cannot be imported: {what}", "correct it there")


def _outside(frame: traceback.FrameSummary) -> bool:
    return not (frame.filename.startswith("<") or Path(frame.filename).is_relative_to(PACKAGE))


def _of_user(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is of a user's own file, and not of a library beside it."""
    file = Path(frame.filename)
    return "site-packages" not in file.parts and any(map(file.is_relative_to, _looked()))


@cache
def _interface(folder: str) -> type[Any]:
    """Return what every choice of a folder is: the class of the folder itself."""
    package = f"regauge.{folder.replace('/', '.')}"
    lineage = load(folder, names(folder)[0]).__mro__
    return next(base for base in lineage if base.__module__ == package)


def _fits(value: Any, interface: type[Any]) -> bool:
    return isinstance(value, type) and issubclass(value, interface) and value is not interface
