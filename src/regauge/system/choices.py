"""Finds choices by file name: a folder is a registry of choices.

`tasks/mlm.py` is the choice `mlm` in the folder `tasks`. A new file adds a choice; another package
adds one with an entry point in the group `regauge.<choices>`. Files and folders whose names start
with an underscore are shared by the choices.

A name with a colon, `module:Class` or `file.py:Class`, is custom code. It is imported only if this
command's run file or command line names it. Other files, such as an earlier run's `run.json`,
cannot cause an import.
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

from regauge.system.errors import DataError, SettingsError
from regauge.system.wording import join_alternatives, normalize_key, singularize

PACKAGE = Path(__file__).parents[1]
LOCATIONS = {
    "backends": "inference/backends",
    "executors": "inference/predict/executors",
    "launchers": "jobs/targets",
    "strategies": "training/strategies",
    "trackers": "monitoring/trackers",
    "verbs": "commands",
}
"""Folders of choices that do not live in the folder of their name."""
MODULE_FOLDERS_VARIABLE = "REGAUGE_MODULE_FOLDERS"
"""Environment variable that tells child processes where to search for custom modules."""

MAX_SUGGESTIONS = 3
"""How many known words a remedy lists, if they begin with a misspelled word."""

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_allowed_paths: set[str] = set()
_module_folders: list[str] = []
_custom_modules: set[str] = set()


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return the remedy for a misspelled word: the closest known word, or all known words.

    If the closest word does not begin with the misspelled one, but others do, those are closer.
    Upper and lower case are equal.
    """
    by_lower_case = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.6)
    longer = [name for name in by_lower_case if word and name.startswith(word.lower())]
    if 0 < len(longer) <= MAX_SUGGESTIONS and not set(matches) & set(longer):
        matches = longer
    if matches:
        suggested = join_alternatives(f"'{by_lower_case[name]}'" for name in matches)
        return f"did you mean {suggested}?"
    return f"known: {', '.join(sorted(known)) or 'none'}"


@cache
def names(folder: str) -> tuple[str, ...]:
    """Return the sorted names of a folder's choices; `_` in a file name is `-` in the name."""
    files = (path.stem for path in (PACKAGE / _locate(folder)).glob("*.py"))
    built_in = {stem.rstrip("_").replace("_", "-") for stem in files if not stem.startswith("_")}
    return tuple(sorted(built_in | {point.name for point in _list_entry_points(folder)}))


def _list_entry_points(folder: str) -> importlib.metadata.EntryPoints:
    """Return other packages' entry points for a folder's choices."""
    return _read_entry_points().select(group=f"regauge.{folder.replace('/', '.')}")


@cache
def _read_entry_points() -> importlib.metadata.EntryPoints:
    """Return the entry points of all packages; takes some milliseconds."""
    points: importlib.metadata.EntryPoints = importlib.metadata.entry_points()  # type: ignore[assignment]
    return points


def module_name(folder: str, name: str) -> str:
    location, stem = _locate(folder), name.replace("-", "_")
    if (PACKAGE / location / f"{stem}_.py").exists():
        stem += "_"
    return f"regauge.{location.replace('/', '.')}.{stem}"


def _locate(folder: str) -> str:
    return LOCATIONS.get(folder, folder)


def is_import_path(kind: str) -> bool:
    """Return whether a choice is custom code, such as `module:Class`."""
    return ":" in kind


def check_name(folder: str, name: str) -> None:
    """Raise SettingsError if no file and no entry point has this name; nothing is imported."""
    if not is_import_path(name) and name not in names(folder):
        problem = f"no {name_category(folder)} named '{name}'"
        raise SettingsError(problem, _suggest_choice(folder, name))


@cache
def load(folder: str, name: str) -> type[Any]:
    """Import a choice and return its class, the only class in the file that defines `kind`.

    Raises SettingsError if neither a file nor an entry point has this name.
    """
    check_name(folder, name)
    if is_import_path(name):
        return _load_class(folder, name)
    for point in _list_entry_points(folder):
        if point.name == name:
            return point.load()  # type: ignore[no-any-return]
    module = importlib.import_module(module_name(folder, name))
    classes = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if member.__module__ == module.__name__ and "kind" in vars(member)
    ]
    if len(classes) != 1:
        raise TypeError(f"{module.__name__} must define exactly one choice, not {classes}")
    return classes[0]


def name_category(folder: str) -> str:
    """Return the noun for the choices of a folder, such as `source` for `data/sources`."""
    return singularize(folder.rsplit("/", maxsplit=1)[-1])


def _suggest_choice(folder: str, name: str) -> str:
    """Return the remedy for an unknown choice; classes of choices know their peers' names."""
    word = normalize_key(name)
    matches = [
        choice
        for choice in names(folder)
        if word in getattr(load(folder, choice), "peer_names", ())
    ]
    return f"did you mean '{matches[0]}'?" if matches else did_you_mean(name, names(folder))


def summary(folder: str, name: str) -> str:
    """Return a choice's first docstring line without importing the file."""
    return docstring(folder, name).partition("\n")[0]


def docstring(folder: str, name: str) -> str:
    """Return a choice's docstring without importing the file."""
    if is_import_path(name):
        return inspect.cleandoc(load(folder, name).__doc__ or "")
    path = PACKAGE.parent / (module_name(folder, name).replace(".", "/") + ".py")
    if not path.exists():
        return "Defined in another package."
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def allow_imports(value: Any, folder: Path | None = None) -> None:
    """Permit the import paths that occur in a user's settings, at any depth.

    Modules are searched in `folder`, then in the working directory, then in the installed packages.
    """
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            allow_imports(item, folder)
    elif isinstance(value, str) and _IMPORT_PATH.fullmatch(value):
        _allowed_paths.add(value)
        for module_folder in (folder, Path.cwd()):
            if module_folder is not None and str(module_folder.resolve()) not in _module_folders:
                _module_folders.append(str(module_folder.resolve()))


def list_allowed_paths() -> tuple[str, ...]:
    """Return the import paths allowed by the user's settings, sorted."""
    return tuple(sorted(_allowed_paths))


def module_folders_environment() -> dict[str, str]:
    """Return the environment variable with which child processes find the same custom modules."""
    folders = _list_module_folders()
    return {MODULE_FOLDERS_VARIABLE: os.pathsep.join(folders)} if folders else {}


def _list_module_folders() -> list[str]:
    """Return the module folders of the parent process, then those of this process.

    The variable is read at each call: a forked process receives it after this import.
    """
    variable = os.environ.get(MODULE_FOLDERS_VARIABLE, "")
    inherited = [folder for folder in variable.split(os.pathsep) if folder]
    return [*inherited, *(folder for folder in _module_folders if folder not in inherited)]


def load_function(path: str) -> Any:
    """Import a custom function.

    Raises SettingsError if the function is missing, or if neither the run file nor the command line
    of this command names it.
    """
    module = _load_module(path, "name it there if you trust it")
    name = path.rpartition(":")[2]
    if not callable(getattr(module, name, None)):
        file = getattr(module, "__file__", None) or module.__name__
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        remedy = did_you_mean(name, functions) if functions else f"define it: def {name}():"
        raise SettingsError(f"'{path}': {file} does not define the function '{name}'", remedy)
    return getattr(module, name)


def _load_module(path: str, remedy: str) -> ModuleType:
    """Import the module of an import path; raises SettingsError if the user did not name it."""
    if path not in _allowed_paths:
        problem = f"'{path}' is custom code, but the run file of this command does not name it"
        raise SettingsError(problem, remedy)
    module = _import_module(path.partition(":")[0].removesuffix(".py"), path)
    if not module.__name__.startswith("regauge."):
        _custom_modules.add(module.__name__)
    return module


def find_custom_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost custom code frame in an error's traceback, or None."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_outside_package(frame) and _is_user_code(frame)
    ]
    return frames[-1] if frames else None


def has_custom_code() -> bool:
    """Return whether this process has imported a custom module."""
    return bool(_custom_modules)


def _load_class(folder: str, path: str) -> type[Any]:
    """Import a custom class; the import path becomes its `kind`."""
    remedy = f"set it there as the kind of a {name_category(folder)} if you trust it"
    module = _load_module(path, remedy)
    module_path, _, name = path.partition(":")
    interface = _find_interface(folder)
    candidates = [key for key, value in vars(module).items() if _implements(value, interface)]
    file = getattr(module, "__file__", None) or module_path
    if name not in vars(module):
        remedy = did_you_mean(name, candidates) if candidates else f"define it: class {name}(…)"
        raise SettingsError(f"'{path}': {file} does not define the class '{name}'", remedy)
    choice: type[Any] = vars(module)[name]
    if not _implements(choice, interface):
        base = f"{interface.__module__}.{interface.__name__}"
        raise SettingsError(
            f"'{path}' is not a subclass of {interface.__name__}", f"inherit from {base}"
        )
    if not choice.__module__.startswith("regauge."):
        choice.kind = path
    return choice


def _import_module(module: str, path: str) -> ModuleType:
    """Import a custom module.

    Raises SettingsError if it is missing, and DataError if the import fails.
    """
    folders = _list_module_folders()
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _build_import_error(module, error) from error
        modules = [file.stem for folder in folders for file in Path(folder).glob("*.py")]
        matches = difflib.get_close_matches(module, modules, n=1)
        hint = "put its file into the folder of the run file"
        remedy = f"did you mean '{matches[0]}'?" if matches else hint
        problem = f"'{path}': no module '{module}' in {', '.join(folders)}"
        raise SettingsError(problem, remedy) from None
    except Exception as error:
        raise _build_import_error(module, error) from error


def _build_import_error(module: str, error: Exception) -> DataError:
    """Return the error for a failed module import, with the innermost line of user code."""
    outside = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_outside_package(frame)
    ]
    frames = [frame for frame in outside if _is_user_code(frame)] or outside
    location = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    reason = f"{type(error).__name__}{location}: {' '.join(str(error).split())}"
    return DataError(f"the module '{module}' cannot be imported: {reason}", "correct that file")


def _is_outside_package(frame: traceback.FrameSummary) -> bool:
    return not (frame.filename.startswith("<") or Path(frame.filename).is_relative_to(PACKAGE))


def _is_user_code(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame belongs to a custom module, and not to an installed library."""
    file = Path(frame.filename)
    folders = _list_module_folders()
    return "site-packages" not in file.parts and any(map(file.is_relative_to, folders))


@cache
def _find_interface(folder: str) -> type[Any]:
    """Return the base class of a folder's choices, defined in the folder's package."""
    package = f"regauge.{_locate(folder).replace('/', '.')}"
    base_classes = load(folder, names(folder)[0]).__mro__
    return next(base for base in base_classes if base.__module__ == package)


def _implements(value: Any, interface: type[Any]) -> bool:
    return isinstance(value, type) and issubclass(value, interface) and value is not interface
