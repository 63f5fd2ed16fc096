"""Settings classes and their fields, read from syntax trees."""

from __future__ import annotations

import ast

from architecture.tree import Source

ROOTS = {"Settings", "Choice", "KindTable"}


def settings_classes(files: tuple[Source, ...]) -> dict[str, ast.ClassDef]:
    """Return every class that derives from Settings, at any depth, by `path:name`."""
    classes = [
        (source, node)
        for source in files
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    ]
    known = set(ROOTS)
    while True:
        derived = {node.name for _, node in classes if _bases(node) & known} | known
        if derived == known:
            break
        known = derived
    return {f"{source.path}:{node.name}": node for source, node in classes if _bases(node) & known}


def fields(node: ast.ClassDef) -> dict[str, tuple[ast.AnnAssign, str | None]]:
    """Return the fields of a settings class, each with its docstring if it has one."""
    documented = {}
    following = [*node.body[1:], None]
    for statement, after in zip(node.body, following, strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if not name.startswith("_") and "ClassVar" not in ast.unparse(statement.annotation):
                documented[name] = (statement, _text(after))
    return documented


def _bases(node: ast.ClassDef) -> set[str]:
    return {
        name.id if isinstance(name, ast.Name) else name.attr
        for base in node.bases
        for name in ast.walk(base)
        if isinstance(name, ast.Name | ast.Attribute)
    }


def _text(statement: ast.stmt | None) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return None
