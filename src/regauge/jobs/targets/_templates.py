"""Scheduler documents from templates: YAML with Jinja expressions and blocks.

Jinja prints a reference in place of each value, and the parsed YAML gets the value. So values do
not need quotes, and cannot change the structure. A field with the value None or empty is left out,
and so is a mapping or list with only such fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.runtime import Context

_REFERENCE = re.compile(r"<<(\d+)>>")
_INSERTED = "inserted_values"
_EMPTY: tuple[Any, ...] = (None, {}, [], ())


def render_document(path: Path, /, **values: Any) -> dict[str, Any]:
    """Render a template, such as `job.yaml.jinja`, as a JSON-ready mapping."""
    document: dict[str, Any] = _render(path, values)
    return document


def render_documents(path: Path, /, **values: Any) -> list[dict[str, Any]]:
    """Render a template with a list of JSON-ready mappings."""
    documents: list[dict[str, Any]] = _render(path, values)
    return documents


def build_environment(finalize: Callable[..., str] | None = None) -> Environment:
    """Return the Jinja environment for all templates; unknown names are errors."""
    import jinja2

    return jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        autoescape=False,  # noqa: S701 - it renders no HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _render(path: Path, values: dict[str, Any]) -> Any:
    import yaml

    inserted: list[Any] = []
    text = _load_template(path).render(values | {_INSERTED: inserted})
    return _insert(yaml.safe_load(text), inserted)


@cache
def _load_template(path: Path) -> Template:
    import jinja2

    @jinja2.pass_context
    def refer(context: Context, value: Any) -> str:
        """Store a value; return a reference to it."""
        inserted: list[Any] = context[_INSERTED]
        inserted.append(value)
        return f"<<{len(inserted) - 1}>>"

    return build_environment(refer).from_string(path.read_text(encoding="utf-8"))


def _insert(node: Any, values: list[Any]) -> Any:
    """Replace the references in a parsed template with their values."""
    if isinstance(node, dict):
        entries = ((_insert(key, values), _insert(item, values)) for key, item in node.items())
        fields = {key: item for key, item in entries if item is not None}
        return None if node and not fields else fields
    if isinstance(node, list):
        items = [item for entry in node if (item := _insert(entry, values)) is not None]
        return None if node and not items else items
    if not isinstance(node, str):
        return node
    if match := _REFERENCE.fullmatch(node):
        value = values[int(match[1])]
        return None if value in _EMPTY else value
    return _REFERENCE.sub(lambda match: str(values[int(match[1])]), node)
