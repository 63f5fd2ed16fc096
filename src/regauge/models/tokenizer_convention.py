"""Tokenizer convention and maximum text length of transformers folders.

In the convention `regauge`, special tokens in a text, such as "[SEP]", are plain text, and a text
ends in an end token. In the convention `transformers`, its tokenizer decides.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from regauge.errors import SettingsError
from regauge.models.hub import CONFIG

if TYPE_CHECKING:
    from pathlib import Path

Convention = Literal["regauge", "transformers"]
CONFIG_KEY = "tokenizer_convention"
"""Key of the convention in a model's `config.json`."""
DEFAULT_CONVENTION: Convention = "transformers"
"""Convention of a folder without the key."""
MIN_TOKENS = 3
"""Minimum text length: one token of text and the special tokens around it."""
_NO_LIMIT = 10**9
"""Limits from this value on mean that a tokenizer has no limit."""


def write_convention(folder: Path) -> None:
    """Record the convention `regauge` in the configuration of a transformers folder."""
    write_json(folder / CONFIG, {**read_json(folder / CONFIG), CONFIG_KEY: "regauge"})


def read_convention(folder: Path) -> Convention:
    """Return the tokenizer convention of a transformers folder."""
    convention: Convention = read_json(folder / CONFIG).get(CONFIG_KEY, DEFAULT_CONVENTION)
    return convention


def reads_token_types(folder: Path) -> bool:
    """Return whether the tokenizer of a transformers folder returns token types.

    Without a declaration in its files, the tokenizer class of transformers decides.
    """
    path = folder / "tokenizer_config.json"
    names = read_json(path).get("model_input_names") if path.is_file() else None
    if names is None:
        from transformers import AutoTokenizer

        names = AutoTokenizer.from_pretrained(str(folder)).model_input_names
    return "token_type_ids" in names


def max_tokens(folder: Path, model_limit: int | None = None) -> int:
    """Return the maximum text length in tokens of a transformers folder's model and tokenizer.

    `model_limit` is the limit of the model, if it is known. Raises SettingsError if there is no
    limit.
    """
    positions = read_json(folder / CONFIG).get("max_position_embeddings")
    path = folder / "tokenizer_config.json"
    tokenizer_limit = read_json(path).get("model_max_length") if path.is_file() else None
    candidates = (model_limit, positions, tokenizer_limit)
    limits = [int(limit) for limit in candidates if limit is not None and 0 < limit < _NO_LIMIT]
    if not limits:
        raise SettingsError(f"{folder} has no maximum text length", "set text.max_seq_length")
    return min(limits)


def read_json(path: Path) -> Any:
    """Read a JSON file of a model folder; raises SettingsError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {error}", "copy the folder again") from None


def write_json(path: Path, document: object) -> None:
    """Write a JSON file of a model folder."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
