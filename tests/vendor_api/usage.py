"""The names of the vendors' libraries that Regauge uses, from its syntax trees; no import."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from architecture.tree import Source, sources

ROOTS = {
    "torch_xla": "torch_xla",
    "torch.tpu": "torch_tpu",
    "torch_neuronx": "torch_neuronx",
    "torch_neuron": "torch_neuron",
    "neuronx_distributed": "neuronx_distributed",
    "habana_frameworks": "habana_frameworks",
    "pynvml": "pynvml",
    "pyhlml": "pyhlml",
}
"""Modules of the vendors, and the packages that provide them."""
DYNAMIC_IMPORT = "import_module"
DEVICE_MODULE = "get_device_module"
Usage = dict[str, set[str]]
"""Dotted names, and the keywords that they are called with."""


def collect_usage(files: Iterable[Source] | None = None) -> dict[str, Usage]:
    """Return the names that Regauge uses, by package of the vendor."""
    usage: dict[str, Usage] = defaultdict(lambda: defaultdict(set))
    for source in sources() if files is None else files:
        for name, keywords in _Names().collect(source.tree):
            usage[ROOTS[find_root(name) or ""]][name] |= keywords
    return {package: dict(names) for package, names in usage.items()}


def find_root(name: str) -> str | None:
    """Return the module of a vendor to which a dotted name belongs, or None."""
    return next((root for root in ROOTS if f"{name}.".startswith(f"{root}.")), None)


class _Names(ast.NodeVisitor):
    """Resolves names that a scope, or a scope around it, binds to a module of a vendor.

    A name of a module, such as a parameter `pynvml`, counts as that module.
    """

    def __init__(self) -> None:
        self._scopes: list[dict[str, str | None]] = [
            {root: root for root in ROOTS if "." not in root}
        ]
        self._names: list[tuple[str, set[str]]] = []

    def collect(self, tree: ast.AST) -> list[tuple[str, set[str]]]:
        """Return the names of a tree, with the keywords of each call."""
        self._scopes.append({"torch": "torch"})
        self.visit(tree)
        return [(name, keywords) for name, keywords in self._names if find_root(name)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scopes.append({})
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._names.append((alias.name, set()))
            if alias.asname:
                self._scopes[-1][alias.asname] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            self._names.append((name, set()))
            self._scopes[-1][alias.asname or alias.name] = name

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, node.value)
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        """Bind a local to a module or to an instance of a class; any other value hides them."""
        module = instance = None
        if isinstance(value, ast.Call):
            module, name = self._resolve(value), self._resolve(value.func) or ""
            instance = name if name.rpartition(".")[2][:1].isupper() else None
        if module:
            self._names.append((module, set()))
        for local in ast.walk(target):
            if isinstance(local, ast.Name):
                self._scopes[-1][local.id] = module or instance

    def visit_Call(self, node: ast.Call) -> None:
        keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
        if name := self._resolve(node.func):
            self._names.append((name, keywords))
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            self._visit_getattr(node)
        elif name is None:
            self.visit(node.func)

    def _visit_getattr(self, node: ast.Call) -> None:
        """Record an attribute whose name is a literal."""
        module, attribute = self._resolve(node.args[0]), node.args[1]
        if module and isinstance(attribute, ast.Constant):
            self._names.append((f"{module}.{attribute.value}", set()))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := self._resolve(node):
            self._names.append((name, set()))
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Visit a string of several lines that is a program for another process."""
        if isinstance(node.value, str) and "\nimport " in node.value:
            for statement in _parse(node.value):
                self.visit(statement)

    def _resolve(self, node: ast.expr) -> str | None:
        """Return the dotted name of an expression if it is of a vendor's module, or None."""
        if isinstance(node, ast.Attribute):
            base = self._resolve(node.value)
            return f"{base}.{node.attr}" if base else None
        if isinstance(node, ast.Call):
            return self._resolve_module(node)
        if isinstance(node, ast.Name):
            scopes = (scope[node.id] for scope in reversed(self._scopes) if node.id in scope)
            return next(scopes, None)
        return None

    def _resolve_module(self, node: ast.Call) -> str | None:
        """Return the module of `import_module("…")` or `torch.get_device_module("…")`."""
        function = ast.unparse(node.func).rpartition(".")[2]
        literal = node.args[0] if node.args else None
        if not isinstance(literal, ast.Constant):
            return None
        if function == DYNAMIC_IMPORT and find_root(str(literal.value)):
            return str(literal.value)
        return f"torch.{literal.value}" if function == DEVICE_MODULE else None


def _parse(text: str) -> Iterator[ast.stmt]:
    try:
        yield from ast.parse(text).body
    except SyntaxError:
        return
