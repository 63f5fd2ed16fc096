"""Tokenizer convention and maximum text length in transformers folders.

In the convention `regauge`, special tokens in a text, such as "[SEP]", are plain text, and a text
ends in an end token. In the convention `transformers`, its tokenizer decides.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from regauge.system.errors import SettingsError
from regauge.system.hub import CONFIG
from regauge.system.json_files import DocumentShape, check_shape, find_json, read_json

if TYPE_CHECKING:
    from pathlib import Path

Convention = Literal["regauge", "transformers"]
CONFIG_KEY = "tokenizer_convention"
"""Key in a model's `config.json`."""
DEFAULT_CONVENTION: Convention = "transformers"
"""Convention if a folder does not have the key."""
COPY_REMEDY = "copy the folder again"
MIN_TOKENS = 3
"""Minimum text length: one text token and the special tokens around it."""
_NO_LIMIT = 10**9
"""Limits of at least this value mean that a tokenizer is unlimited."""


class ConventionShape(DocumentShape):
    """The keys read from a model's `config.json`."""

    tokenizer_convention: Convention = DEFAULT_CONVENTION
    max_position_embeddings: int | None = None


class LimitShape(DocumentShape):
    """The keys read from a `tokenizer_config.json`."""

    model_max_length: float | None = None


def write_convention(folder: Path) -> None:
    """Record the convention `regauge` in a transformers folder."""
    document = read_json(folder / CONFIG, COPY_REMEDY)
    write_json(folder / CONFIG, {**document, CONFIG_KEY: "regauge"})


def read_convention(folder: Path) -> Convention:
    document = read_json(folder / CONFIG, COPY_REMEDY, ConventionShape)
    convention: Convention = document.get(CONFIG_KEY, DEFAULT_CONVENTION)
    return convention


def reads_token_types(folder: Path) -> bool:
    """Return whether a transformers folder's tokenizer returns token types.

    If its files do not declare it, the transformers tokenizer class decides.
    """
    path = folder / "tokenizer_config.json"
    names = (find_json(path, COPY_REMEDY) or {}).get("model_input_names")
    if names is None:
        from transformers import AutoTokenizer

        names = AutoTokenizer.from_pretrained(str(folder)).model_input_names
    return "token_type_ids" in names


def max_tokens(folder: Path, model_limit: int | None = None) -> int:
    """Return the maximum text length in tokens of a transformers folder's model and tokenizer.

    `model_limit` is the model's limit, if known. Raises SettingsError if there is no limit.
    """
    model_config = read_json(folder / CONFIG, COPY_REMEDY, ConventionShape)
    positions = model_config.get("max_position_embeddings")
    path = folder / "tokenizer_config.json"
    tokenizer_config = find_json(path, COPY_REMEDY) or {}
    check_shape(tokenizer_config, path, COPY_REMEDY, LimitShape)
    tokenizer_limit = tokenizer_config.get("model_max_length")
    candidates = (model_limit, positions, tokenizer_limit)
    limits = [int(limit) for limit in candidates if limit is not None and 0 < limit < _NO_LIMIT]
    if not limits:
        raise SettingsError(f"{folder} has no maximum text length", "set text.max_seq_length")
    return min(limits)


def write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
