"""Entities in tag sequences: IOB1, IOB2, IO, IOE, BIOES, BILOU and BMES, as in seqeval.

A tag is a prefix and a type, such as `B-x`. The prefixes that occur determine the scheme. IOB, IO
and IOE are read as by seqeval's default mode, where an `I-x` that continues nothing also begins an
entity (Tjong Kim Sang and De Meulder, 2003, script `conlleval`). BIOES and its variants mark both
ends, and are read as by seqeval's strict mode: entities without a begin or an end do not count.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTSIDE = "O"
"""Tag for a word outside any entity."""
UNTYPED = "_"
"""Entity type for tags without one, such as `B`."""
SCHEMES = {"BI": False, "IE": False, "BIES": True, "BILU": True, "BMES": True, "BMEW": True}
"""Prefixes -> whether they mark both ends of an entity."""
ROLES = {"L": "E", "U": "S", "M": "I", "W": "S"}
"""Prefix -> BIOES prefix with the same meaning."""
_TAG = re.compile(r"([BIELSUMW])(?:[-_](.+))?", re.DOTALL)


class Entity(NamedTuple):
    """An entity: type, first word, and the word after the last."""

    type: int
    start: int
    stop: int


class TagScheme:
    """Interprets class names as tags.

    In names without prefixes, adjacent words with the same name are one entity if there is an `O`,
    as in IO. Otherwise, as for parts of speech, each word is one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        matches = [_TAG.fullmatch(name) for name in names if name != OUTSIDE]
        prefixes = {match[1] if match else "" for match in matches}
        scheme = next((letters for letters in SCHEMES if prefixes <= set(letters)), "")
        self._marks_ends = bool(scheme) and SCHEMES[scheme]
        plain = "I" if OUTSIDE in names else "S"
        parts = {name: (plain, name) for name in names}
        if scheme:
            parts = {
                match[0]: (ROLES.get(match[1], match[1]), match[2] or UNTYPED)
                for match in matches
                if match
            }
        kinds = dict.fromkeys(parts[name][1] for name in names if name != OUTSIDE)
        self.types = tuple(kinds)
        self._tags = [
            ("", -1) if name == OUTSIDE else (parts[name][0], self.types.index(parts[name][1]))
            for name in names
        ]

    def find_entities(self, tags: Sequence[int]) -> list[Entity]:
        """Find the entities in a word sequence, in order; `tags` are class numbers."""
        entities: list[Entity] = []
        start, current = 0, -1
        for index, tag in enumerate([*tags, -1]):
            prefix, type_number = self._tags[tag] if tag >= 0 else ("", -1)
            if current >= 0 and (type_number != current or prefix in {"B", "S"}):
                if not self._marks_ends:
                    entities.append(Entity(current, start, index))
                current = -1
            if current < 0 and (prefix in {"B", "S"} or not self._marks_ends):
                start, current = index, type_number
            if current >= 0 and prefix in {"E", "S"}:
                entities.append(Entity(current, start, index + 1))
                current = -1
        return entities
