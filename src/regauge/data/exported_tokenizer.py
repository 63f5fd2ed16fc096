"""Adapts the tokenizer of an exported model: other libraries then form texts as the run did.

A run adds tokens that its tokenizer need not add, such as the end token. The exported files declare
all of them, so that no library has to know the conventions of this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer

from regauge.data.dataset import TOKENIZER
from regauge.data.special_tokens import enclose_texts, read_role_id
from regauge.data.tokenizer_config import (
    CONFIG,
    ROLES,
    SPECIAL_TOKENS_MAP,
    read_tokenizer_config,
    write_document,
)
from regauge.system.json_files import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.data.special_tokens import SpecialTokens
    from regauge.data.tokenizer import Side

_POST_PROCESSOR_KEYS = ("add_bos_token", "add_eos_token")
"""Keys with which transformers before 5.0 replaces the post-processor of some classes."""
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class of transformers that uses `tokenizer.json` unchanged."""


class TextForm(NamedTuple):
    """How the texts of a run were formed."""

    special_tokens: SpecialTokens
    """The special tokens around a text; a prompt of a generative model has no suffix."""
    end_ids: tuple[int, ...]
    """Ids of the tokens that end an answer; empty if the model is not generative."""
    pad_id: int
    """Id of the padding token."""
    truncation_side: Side
    """The side on which long texts were truncated."""
    padding_side: Side
    """The side of the padding; transformers generates only from prompts that are padded left."""
    has_token_types: bool
    """Whether the model reads token types."""
    has_chat_template: bool = False
    """Whether texts are rendered in a chat template, whose special tokens are parsed."""
    max_length: int | None = None
    """Maximum number of tokens of a text; None if the run has no such limit."""
    splits_special_tokens: bool | None = None
    """Whether a special token in a text is plain text; None: as the tokenizer declares."""


class TokenIds(NamedTuple):
    """The ids that the configuration of a model names."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int


def adapt_tokenizer(folder: Path, form: TextForm) -> TokenIds:
    """Rewrite the tokenizer files of a model's folder for a form of texts; return its token ids."""
    path = folder / TOKENIZER
    document = read_json(path, "replace it")
    if enclose_texts(document, form.special_tokens):
        write_document(path, document)
    tokenizer = Tokenizer.from_file(str(path))
    config = _select_known_roles(tokenizer, read_tokenizer_config(folder))
    ids = _find_token_ids(tokenizer, config, form)
    config |= _name_tokens(tokenizer, config, ids, form)
    config |= {
        "tokenizer_class": _TOKENIZER_CLASS,
        "truncation_side": form.truncation_side,
        "padding_side": form.padding_side,
        "model_input_names": _list_inputs(form),
    }
    config.setdefault("clean_up_tokenization_spaces", False)
    if form.max_length is not None:
        config["model_max_length"] = form.max_length
    if form.splits_special_tokens is not None:
        config["split_special_tokens"] = form.splits_special_tokens
    (folder / SPECIAL_TOKENS_MAP).unlink(missing_ok=True)
    write_document(folder / CONFIG, config)
    return ids


def _select_known_roles(tokenizer: Tokenizer, config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without roles whose token the vocabulary lacks.

    transformers would add such a token, with an id that the model has no embedding for.
    """
    unknown = {f"{role}_token" for role in ROLES if read_role_id(tokenizer, config, role) is None}
    removed = unknown | set(_POST_PROCESSOR_KEYS)
    return {key: value for key, value in config.items() if key not in removed}


def _find_token_ids(tokenizer: Tokenizer, config: dict[str, Any], form: TextForm) -> TokenIds:
    """Return the ids of the tokens that begin and end a text, and of the padding."""
    bos = read_role_id(tokenizer, config, "bos", "cls")
    if bos is None and form.special_tokens.prefix:
        bos = form.special_tokens.prefix[0]
    eos = read_role_id(tokenizer, config, "eos", "sep")
    return TokenIds(bos, form.end_ids or (() if eos is None else (eos,)), form.pad_id)


def _name_tokens(
    tokenizer: Tokenizer, config: dict[str, Any], ids: TokenIds, form: TextForm
) -> dict[str, str | None]:
    """Return the roles to declare: the padding, and of a generative model the beginning and end.

    A chat template may test which roles are defined, so a chat model gets no other role.
    """
    roles = {"pad_token": tokenizer.id_to_token(ids.pad)}
    if not form.end_ids or form.has_chat_template:
        return roles
    if "eos_token" not in config:
        roles["eos_token"] = tokenizer.id_to_token(ids.eos[0])
    if "bos_token" not in config and ids.bos is not None:
        roles["bos_token"] = tokenizer.id_to_token(ids.bos)
    return roles


def _list_inputs(form: TextForm) -> list[str]:
    """Return the arguments of the model that a tokenizer computes."""
    types = ["token_type_ids"] if form.has_token_types else []
    return ["input_ids", *types, "attention_mask"]
