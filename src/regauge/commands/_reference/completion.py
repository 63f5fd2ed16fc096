"""Shell completion candidates for run file overrides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from regauge.commands import _reference
from regauge.system import choices

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext


def complete_override(context: CompletionContext) -> dict[str, str]:
    """Return matching `key=` assignments -> description."""
    prefix = context.incomplete
    return {
        f"{path}=": key.format_row()["description"]
        for path, key in list_assignable_keys()
        if path.startswith(prefix)
    }


def list_assignable_keys() -> Iterator[tuple[str, _reference.Key]]:
    """Yield all verbs' keys, and below a choice the keys for each kind."""
    for root in _reference.settings_roots().values():
        for key in _reference.list_keys(root):
            yield key.path, key
            for name in choices.names(key.folder) if key.folder else ():
                for inner_key in _reference.list_keys(choices.load(str(key.folder), name)):
                    yield f"{key.path}.{inner_key.path}", inner_key
