"""The source tree as the architecture tests see it: files, packages and syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

CHOICES = (
    "accelerators",
    "training/strategies",
    "tasks",
    "inference/backends",
    "jobs/targets",
    "monitoring/trackers",
)
"""Folders in which every file is one option."""
OPTION_PACKAGES = {
    f"regauge.{folder.replace('/', '.')}"
    for folder in (*CHOICES, "data/sources", "data/layouts", "inference/predict/executors")
}
"""Packages in which every file is one option; files and folders with an underscore are shared."""


@dataclass(frozen=True)
class Source:
    """One file: its path below `src`, as `regauge/training/strategies/ddp.py`, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """The dotted name; that of the folder for an `__init__.py`."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def is_in(self, *folders: str) -> bool:
        """Return whether the file is in one of the folders below `regauge`."""
        return self.path.startswith(tuple(f"regauge/{folder}/" for folder in folders))

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


@cache
def sources() -> tuple[Source, ...]:
    """Return every Python file of the package."""
    paths = sorted(SOURCE.glob("regauge/**/*.py"))
    return tuple(Source(str(path.relative_to(SOURCE)), path.read_text()) for path in paths)


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def calls(source: Source) -> Iterator[ast.Call]:
    """Yield every call of a file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function from `def` to its end."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstrings(tree: ast.AST) -> set[int]:
    """Return the identities of the constants that are documentation: bare strings."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def imports(source: Source, *, typing: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of every module of Regauge that a file imports.

    Without `typing`, imports for annotations alone are left out.
    """
    annotations = set() if typing else _annotation_imports(source.tree)
    for node in ast.walk(source.tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "regauge":
                    yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            if module.split(".")[0] == "regauge":
                for name in node.names:
                    yield node.lineno, _target(module, name.name)


def _annotation_imports(tree: ast.Module) -> set[int]:
    """Return the identities of the import statements below `if TYPE_CHECKING`."""
    blocks = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    return {id(statement) for block in blocks for statement in ast.walk(block)}


def _target(module: str, name: str) -> str:
    """Return the module that `from module import name` reaches."""
    path = SOURCE / module.replace(".", "/") / name
    return f"{module}.{name}" if path.is_dir() or path.with_suffix(".py").exists() else module
