"""Tokenizer configuration, with special tokens by role.

A role is a use for a special token, such as "pad" or "mask". Many published tokenizers do not name
roles: the transformers class for their model has defaults.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from regauge.data.dataset import TOKENIZER
from regauge.system.errors import DataError, first_line
from regauge.system.json_files import DocumentShape, check_shape, find_json

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
"""Older file with special token roles, replaced by `tokenizer_config.json`."""
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
TRAINED_ROLES = {
    "pad": "[PAD]",
    "unk": "[UNK]",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "mask": "[MASK]",
}
"""Special tokens for a tokenizer trained here, or one without a configuration."""
_MODEL_CONFIG = "config.json"
_REMEDY = "replace it"


class SpecialTokenShape(DocumentShape):
    content: str


class TokenizerConfigShape(DocumentShape):
    pad_token: str | SpecialTokenShape | None = None
    unk_token: str | SpecialTokenShape | None = None
    cls_token: str | SpecialTokenShape | None = None
    sep_token: str | SpecialTokenShape | None = None
    mask_token: str | SpecialTokenShape | None = None
    bos_token: str | SpecialTokenShape | None = None
    eos_token: str | SpecialTokenShape | None = None
    added_tokens_decoder: dict[str, SpecialTokenShape] = {}


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return a tokenizer's configuration, with the special tokens of its class.

    A tokenizer without any configuration has a trained one's roles.
    """
    config = read_declared_config(folder)
    roles = read_class_roles(folder, config)
    if not config and not roles:
        return {f"{role}_token": token for role, token in TRAINED_ROLES.items()}
    return {**config, **roles}


def read_declared_config(folder: Path) -> dict[str, Any]:
    """Return the keys from both configuration files, without defaults."""
    merged: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS_MAP, CONFIG):
        document = find_json(folder / name, _REMEDY) or {}
        check_shape(document, folder / name, _REMEDY, TokenizerConfigShape)
        merged |= document
    return merged


def read_class_roles(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return transformers' special tokens for a folder that names none.

    `config` is the folder's declared configuration. The special tokens are defaults of the
    tokenizer or model class. The result is empty if the folder names neither, or if it names a
    special token. This imports transformers and torch.
    """
    if any(f"{role}_token" in config for role in ROLES):
        return {}
    if not (config.get("tokenizer_class") or find_json(folder / _MODEL_CONFIG, _REMEDY)):
        return {}
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(
            f"transformers cannot load the tokenizer of {folder}: {first_line(error)}",
            f"name its special tokens in its {CONFIG}",
        ) from None
    tokens = {f"{role}_token": getattr(tokenizer, f"{role}_token", None) for role in ROLES}
    return {name: str(token) for name, token in tokens.items() if token is not None}


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write a tokenizer's JSON document as transformers does."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def check_added_tokens(tokenizer: Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Raise DataError if the configuration adds a token missing from `tokenizer.json`.

    transformers adds it when it loads the folder; the `tokenizers` library does not.
    """
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        if tokenizer.token_to_id(token["content"]) != int(number):
            raise DataError(
                f"{folder / CONFIG} adds the token {token['content']!r} with id {number},"
                f" which {TOKENIZER} does not have",
                "load the tokenizer with transformers and save it again",
            )
