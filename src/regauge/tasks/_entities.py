"""Entities in tag sequences (IOB2), counted as in seqeval's default mode.

The tag `B-x` begins an entity of type x, and `I-x` continues it. An `I-x` that continues nothing
also begins an entity (Tjong Kim Sang and De Meulder, 2003, script `conlleval`). Names without these
prefixes, such as parts of speech, are types themselves: then every word is its own entity.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTSIDE = "O"
"""Tag for a word outside any entity."""
_TAG = re.compile(r"([BI])-(.+)", re.DOTALL)


class Entity(NamedTuple):
    """An entity: type, first word, and the word after the last."""

    type: int
    start: int
    stop: int


class TagScheme:
    """Interprets class names as tags."""

    def __init__(self, names: Sequence[str]) -> None:
        parts = [
            match.groups() if (match := _TAG.fullmatch(name)) else ("", name) for name in names
        ]
        is_iob = all(prefix or name == OUTSIDE for prefix, name in parts)
        self.marks_entities = is_iob and any(prefix for prefix, _ in parts)
        """Whether tags mark multi-word entities; otherwise each word is one."""
        if not self.marks_entities:
            parts = [("B", name) for name in names]
        self.types = tuple(dict.fromkeys(name for prefix, name in parts if prefix))
        self._tags = [(prefix, self.types.index(name) if prefix else -1) for prefix, name in parts]

    def find_entities(self, tags: Sequence[int]) -> list[Entity]:
        """Find the entities in a word sequence, in order; `tags` are class numbers."""
        entities: list[Entity] = []
        start, current = 0, -1
        for index, tag in enumerate([*tags, -1]):
            prefix, type_number = self._tags[tag] if tag >= 0 else ("", -1)
            if type_number == current and prefix != "B":
                continue
            if current >= 0:
                entities.append(Entity(current, start, index))
            start, current = index, type_number
        return entities
