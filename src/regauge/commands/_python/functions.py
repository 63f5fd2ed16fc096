"""Builds a verb's Python function from `main` of its command.

The function has the command's parameters, and these in addition:

| parameter | verbs | meaning |
| --- | --- | --- |
| `verbose` | all | print the result, and write log lines to standard error |
| `data` | prepare, train, predict | records of the program, instead of the table `source` |
| `callbacks` | train | objects that this process calls, or import paths |
| `**settings` | all with overrides | overrides as values; `a__b=1` and `**{"a.b": 1}` are `a.b=1` |
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Any, get_args, get_type_hints

from regauge.commands._python.records import write_records
from regauge.commands._python.results import Result, build_result
from regauge.config import apply_overrides, flatten, read
from regauge.config.toml_format import format_toml
from regauge.system import log
from regauge.system.errors import RegaugeError, SettingsError

RUN_FILE, OVERRIDES, JSON, NEXT = "run_file", "overrides", "json", "next"
DATA_VERBS = ("prepare", "train", "predict")
SETTINGS_NAME = "settings"
"""Name of a settings dictionary in messages."""
EXTRA_PARAMETERS: dict[str, Any] = {"callbacks": (), "data": None, "verbose": False}


@functools.cache
def build_function(verb: str) -> Callable[..., Result]:
    """Return a verb's function."""
    main = importlib.import_module(f"regauge.commands.{verb}").main

    @functools.wraps(main)
    def call(*arguments: Any, **keywords: Any) -> Result:
        return _Call(verb, main, arguments, keywords).run()

    call.__module__, call.__name__, call.__qualname__ = "regauge", verb, verb
    vars(call)["__signature__"] = _extend_signature(verb, inspect.signature(main))
    return call


def _extend_signature(verb: str, signature: inspect.Signature) -> inspect.Signature:
    parameters = {name: value for name, value in signature.parameters.items() if name != JSON}
    names = [name for name in EXTRA_PARAMETERS if _has_parameter(verb, name)]
    kind = inspect.Parameter.KEYWORD_ONLY
    for name in names:
        parameters[name] = inspect.Parameter(name, kind, default=EXTRA_PARAMETERS[name])
    if OVERRIDES in signature.parameters:
        variable = inspect.Parameter.VAR_KEYWORD
        parameters[SETTINGS_NAME] = inspect.Parameter(SETTINGS_NAME, variable)
    return signature.replace(parameters=list(parameters.values()), return_annotation=Result)


def _has_parameter(verb: str, name: str) -> bool:
    return {"callbacks": verb == "train", "data": verb in DATA_VERBS}.get(name, True)


class _Call:
    def __init__(
        self,
        verb: str,
        main: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self._verb, self._main = verb, main
        self._signature = inspect.signature(main)
        hints = get_type_hints(main)
        self._paths = {name for name, hint in hints.items() if Path in (hint, *get_args(hint))}
        options = {name: keywords.pop(name) for name in EXTRA_PARAMETERS if name in keywords}
        for name in options:
            if not _has_parameter(verb, name):
                raise TypeError(f"{verb}() got an unexpected keyword argument '{name}'")
        self._options = EXTRA_PARAMETERS | options
        overrides = self._take_overrides(keywords)
        self._bound = self._signature.bind(*arguments, **keywords)
        self._has_settings = isinstance(self._get(RUN_FILE), Mapping)
        if OVERRIDES in self._signature.parameters:
            texts = self._bound.arguments.get(OVERRIDES, ())
            self._bound.arguments[OVERRIDES] = (*texts, *overrides)

    def _take_overrides(self, keywords: dict[str, Any]) -> list[str]:
        if OVERRIDES not in self._signature.parameters:
            return []
        names = [name for name in keywords if name not in self._signature.parameters]
        return [
            f"{name.replace('__', '.')}={format_value(keywords.pop(name), name)}" for name in names
        ]

    def run(self) -> Result:
        """Call the verb."""
        with ExitStack() as stack:
            stack.enter_context(log.embed(verbose=self._options["verbose"]))
            for name, value in self._bound.arguments.items():
                if name in self._paths:
                    self._bound.arguments[name] = self._to_path(name, value, stack)
            self._add_callbacks()
            self._add_data()
            document = self._main(*self._bound.args, **self._bound.kwargs)
        if self._has_settings and NEXT in document:  # their file is removed
            document = {name: value for name, value in document.items() if name != NEXT}
        return build_result(self._verb, document, is_plan=bool(self._get("dry_run")))

    def _get(self, name: str) -> Any:
        return self._bound.arguments.get(name)

    def _add_overrides(self, *overrides: str) -> None:
        """Put overrides before the caller's, which replace them."""
        self._bound.arguments[OVERRIDES] = (*overrides, *self._get(OVERRIDES))

    def _to_path(self, name: str, value: Any, stack: ExitStack) -> Any:
        """Return a text's path, or the path of a new file with a dictionary's settings."""
        if isinstance(value, tuple):
            return tuple(self._to_path(name, item, stack) for item in value)
        if isinstance(value, str):
            return Path(value).expanduser()
        if not isinstance(value, Mapping):
            if value is None or isinstance(value, Path):
                return value
            remedy = "pass a path or a dictionary" if name == RUN_FILE else "pass a path"
            raise SettingsError(f"{name} is of type {type(value).__name__}", remedy)
        if self._verb == "launch":
            problem = "a launched job reads its run file after this call"
            raise SettingsError(problem, "write the settings to a run file and pass its path")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="regauge-settings-")))
        file = folder / f"{SETTINGS_NAME}.json"
        file.write_text(json.dumps(to_json(value, SETTINGS_NAME)), encoding="utf-8")
        stack.push(functools.partial(_rename_file, file))
        return file

    def _add_callbacks(self) -> None:
        callbacks = list(self._options["callbacks"])
        paths = [callback for callback in callbacks if isinstance(callback, str)]
        objects = [callback for callback in callbacks if not isinstance(callback, str)]
        if paths and objects:
            problem = "callbacks are objects and import paths"
            raise SettingsError(problem, "give all of them in the same form")
        if paths:
            self._add_overrides(f"callbacks={json.dumps(paths)}")
        elif objects:
            self._bound.arguments["callbacks"] = objects

    def _add_data(self) -> None:
        """Write the program's records to a file for the verb; prepare it for `train`."""
        data = self._options["data"]
        if data is None:
            return
        if self._verb == "predict":
            target = self._get("to") or self._read_setting("output.folder")
            if target is None:
                raise SettingsError("the predictions need a folder", "name it: to=FOLDER")
            self._bound.arguments["source"] = str(write_records(data, Path(target)).path)
            return
        folder = self._read_setting("data.path")
        if folder is None:
            output = self._read_setting("output.folder")
            if output is None:
                raise SettingsError("the dataset needs a folder", "set data.path")
            folder = f"{output}-data"
            self._add_overrides(f"data.path={json.dumps(folder)}")
        source = write_records(data, Path(folder)).source
        self._add_overrides(f"source={format_value(source, 'source')}")
        if self._verb == "train":
            prepare = importlib.import_module("regauge.commands.prepare").main
            prepare(self._get(RUN_FILE), *self._get(OVERRIDES), dry_run=bool(self._get("dry_run")))

    def _read_setting(self, key: str) -> Any:
        run_file = self._get(RUN_FILE)
        if run_file is None or run_file.is_dir():
            return None
        tables = apply_overrides(read(run_file), self._get(OVERRIDES))
        return dict(flatten(tables)).get(key)


def _rename_file(file: Path, _kind: Any, error: BaseException | None, _trace: Any) -> bool:
    if isinstance(error, RegaugeError):
        error.problem = error.problem.replace(str(file), SETTINGS_NAME)
        texts = (item.replace(str(file), SETTINGS_NAME) for item in error.args)
        error.args = tuple(texts)
    return False


def to_json(value: Any, key: str) -> Any:
    """Return a JSON-ready copy of a setting; `key` names it in messages.

    Paths become text, and numpy numbers become Python numbers. None entries are left out. Raises
    SettingsError for any other type.
    """
    if isinstance(value, Mapping):
        return {
            str(name): to_json(item, f"{key}.{name}")
            for name, item in value.items()
            if item is not None
        }
    if isinstance(value, list | tuple):
        return [to_json(item, key) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, str | bool | int | float):
        return value
    name = type(value).__name__
    raise SettingsError(f"'{key}' is of type {name}", "use text, numbers, lists and dictionaries")


def format_value(value: Any, key: str) -> str:
    """Return a setting as TOML; raises SettingsError for a value that TOML cannot express."""
    if value is None:
        raise SettingsError(f"'{key}' is None", "leave it out")
    return format_toml(to_json(value, key))
