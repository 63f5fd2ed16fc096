"""A verb has a `main`; one that reads a run file can also be a stage of a pipeline."""

from __future__ import annotations

import inspect
import shlex
import tomllib
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

from architecture.tree import ROOT, SOURCE
from regauge import commands
from regauge.cli import build_app
from regauge.config import Settings
from regauge.system import choices

STARTERS = ("regauge.commands.pipeline", "regauge.commands.launch")
"""Verbs that start other verbs, and are no stage themselves."""


def find_faults(module: ModuleType | SimpleNamespace) -> list[str]:
    """Return the missing parts of a verb file."""
    problems = [] if callable(getattr(module, "main", None)) else ["it has no main"]
    root = getattr(module, "ROOT", None)
    if root is None or module.__name__ in STARTERS:
        return problems
    problems += [] if callable(getattr(module, "run", None)) else ["it has no run(settings)"]
    problems += (
        [] if _has_output(root, getattr(module, "OUTPUT", None)) else ["OUTPUT names no key"]
    )
    if hasattr(module, "main"):
        missing = {"dry_run", "json", "run_file", "overrides"} - {
            *inspect.signature(module.main).parameters
        }
        problems += [f"main has no {name}" for name in sorted(missing)]
    return problems


def _has_output(root: type[Settings], path: str | None) -> bool:
    model: Any = root
    for name in path.split(".") if path else ():
        if name not in getattr(model, "model_fields", {}):
            return False
        model = model.model_fields[name].annotation
        optional = [option for option in get_args(model) if option is not type(None)]
        model = optional[0] if optional else model
    return True


@pytest.mark.parametrize("verb", choices.names("verbs"))
def test_a_verb_has_what_the_command_line_and_a_pipeline_call(verb: str) -> None:
    assert find_faults(commands.import_verb(verb)) == []


@pytest.mark.parametrize("verb", choices.names("verbs"))
def test_the_help_of_a_verb_ends_with_an_example_that_it_accepts(verb: str) -> None:
    command = choices.docstring("verbs", verb).partition("\n\nFor example:\n\n    $ regauge ")[2]
    assert shlex.split(command)[0] == verb
    build_app().parse_args(command, exit_on_error=False, print_error=False)


def test_no_folder_hides_the_function_of_a_command() -> None:
    """`regauge.models` is a package; the functions of its command are methods of `Registry`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].values()
    folders = {path.name for path in (SOURCE / "regauge").iterdir() if path.is_dir()}
    folders |= {target.removeprefix("regauge/") for target in included}
    assert folders & set(choices.names("verbs")) == {"models"}


class Root(Settings):
    """No keys."""


def complete_main(
    run_file: str, *overrides: str, dry_run: bool = False, json: bool = False
) -> None:
    """Do nothing, with the right parameters."""


def build_verb(**members: Any) -> SimpleNamespace:
    complete = {"__name__": "a", "ROOT": Root, "OUTPUT": None, "main": complete_main, "run": print}
    return SimpleNamespace(**complete | members)


def test_a_whole_verb_has_no_fault() -> None:
    assert find_faults(build_verb()) == []


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ({"main": None, "ROOT": None}, "it has no main"),
        ({"run": None}, "it has no run(settings)"),
        ({"OUTPUT": "no.key"}, "OUTPUT names no key"),
        ({"main": lambda run_file, *overrides, json: (run_file, overrides, json)}, "no dry_run"),
    ],
)
def test_a_fault_is_detected(members: dict[str, Any], fault: str) -> None:
    assert fault in ", ".join(find_faults(build_verb(**members)))
