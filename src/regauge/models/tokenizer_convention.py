"""What a transformers folder says of texts: how many tokens one may have, and in whose manner."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from regauge.errors import SettingsError
from regauge.models.hub import CONFIG

if TYPE_CHECKING:
    from pathlib import Path

Manner = Literal["regauge", "transformers"]
MARK = "texts_read_as"
"""Where a folder's configuration says that a run here left it."""
USUAL: Manner = "transformers"
"""What it is where nothing says it."""
FEWEST = 3
"""Tokens that any program of texts has room for: one of a text, and those around it."""
_LONGEST = 10**9
"""Tokens beyond which a tokenizer's limit says that there is none."""


def mark(folder: Path) -> None:
    """Note in a transformers folder that a run here left it."""
    write_json(folder / CONFIG, {**read_json(folder / CONFIG), MARK: "regauge"})


def of(folder: Path) -> Manner:
    """Return in whose manner the model of a transformers folder reads texts."""
    found: Manner = read_json(folder / CONFIG).get(MARK, USUAL)
    return found


def most_tokens(folder: Path, places: int | None = None) -> int:
    """Return how many tokens a transformers folder's model and tokenizer both can have.

    `places` is how many the model has, where that is known. Raises SettingsError where nothing
    says it.
    """
    positions = read_json(folder / CONFIG).get("max_position_embeddings")
    path = folder / "tokenizer_config.json"
    told = read_json(path).get("model_max_length") if path.is_file() else None
    limits = [places, positions, told]
    known = [int(limit) for limit in limits if limit is not None and limit < _LONGEST]
    if not known:
        raise SettingsError(f"{folder} does not say how long a text may be", "set text.tokens")
    return min(known)


def read_json(path: Path) -> Any:
    """Return a folder's document; raises SettingsError for one that cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {error}", "copy the folder again") from None


def write_json(path: Path, document: object) -> None:
    """Write a folder's document."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
