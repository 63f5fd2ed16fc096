"""Extracts docstrings from Python files, and the topics of `help()`; no code is imported or run."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sysconfig
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from regauge.data.sources import Rejected, Source, _files
from regauge.system.errors import DataError
from regauge.system.garbage import pause_collection

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT_SHARE = 0.3
"""Estimated bytes of documentation per byte of code, for the check of the disk."""
PACKAGE = "package"
"""Prefix of a root that is an installed package."""
TOPICS = "pydoc_data/topics.py"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = ast.Module | ast.ClassDef | Function


class DocumentedObject(NamedTuple):
    """A documented object of a file."""

    location: str
    """Qualified name."""
    text: str
    """The docstring without indentation."""
    kind: Literal["module", "class", "function", "topic"]
    parameters: int | None = None
    """Number of parameters of a function; None for other objects."""


class DocumentationSource(Source):
    """The documentation of the installed Python."""

    roots: tuple[str, ...] = ()
    """"stdlib", "purelib", a folder below these such as "purelib/x", an installed package such as
    "package/torch", or other folders; by default the standard library and all installed
    packages."""
    exclude: tuple[str, ...] = ("test", "tests", "idle_test")
    """Names of folders to skip."""
    min_summary_words: int = Field(default=3, ge=1)
    """Minimum words per summary; records with fewer give no pair."""
    max_summary_words: int = Field(default=40, ge=1)
    """Maximum words per summary; records with more give no pair."""
    min_body_words: int = Field(default=20, ge=1)
    """Minimum words per body; records with fewer give no pair."""

    def list_files(self) -> list[list[_files.InputFile]]:
        """Return the Python files of every root; raises DataError if there are none."""
        roots = self._find_roots()
        files = [
            [_files.stat_file(path) for path in _list_python_files(root, self.exclude)]
            for root in roots
        ]
        if not any(files):
            names = ", ".join(str(root) for root in roots)
            raise DataError(f"no Python files in {names}", "correct source.roots")
        return files

    def split_pair(self, text: str) -> tuple[str, str] | None:
        """Return the summary and the body of a docstring if both have the right length."""
        summary, body = split_docstring(text)
        num_words = len(summary.split())
        is_pair = (
            self.min_summary_words <= num_words <= self.max_summary_words
            and len(body.split()) >= self.min_body_words
        )
        return (summary, body) if is_pair else None

    def _find_roots(self) -> list[Path]:
        folders = [_resolve_root(root) for root in self.roots]
        for folder in folders:
            if not folder.is_dir():
                raise DataError(f"no folder {folder}", "correct source.roots")
        defaults = map(_resolve_root, ("stdlib", "purelib", "platlib"))
        return [folder for folder in dict.fromkeys(folders or defaults) if folder.is_dir()]


def _resolve_root(root: str) -> Path:
    """Return the folder of a root; the first part may be a path name of `sysconfig`.

    For a package it is the folder of its installation; the package is not imported.
    """
    first, *rest = Path(root).parts or (".",)
    if first == PACKAGE and rest:
        spec = importlib.util.find_spec(rest[0])
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"no package '{rest[0]}' is installed", "correct source.roots")
        return Path(spec.submodule_search_locations[0], *rest[1:])
    base = sysconfig.get_path(first) if first in sysconfig.get_path_names() else first
    return Path(base, *rest)


def read_documentation(name: str) -> Iterator[DocumentedObject | Rejected]:
    """Yield the documented objects of a file, or a rejection if it cannot be parsed."""
    try:
        data = Path(name).read_bytes()
        with pause_collection():
            objects = list(_extract_objects(name, data))
    except (SyntaxError, ValueError, RecursionError) as error:
        yield Rejected(name, "the whole file", "invalid Python source", str(error))
        return
    yield from objects


def qualify_name(file: str, location: str) -> str:
    """Return the name of a documented object with its packages, such as `json.decoder.JSONDecoder`.

    `location` is the name without them. Folders with an `__init__.py` are packages.
    """
    path = Path(file)
    if path.as_posix().endswith(TOPICS):
        return location
    packages = _list_packages(path.parent)
    module, _, names = location.partition(".")
    modules = packages if module == "__init__" and packages else (*packages, module)
    return ".".join((*modules, names) if names else modules)


@cache
def _list_packages(folder: Path) -> tuple[str, ...]:
    """Return the names of the packages that a folder belongs to, the outermost first."""
    if not (folder / "__init__.py").is_file():
        return ()
    return (*_list_packages(folder.parent), folder.name)


def split_docstring(text: str) -> tuple[str, str]:
    """Return the first paragraph of a docstring as one line, and the rest.

    Lines of punctuation, such as underlines of titles, are not part of the summary.
    """
    first, _, rest = text.partition("\n\n")
    lines = (line.strip() for line in first.splitlines())
    summary = " ".join(line for line in lines if any(map(str.isalnum, line)))
    return summary, rest.strip("\n")


def _list_python_files(root: Path, exclude: tuple[str, ...]) -> list[Path]:
    excluded = {*exclude, "__pycache__", "site-packages", "dist-packages"}
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in excluded)
        paths.extend(Path(folder, name) for name in sorted(files) if name.endswith(".py"))
    return paths


def _extract_objects(name: str, data: bytes) -> Iterator[DocumentedObject]:
    if Path(name).as_posix().endswith(TOPICS):
        yield from _extract_topics(_parse(data))
    elif b'"""' in data or b"'''" in data:
        stack: list[tuple[str, Node]] = [(Path(name).stem, _parse(data))]
        while stack:
            location, node = stack.pop()
            text = ast.get_docstring(node)
            if text and text.strip():
                yield _describe(location, node, text)
            stack.extend(
                reversed([(f"{location}.{item.name}", item) for item in _list_definitions(node)])
            )


def _describe(location: str, node: Node, text: str) -> DocumentedObject:
    if isinstance(node, Function):
        arguments = node.args
        lists = (arguments.posonlyargs, arguments.args, arguments.kwonlyargs)
        num_parameters = sum(map(len, lists))
        return DocumentedObject(location, text, "function", num_parameters)
    return DocumentedObject(location, text, "class" if isinstance(node, ast.ClassDef) else "module")


def _parse(data: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(data)


def _list_definitions(node: ast.AST) -> Iterator[ast.ClassDef | Function]:
    """Yield the classes and functions of a body, also under `if`, `try` and `with`."""
    for part in ("body", "handlers", "orelse", "finalbody"):
        for item in getattr(node, part, ()):
            if isinstance(item, ast.ClassDef | Function):
                yield item
            elif isinstance(item, ast.If | ast.Try | ast.ExceptHandler | ast.With):
                yield from _list_definitions(item)


def _extract_topics(tree: ast.Module) -> Iterator[DocumentedObject]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in ast.literal_eval(node).items():
                yield DocumentedObject(f"topic {key}", inspect.cleandoc(value).strip(), "topic")
