"""Documents of schedulers from templates: YAML with the expressions and blocks of Jinja.

Jinja prints a reference in place of each value, and the parsed YAML gets the value. So values need
no quotes, and cannot change the structure. A field whose value is None or empty is left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_REFERENCE = re.compile(r"<<(\d+)>>")
_EMPTY: tuple[Any, ...] = (None, {}, [], ())


def render_document(path: Path, /, **values: Any) -> Any:
    """Return the document of a template, such as `job.yaml.jinja`, as a JSON-ready value."""
    import jinja2
    import yaml

    inserted: list[Any] = []

    def refer(value: Any) -> str:
        inserted.append(value)
        return f"<<{len(inserted) - 1}>>"

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        finalize=refer,
        autoescape=False,  # noqa: S701 - YAML is not HTML
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.from_string(path.read_text(encoding="utf-8")).render(values)
    return _insert(yaml.safe_load(text), inserted)


def _insert(node: Any, values: list[Any]) -> Any:
    """Return a parsed template with the values of its references."""
    if isinstance(node, dict):
        entries = ((_insert(key, values), _insert(item, values)) for key, item in node.items())
        return {key: item for key, item in entries if item is not None}
    if isinstance(node, list):
        return [item for entry in node if (item := _insert(entry, values)) is not None]
    if not isinstance(node, str):
        return node
    if match := _REFERENCE.fullmatch(node):
        value = values[int(match[1])]
        return None if value in _EMPTY else value
    return _REFERENCE.sub(lambda match: str(values[int(match[1])]), node)
