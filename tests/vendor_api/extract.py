"""The public names of a vendor's wheel, from its syntax trees; nothing of it is imported.

PYTHONPATH=tests:src python -m vendor_api.extract WHEEL …     writes names/PACKAGE.json
"""

from __future__ import annotations

import ast
import datetime as dt
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from vendor_api.usage import ROOTS, collect_usage

NAMES = Path(__file__).parent / "names"
ANY_KEYWORD = "**"
"""Marks a function that accepts every keyword."""
TABLE = "_PUBLIC_MODULES"
"""The table of public names in torch_tpu, by module."""
Parameters = list[str] | None
"""Names of the parameters of a callable; None if the name is not callable, or unknown."""
Members = dict[str, Parameters]


class Library:
    """The Python files of a library, by the dotted name of their module."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    @classmethod
    def from_wheel(cls, wheel: Path) -> Library:
        """Read the Python files of a wheel."""
        with zipfile.ZipFile(wheel) as archive:
            paths = [path for path in archive.namelist() if path.endswith(".py")]
            return cls({_to_module(path): archive.read(path).decode() for path in paths})

    @classmethod
    def from_folder(cls, folder: Path, paths: Iterable[str]) -> Library:
        """Read the Python files of an installed package."""
        files = [path for path in paths if path.endswith(".py")]
        return cls({_to_module(path): (folder / path).read_text("utf-8") for path in files})

    def has_module(self, name: str) -> bool:
        return name in self._texts

    @cache  # noqa: B019 - a library lives as long as the program
    def _tree(self, module: str) -> ast.Module:
        return ast.parse(self._texts[module])

    def list_names(self, modules: Iterable[str]) -> Members:
        """Return the names of modules, and those of torch.tpu if the library defines them."""
        names: Members = {}
        for module in sorted(modules):
            if self.has_module(module):
                names[module] = None
                names |= {f"{module}.{name}": how for name, how in self._members(module).items()}
        for module in self._texts:
            if f"\n{TABLE}" in self._texts[module]:
                names |= self._read_public_table(module)
        return dict(sorted(names.items()))

    def _members(self, module: str, seen: frozenset[str] = frozenset()) -> Members:
        """Return the public names of a module, with those of its classes."""
        members: Members = {}
        for node in _statements(self._tree(module).body):
            if isinstance(node, ast.FunctionDef):
                members[node.name] = _parameters(node.args)
            elif isinstance(node, ast.ClassDef):
                members |= self._class_members(module, node)
            elif isinstance(node, ast.ImportFrom):
                members |= self._read_imports(module, node, seen | {module})
            else:
                members |= dict.fromkeys(_list_assignments(node))
        return {name: how for name, how in members.items() if not re.search(r"(^|\.)_", name)}

    def _read_imports(self, module: str, node: ast.ImportFrom, seen: frozenset[str]) -> Members:
        source = self._source_of(module, node)
        if source in seen or not self.has_module(source):
            return {alias.asname or alias.name: None for alias in node.names if alias.name != "*"}
        members = self._members(source, seen)
        if any(alias.name == "*" for alias in node.names):
            return members
        return {
            (alias.asname or alias.name) + name.removeprefix(alias.name): how
            for alias in node.names
            for name, how in {alias.name: None, **members}.items()
            if f"{name}.".startswith(f"{alias.name}.")
        }

    def _source_of(self, module: str, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that a statement imports from."""
        if not node.level:
            return node.module or ""
        is_package = any(name.startswith(f"{module}.") for name in self._texts)
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _class_members(self, module: str, node: ast.ClassDef) -> Members:
        """Return a class with its constructor's parameters, and its attributes."""
        bodies = [node.body, *(base.body for base in self._bases(module, node))]
        attributes: Members = {}
        for body in reversed(bodies):
            for statement in body:
                if isinstance(statement, ast.FunctionDef):
                    attributes[statement.name] = _parameters(statement.args)[1:]
                else:
                    attributes |= dict.fromkeys(_list_assignments(statement))
        return {
            node.name: attributes.get("__init__", [ANY_KEYWORD] if node.bases else []),
            **{
                f"{node.name}.{name}": how
                for name, how in attributes.items()
                if not name.startswith("__")
            },
        }

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """Yield the base classes of a class that the same module defines."""
        names = {base.id for base in node.bases if isinstance(base, ast.Name)}
        for other in _statements(self._tree(module).body):
            if isinstance(other, ast.ClassDef) and other.name in names:
                yield other
                yield from self._bases(module, other)

    def _read_public_table(self, module: str) -> Members:
        """Return the names of torch_tpu's table; private attributes of its device class count."""
        names: Members = {}
        for node in self._tree(module).body:
            if not isinstance(node, ast.AnnAssign) or ast.unparse(node.target) != TABLE:
                continue
            assert isinstance(node.value, ast.Dict)
            for key, spec in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Constant)
                assert isinstance(spec, ast.Call)
                names |= self._read_public_module(str(key.value), spec)
        return names

    def _read_public_module(self, public: str, spec: ast.Call) -> Members:
        fields = {keyword.arg: keyword.value for keyword in spec.keywords}
        exports = fields.get("exports")
        device = self._device_class() if "private_fallback" in fields else {}
        names: Members = {public: None}
        if isinstance(exports, ast.Dict):
            for key, target in zip(exports.keys, exports.values, strict=True):
                assert isinstance(key, ast.Constant)
                name = str(key.value)
                names[f"{public}.{name}"] = self._target_parameters(target, device.get(name))
        private = {name: how for name, how in device.items() if name.startswith("_")}
        return names | {f"{public}.{name}": how for name, how in private.items()}

    def _target_parameters(self, target: ast.expr, otherwise: Parameters) -> Parameters:
        """Return the parameters of `"module:function"`."""
        text = target.value if isinstance(target, ast.Constant) else None
        module, _, function = str(text).partition(":")
        return self._members(module).get(function) if self.has_module(module) else otherwise

    def _device_class(self) -> Members:
        module = "torch_tpu._internal.device._device_module"
        node = next(
            node
            for node in self._tree(module).body
            if isinstance(node, ast.ClassDef) and node.name == "TpuDeviceModule"
        )
        members = self._class_members(module, node)
        return {name.partition(".")[2]: how for name, how in members.items() if "." in name}


def _to_module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, with those inside of `if`, `try` and `with`."""
    for node in body:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield from _statements(getattr(node, field, []))


def _parameters(arguments: ast.arguments) -> list[str]:
    named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [argument.arg for argument in named] + [ANY_KEYWORD] * bool(arguments.kwarg)


def _list_assignments(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement assigns or imports as modules."""
    if isinstance(node, ast.Import):
        yield from (alias.asname for alias in node.names if alias.asname)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def find_modules(library: Library, names: Iterable[str]) -> set[str]:
    """Return the modules of a library that contain dotted names, and the packages above them."""
    parts = [name.split(".") for name in names]
    prefixes = {".".join(words[:count]) for words in parts for count in range(1, len(words) + 1)}
    return {prefix for prefix in prefixes if library.has_module(prefix)}


def write_names(wheel: Path) -> Path:
    """Write the names of the modules that Regauge uses; return the file."""
    distribution, version = wheel.name.split("-")[:2]
    library = Library.from_wheel(wheel)
    package = next(
        package
        for root, package in ROOTS.items()
        if library.has_module(root) or library.has_module(package)
    )
    document = {
        "package": re.sub("[-_.]+", "-", distribution),
        "version": version,
        "source": f"wheel {wheel.name}",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "names": library.list_names(find_modules(library, collect_usage()[package])),
    }
    path = NAMES / f"{package}.json"
    path.write_text(_format(document), encoding="utf-8")
    return path


def _format(document: dict[str, object]) -> str:
    """Return JSON with one line per name."""
    names = document["names"]
    assert isinstance(names, dict)
    lines = [f"    {json.dumps(name)}: {json.dumps(how)}" for name, how in names.items()]
    head = json.dumps({**document, "names": None}, indent=2)
    return head.replace('"names": null', '"names": {\n' + ",\n".join(lines) + "\n  }") + "\n"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sys.stdout.write(f"{write_names(Path(argument))}\n")
