"""Tests, benchmarks and examples import names that exist; `make test` does not run all of them."""

from __future__ import annotations

import ast

from architecture.tree import ROOT, sources

FOLDERS = ("tests", "benchmarks", "examples")


def list_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports, also inside of `if` and `try`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def find_missing(text: str, names: dict[str, set[str]]) -> list[str]:
    """Return the names in imports from `regauge` that do not exist; `names` has those by module."""
    missing = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if not node.module.startswith("regauge."):
            continue
        missing += [
            f"{node.module}.{alias.name}"
            for alias in node.names
            if alias.name not in names.get(node.module, ())
            and f"{node.module}.{alias.name}" not in names
        ]
    return missing


def test_imported_names_exist() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    names = {source.module: list_names(source.tree) for source in sources()}
    problems = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in find_missing(path.read_text(encoding="utf-8"), names)
    ]
    assert not problems, "\n".join(problems)


def test_a_missing_name_is_detected() -> None:
    names = {"regauge.a": list_names(ast.parse("x = 1"))}
    assert find_missing("from regauge.a import x, y", names) == ["regauge.a.y"]
    assert find_missing("from regauge.b import x", names) == ["regauge.b.x"]
