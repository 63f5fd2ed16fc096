"""One module reads JSON documents, one reads JSON lines, and no file is opened through a link."""

from __future__ import annotations

import ast

import pytest

from architecture.tree import Source, calls, sources

READERS = {"regauge/system/json_files.py", "regauge/system/jsonl.py"}
"""Modules that decode the content of JSON files, after they checked it."""
LOADS = {"json.load", "json.loads"}
READS = {"read_text", "read_bytes", "read", "open"}
OPENER = "open_in_place"


def find_bare_json_reads(source: Source) -> list[str]:
    """Return the calls that decode the content of a file without a check of its shape."""
    return [
        f"{source.path}:{node.lineno} {ast.unparse(node)}"
        for node in calls(source)
        if ast.unparse(node.func) in LOADS
        and (ast.unparse(node.func) == "json.load" or any(map(_reads_file, node.args)))
    ]


def _reads_file(argument: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
        # `read_text(path)` and `path.read_text()` both read a file.
        and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id) in READS
        for node in ast.walk(argument)
    )


def find_appends_through_links(source: Source) -> list[str]:
    """Return the calls that open a file for appending, and follow a link."""
    return [
        f"{source.path}:{node.lineno} {ast.unparse(node)}"
        for node in calls(source)
        if _appends(node) and not _has_opener(node)
    ]


def _appends(node: ast.Call) -> bool:
    name = ast.unparse(node.func).rpartition(".")[2]
    modes = [
        argument.value
        for argument in (*node.args, *(word.value for word in node.keywords if word.arg == "mode"))
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    return name == "open" and any(mode.startswith("a") for mode in modes)


def _has_opener(node: ast.Call) -> bool:
    openers = [ast.unparse(word.value) for word in node.keywords if word.arg == "opener"]
    return any(opener.rpartition(".")[2] == OPENER for opener in openers)


def test_json_files_have_one_reader() -> None:
    problems = [
        line
        for source in sources()
        if source.path not in READERS
        for line in find_bare_json_reads(source)
    ]
    assert not problems, "\n".join(problems)


def test_appending_follows_no_link() -> None:
    problems = [line for source in sources() for line in find_appends_through_links(source)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "text",
    [
        "json.loads(path.read_text(encoding='utf-8'))",
        "json.loads((folder / 'run.json').read_bytes())['run']",
        "json.loads(read_text(path))",
        "json.load(file)",
        "json.loads(path.open().read())",
    ],
)
def test_a_bare_read_is_detected(text: str) -> None:
    assert find_bare_json_reads(Source("regauge/a.py", text))


@pytest.mark.parametrize("text", ["json.loads(text)", "json.loads(store.get('plan'))"])
def test_other_texts_are_accepted(text: str) -> None:
    assert not find_bare_json_reads(Source("regauge/a.py", text))


@pytest.mark.parametrize("text", ["path.open('ab')", "open(path, 'a+b', buffering=0)"])
def test_an_append_through_a_link_is_detected(text: str) -> None:
    assert find_appends_through_links(Source("regauge/a.py", text))


@pytest.mark.parametrize("text", ["open(path, 'ab', opener=open_in_place)", "path.open('rb')"])
def test_an_opener_and_a_read_are_accepted(text: str) -> None:
    assert not find_appends_through_links(Source("regauge/a.py", text))
