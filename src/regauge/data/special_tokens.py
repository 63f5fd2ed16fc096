"""Special tokens around texts: read from a tokenizer's post-processor, and written as one.

A post-processor places special tokens around a text, and around the two texts in a pair. To read
them, the library applies it to placeholder tokens, so the result does not depend on a vocabulary.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer, models

from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_PLACEHOLDERS = {"a": 2**32 - 1, "b": 2**32 - 2}
"""Token ids outside any vocabulary, for the first and second text."""


class SpecialTokens(NamedTuple):
    """Special token ids around a text."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def read_special_tokens(tokenizer: Tokenizer, folder: Path) -> SpecialTokens:
    """Return the special tokens added to a text by a tokenizer's post-processor.

    Raises DataError if it does not keep the text once.
    """
    ids = _apply_post_processor(tokenizer)[0]
    text = _PLACEHOLDERS["a"]
    if ids.count(text) != 1:
        raise DataError(
            f"the post-processor of {folder} returns the text {ids.count(text)} times",
            "set post_processor in its tokenizer.json to a template with one $A",
        )
    start = ids.index(text)
    return SpecialTokens(tuple(ids[:start]), tuple(ids[start + 1 :]))


def read_role_id(tokenizer: Tokenizer, config: Mapping[str, Any], *roles: str) -> int | None:
    """Return the id of the first role, such as "eos", defined in a tokenizer."""
    for role in roles:
        token = config.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        token_id = tokenizer.token_to_id(text) if text else None
        if token_id is not None:
            return int(token_id)
    return None


def enclose_texts(document: dict[str, Any], special_tokens: SpecialTokens) -> bool:
    """Set the post-processor in a `tokenizer.json`; return whether that changes a token id.

    A text is enclosed in the special tokens. A pair's second text only ends in them, as in dataset
    rows.
    """
    tokenizer = Tokenizer.from_str(json.dumps(document))
    prefix, suffix = special_tokens
    single = [
        *_describe_tokens(tokenizer, prefix, 0),
        _describe_text("A", 0),
        *_describe_tokens(tokenizer, suffix, 0),
    ]
    pair = [*single, _describe_text("B", 1), *_describe_tokens(tokenizer, suffix, 1)]
    tokens = {tokenizer.id_to_token(token_id): token_id for token_id in (*prefix, *suffix)}
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]}
            for token, token_id in tokens.items()
        },
    }
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    enclosing = Tokenizer.from_str(json.dumps({**empty, "post_processor": template}))
    if all(
        _apply_post_processor(tokenizer, second) == _apply_post_processor(enclosing, second)
        for second in (None, "b")
    ):
        return False
    byte_level = _find_byte_level(document.get("post_processor"))
    processors = [*byte_level, template]
    is_sequence = len(processors) > 1
    document["post_processor"] = (
        {"type": "Sequence", "processors": processors} if is_sequence else template
    )
    return True


def _apply_post_processor(
    tokenizer: Tokenizer, second: str | None = None
) -> tuple[list[int], list[int]]:
    """Return the token ids and types of one or two placeholder texts with special tokens."""
    placeholder = Tokenizer(models.WordLevel(_PLACEHOLDERS, unk_token="a"))  # noqa: S106
    if tokenizer.post_processor is not None:
        placeholder.post_processor = tokenizer.post_processor
    encoding = placeholder.encode("a", second)
    return list(encoding.ids), list(encoding.type_ids)


def _describe_tokens(
    tokenizer: Tokenizer, ids: Sequence[int], type_id: int
) -> list[dict[str, Any]]:
    return [
        {"SpecialToken": {"id": tokenizer.id_to_token(token_id), "type_id": type_id}}
        for token_id in ids
    ]


def _describe_text(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}


def _find_byte_level(description: Any) -> list[dict[str, Any]]:
    """Return the post-processor part for token offsets only, if any."""
    kind = description.get("type") if isinstance(description, dict) else None
    if kind == "Sequence":
        return [part for item in description["processors"] for part in _find_byte_level(item)]
    if kind == "ByteLevel":
        return [description]
    if kind == "RobertaProcessing":
        keys = ("add_prefix_space", "trim_offsets")
        return [{"type": "ByteLevel", "use_regex": True, **{key: description[key] for key in keys}}]
    return []
