"""The documentation of the Python that is installed: real text with no download.

Docstrings of the standard library and of the installed packages, and the topics of `help()`,
through `ast`: nothing is imported, nothing is run.
"""

from __future__ import annotations

import ast
import gc
import inspect
import os
import sysconfig
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from regauge.data.sources import Piece, Record, Rejected, Source, _files
from regauge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 4 * 2**20
TEXT_SHARE = 0.3
"""Documentation per byte of source, as an estimate for the disk."""
TOPICS = "pydoc_data/topics.py"
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class PythonDocs(Source):
    """Fields: `text` (a whole docstring), and `summary` and `body` (the rest) where both are."""

    duplicates: Literal["keep", "drop"] = "drop"
    """What becomes of a record that equals an earlier one: vendored copies, by default dropped."""
    roots: tuple[str, ...] = ()
    """Folders to scan; none given means this Python's library and installed packages."""
    exclude: tuple[str, ...] = ("test", "tests", "idle_test")
    """Folder names that are passed over."""
    summary_words: int = Field(default=3, ge=1)
    """Words that a summary must have, or the record has no pair."""
    longest_summary_words: int = Field(default=40, ge=1)
    """Words that a summary may have, or the record has no pair."""
    body_words: int = Field(default=20, ge=1)
    """Words that a body must have, or the record has no pair."""

    def fields(self) -> tuple[str, ...]:
        """Return the three fields that every record has."""
        return ("text", "summary", "body")

    def pieces(self) -> tuple[Piece, ...]:
        """Return the Python files of every root in groups of about 4 MiB."""
        found: list[Piece] = []
        for root in self._roots():
            files = _python_files(root, self.exclude)
            found.extend(_files.group(files, PIECE_BYTES, text_share=TEXT_SHARE))
        if not found:
            where = ", ".join(str(root) for root in self._roots())
            raise DataError(f"no Python file under {where}", "correct source.roots")
        return tuple(found)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield a record for every documented object and every topic."""
        for name in piece.files:
            try:
                data = Path(name).read_bytes()
                with _uncollected():
                    documents = list(_documents(name, data))
            except (SyntaxError, ValueError, RecursionError) as error:
                yield Rejected(name, "the whole file", "no Python source", str(error))
                continue
            for place, text in documents:
                yield Record(name, place, self._fields_of(text))

    def _roots(self) -> list[Path]:
        if self.roots:
            for root in self.roots:
                if not Path(root).is_dir():
                    raise DataError(f"no folder {root}", "correct source.roots")
            return [Path(root) for root in dict.fromkeys(self.roots)]
        places = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
        return [Path(place) for place in dict.fromkeys(places) if Path(place).is_dir()]

    def _fields_of(self, text: str) -> dict[str, str | int]:
        summary, body = divide(text)
        short_enough = len(summary.split()) <= self.longest_summary_words
        long_enough = len(summary.split()) >= self.summary_words
        pair = short_enough and long_enough and len(body.split()) >= self.body_words
        return {"text": text, "summary": summary if pair else "", "body": body if pair else ""}


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


def _documents(name: str, data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (qualified name, cleaned text) of what a file documents."""
    if Path(name).as_posix().endswith(TOPICS):
        yield from _topics(_tree(data))
    elif b'"""' in data or b"'''" in data:
        stack: list[tuple[str, Documented]] = [(Path(name).stem, _tree(data))]
        while stack:
            place, node = stack.pop()
            text = ast.get_docstring(node)
            if text and text.strip():
                yield place, text
            stack.extend(reversed([(f"{place}.{item.name}", item) for item in _inside(node)]))


def _tree(data: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(data)


def _inside(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield what a body defines, also under `if`, `try` and `with`."""
    for part in ("body", "handlers", "orelse", "finalbody"):
        for item in getattr(node, part, ()):
            if isinstance(item, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
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


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in ast.literal_eval(node).items():
                yield f"topic {key}", inspect.cleandoc(value).strip()
