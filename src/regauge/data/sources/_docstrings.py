"""Docstrings of Python files, and the topics of `help()`: nothing is imported, nothing is run."""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
import os
import sysconfig
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from regauge.data.sources import Rejected, Source, _files
from regauge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT_SHARE = 0.3
"""Documentation per byte of source, as an estimate for the disk."""
PACKAGE = "package"
TOPICS = "pydoc_data/topics.py"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = ast.Module | ast.ClassDef | Function


class Documented(NamedTuple):
    """What a file documents."""

    place: str
    """Its qualified name."""
    text: str
    """The docstring, cleaned."""
    kind: Literal["module", "class", "function", "topic"]
    parameters: int | None = None
    """How many a function has; None of what is none."""


class Documentation(Source):
    """The documentation of the Python that is installed."""

    roots: tuple[str, ...] = ()
    """"stdlib" and "purelib" (both by default), "purelib/x", "package/torch", or folders."""
    exclude: tuple[str, ...] = ("test", "tests", "idle_test")
    """Folder names that are passed over."""
    summary_words: int = Field(default=3, ge=1)
    """Words that a summary must have, or the record has no pair."""
    longest_summary_words: int = Field(default=40, ge=1)
    """Words that a summary may have, or the record has no pair."""
    body_words: int = Field(default=20, ge=1)
    """Words that a body must have, or the record has no pair."""

    def files(self) -> list[list[_files.File]]:
        """Return the Python files of every root; raises DataError where there is none."""
        roots = self._folders()
        found = [
            [_files.local(path) for path in _python_files(root, self.exclude)] for root in roots
        ]
        if not any(found):
            where = ", ".join(str(root) for root in roots)
            raise DataError(f"no Python file under {where}", "correct source.roots")
        return found

    def pair(self, text: str) -> tuple[str, str] | None:
        """Return the summary and the body of a docstring, where it has both."""
        summary, body = divide(text)
        short_enough = len(summary.split()) <= self.longest_summary_words
        long_enough = len(summary.split()) >= self.summary_words
        whole = short_enough and long_enough and len(body.split()) >= self.body_words
        return (summary, body) if whole else None

    def _folders(self) -> list[Path]:
        places = [_installed(root) for root in self.roots]
        for place in places:
            if not place.is_dir():
                raise DataError(f"no folder {place}", "correct source.roots")
        everything = map(_installed, ("stdlib", "purelib", "platlib"))
        return [place for place in dict.fromkeys(places or everything) if place.is_dir()]


def _installed(root: str) -> Path:
    """Return a folder; one that begins with sysconfig's name of a path lies there.

    A package lies where it is installed, which may be elsewhere; it is not imported.
    """
    first, *rest = Path(root).parts or (".",)
    if first == PACKAGE and rest:
        spec = importlib.util.find_spec(rest[0])
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"no package '{rest[0]}' is installed", "correct source.roots")
        return Path(spec.submodule_search_locations[0], *rest[1:])
    known = sysconfig.get_path(first) if first in sysconfig.get_path_names() else first
    return Path(known, *rest)


def documents(name: str) -> Iterator[Documented | Rejected]:
    """Yield what a file documents, or why it cannot be read."""
    try:
        data = Path(name).read_bytes()
        with _uncollected():
            found = list(_documented(name, data))
    except (SyntaxError, ValueError, RecursionError) as error:
        yield Rejected(name, "the whole file", "no Python source", str(error))
        return
    yield from found


def divide(text: str) -> tuple[str, str]:
    """Return the first paragraph of a cleaned docstring as one line, and the rest.

    Lines of punctuation (the underlines of titles) are no part of a summary.
    """
    first, _, rest = text.partition("\n\n")
    lines = (line.strip() for line in first.splitlines())
    summary = " ".join(line for line in lines if any(map(str.isalnum, line)))
    return summary, rest.strip("\n")


def _python_files(root: Path, exclude: tuple[str, ...]) -> list[Path]:
    passed = {*exclude, "__pycache__", "site-packages", "dist-packages"}
    found: list[Path] = []
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in passed)
        found.extend(Path(folder, name) for name in sorted(files) if name.endswith(".py"))
    return found


def _documented(name: str, data: bytes) -> Iterator[Documented]:
    if Path(name).as_posix().endswith(TOPICS):
        yield from _topics(_tree(data))
    elif b'"""' in data or b"'''" in data:
        stack: list[tuple[str, Node]] = [(Path(name).stem, _tree(data))]
        while stack:
            place, node = stack.pop()
            text = ast.get_docstring(node)
            if text and text.strip():
                yield _described(place, node, text)
            stack.extend(reversed([(f"{place}.{item.name}", item) for item in _inside(node)]))


def _described(place: str, node: Node, text: str) -> Documented:
    if isinstance(node, Function):
        given = node.args
        count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
        return Documented(place, text, "function", count)
    return Documented(place, text, "class" if isinstance(node, ast.ClassDef) else "module")


def _tree(data: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(data)


def _inside(node: ast.AST) -> Iterator[ast.ClassDef | Function]:
    """Yield what a body defines, also under `if`, `try` and `with`."""
    for part in ("body", "handlers", "orelse", "finalbody"):
        for item in getattr(node, part, ()):
            if isinstance(item, ast.ClassDef | Function):
                yield item
            elif isinstance(item, ast.If | ast.Try | ast.ExceptHandler | ast.With):
                yield from _inside(item)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage: a tree holds no cycles, and looking for some costs a third more."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _topics(tree: ast.Module) -> Iterator[Documented]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in ast.literal_eval(node).items():
                yield Documented(f"topic {key}", inspect.cleandoc(value).strip(), "topic")
