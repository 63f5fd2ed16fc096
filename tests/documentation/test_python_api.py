"""docs/reference/python-api.md has the signature of every function, and every exception."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from cyclopts import Parameter

import regauge
from architecture.tree import ROOT
from regauge.commands._python.results import RESULTS, DryRunPlan, Result
from regauge.system import errors

PAGE = (ROOT / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")
PUBLIC = {name: getattr(regauge, name) for name in regauge.__all__ if name != "__version__"}
FUNCTIONS = sorted(name for name, value in PUBLIC.items() if not inspect.isclass(value))
CLASSES = [
    *(value for value in PUBLIC.values() if inspect.isclass(value)),
    *RESULTS.values(),
    DryRunPlan,
    Result,
]
EXCEPTIONS = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, errors.RegaugeError)
]
LINE_LENGTH = 72
"""Characters of a code line that fit into the page."""
HEADING = re.compile(r"^## regauge\.([a-z_]+)$", re.MULTILINE)


def format_signature(name: str, function: Callable[..., Any]) -> str:
    """Return a signature without types; parameters that `--help` hides are left out."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    shown = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if not is_hidden(hints.get(parameter.name))
    ]
    text = str(signature.replace(parameters=shown, return_annotation=inspect.Signature.empty))
    line = f"regauge.{name}{text}"
    if len(line) <= LINE_LENGTH:
        return line
    parameters = textwrap.fill(text[1:-1], LINE_LENGTH - 4)
    return f"regauge.{name}(\n{textwrap.indent(parameters, '    ')}\n)"


def is_hidden(hint: Any) -> bool:
    """Return whether a parameter is not shown on the command line."""
    metadata = getattr(hint, "__metadata__", ())
    return any(isinstance(item, Parameter) and item.show is False for item in metadata)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_a_section_with_its_signature(name: str) -> None:
    signature = format_signature(name, getattr(regauge, name))
    assert f"## regauge.{name}\n\n```text\n{signature}\n```\n" in PAGE


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name: str) -> None:
    tree = ast.parse("\n".join(find_example(PUBLIC[name])))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Attribute)]
    assert calls, "the example does nothing"
    for node in calls:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"regauge.{name}":
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(PUBLIC[name]).bind(*node.args, **keywords)


def find_example(value: Any) -> list[str]:
    """Return the Python lines of the example in a docstring."""
    lines = (inspect.getdoc(value) or "").partition("\nFor example:\n")[2].splitlines()
    prompts = (">>> ", "... ")
    return [line.strip()[4:] for line in lines if line.strip().startswith(prompts)]


@pytest.mark.parametrize("public_class", CLASSES)
def test_a_class_has_an_entry(public_class: type) -> None:
    assert f"\n::: {public_class.__module__}.{public_class.__name__}\n" in PAGE


def test_every_section_is_a_function() -> None:
    assert {name for name in HEADING.findall(PAGE) if name != "errors"} == set(FUNCTIONS)


@pytest.mark.parametrize("exception", EXCEPTIONS[1:])
def test_an_exception_has_a_row_with_its_exit_code(exception: type[errors.RegaugeError]) -> None:
    code = "of the child" if exception is errors.ChildError else exception.exit_code
    summary = (exception.__doc__ or "").partition("\n")[0]
    assert f"| `{exception.__name__}` | {code} | {summary} |\n" in PAGE


def test_a_hidden_parameter_is_not_in_a_signature() -> None:
    assert "chaos" not in format_signature("train", regauge.train)
