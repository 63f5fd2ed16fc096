"""Text files are UTF-8 in every locale."""

from __future__ import annotations

import ast

import pytest

from architecture.tree import Source, calls, sources

TEXT_METHODS = {"read_text", "write_text"}


def find_locale_dependence(source: Source) -> list[str]:
    """Return the calls of a file that read or write text in the encoding of the locale."""
    return [
        f"{source.path}:{node.lineno} {ast.unparse(node.func)}"
        for node in calls(source)
        if _is_locale_dependent(node)
    ]


def _is_locale_dependent(node: ast.Call) -> bool:
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if "encoding" in keywords:
        return False
    is_method = isinstance(node.func, ast.Attribute)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    if (is_method and name in TEXT_METHODS) or keywords.get("text") == "True":
        return True
    mode = keywords.get("mode") or next(
        (ast.unparse(argument) for argument in node.args if _is_mode(argument)), None
    )
    return name == "open" and ("b" not in mode if mode else not is_method)


def _is_mode(argument: ast.expr) -> bool:
    value = argument.value if isinstance(argument, ast.Constant) else None
    return isinstance(value, str) and bool(value) and set(value) <= set("rwaxbt+")


def test_text_is_utf_8() -> None:
    problems = [line for source in sources() for line in find_locale_dependence(source)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "text",
    [
        "path.read_text()",
        "path.write_text(text)",
        "path.open('w')",
        "open(path, 'a')",
        "open(path)",
        "subprocess.run(command, text=True)",
    ],
)
def test_text_in_the_encoding_of_the_locale_is_detected(text: str) -> None:
    assert find_locale_dependence(Source("regauge/a.py", text))


@pytest.mark.parametrize(
    "text",
    ["path.read_text(encoding='utf-8')", "path.open('rb')", "open(path, 'w', encoding='utf-8')"],
)
def test_utf_8_and_bytes_are_accepted(text: str) -> None:
    assert not find_locale_dependence(Source("regauge/a.py", text))
