"""Files, functions, parameters and settings classes stay small."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable

import pytest

from architecture.settings_classes import fields, settings_classes
from architecture.tree import Source, functions, length, sources

PACKAGE_LINES = 109_050
"""All lines of Python, which should fall: remove some before adding more."""
FILE_LINES = 500
FUNCTION_LINES = 60
POSITIONAL = 5
FIELDS = 12


def find_excesses(source: Source) -> list[str]:
    """Return everything in a file that is too large."""
    problems = []
    if source.lines > FILE_LINES:
        problems.append(f"{source.path} has {source.lines} lines, more than {FILE_LINES}")
    for node in functions(source):
        location = f"{source.path}:{node.lineno} {node.name}"
        if length(node) > FUNCTION_LINES:
            problems.append(f"{location} has {length(node)} lines, more than {FUNCTION_LINES}")
        if count_positional(node) > POSITIONAL:
            problems.append(f"{location} has {count_positional(node)} positional parameters")
    return problems


def count_positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the parameters that can be given by position, without `self` and `cls`."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def find_large_settings(files: tuple[Source, ...]) -> list[str]:
    """Return the settings classes that should be split."""
    return [
        f"{name} has {len(fields(node))} fields, more than {FIELDS}: make a section of some"
        for name, node in settings_classes(files).items()
        if len(fields(node)) > FIELDS
    ]


def test_files_functions_and_parameters() -> None:
    problems = [line for source in sources() for line in find_excesses(source)]
    assert not problems, "\n".join(problems)


def test_the_package_does_not_grow(report: Callable[[str], None]) -> None:
    lines = sum(source.lines for source in sources())
    report(f"{lines} lines of Python in src, at most {PACKAGE_LINES}")
    assert lines <= PACKAGE_LINES


def test_settings_classes() -> None:
    assert settings_classes(sources())
    problems = find_large_settings(sources())
    assert not problems, "\n".join(problems)


def test_functions_are_short(report: Callable[[str], None]) -> None:
    lengths = sorted(length(node) for source in sources() for node in functions(source))
    median, p95 = statistics.median(lengths), statistics.quantiles(lengths, n=20)[-1]
    longest = max(source.lines for source in sources())
    report(
        f"{len(lengths)} functions: median {median:.0f} lines, p95 {p95:.0f}, longest "
        f"{lengths[-1]}; {len(sources())} files, longest {longest} lines"
    )
    assert median <= 10


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n" * (FILE_LINES + 1),
        "def f():\n" + "    x = 1\n" * FUNCTION_LINES,
        "def f(a, b, c, d, e, f): ...",
        "class A:\n    def f(self, a, b, c, d, e, f): ...",
    ],
)
def test_too_large_code_is_detected(text: str) -> None:
    assert find_excesses(Source("regauge/training/trainer.py", text))


def test_small_code_is_accepted() -> None:
    text = "class A:\n    def f(self, a, b, c, d, e, *, f): ...\n"
    assert not find_excesses(Source("regauge/training/trainer.py", text))


def test_a_settings_class_that_is_too_large_is_detected() -> None:
    body = "".join(f"    a{number}: int\n" for number in range(FIELDS + 1))
    text = f"class Base(Settings):\n    ...\nclass Large(Base):\n{body}"
    assert find_large_settings((Source("regauge/a.py", text),))
