"""Adapts an exported model's tokenizer: other libraries then form texts as the run did.

A run adds tokens, such as the end token, even if its tokenizer does not. The exported files declare
all of them, so other libraries do not have to know Regauge's conventions.
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
"""Keys with which transformers before 5.0 replaces some classes' post-processors."""
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""transformers class for an unchanged `tokenizer.json`."""


class TextForm(NamedTuple):
    """How a run formed its texts."""

    special_tokens: SpecialTokens
    """Special tokens around a text; a generative model's prompt is without suffix."""
    end_ids: tuple[int, ...]
    """Ids of tokens after an answer; empty if the model is not generative."""
    pad_id: int
    truncation_side: Side
    """Side on which long texts were truncated."""
    padding_side: Side
    """Padding side; transformers generates only from prompts padded left."""
    has_token_types: bool
    has_chat_template: bool = False
    """Whether a chat template renders the texts; special tokens are then parsed."""
    max_length: int | None = None
    """Maximum tokens per text, if limited."""
    splits_special_tokens: bool | None = None
    """Whether a special token in a text is plain text; None: as the tokenizer declares."""


class TokenIds(NamedTuple):
    """Token ids named in a model configuration."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int


def adapt_tokenizer(folder: Path, form: TextForm) -> TokenIds:
    """Rewrite a model folder's tokenizer files for a text form; return the token ids."""
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
    """Drop roles whose token is not in the vocabulary.

    transformers would add such a token, with an id without an embedding in the model.
    """
    unknown = {f"{role}_token" for role in ROLES if read_role_id(tokenizer, config, role) is None}
    removed = unknown | set(_POST_PROCESSOR_KEYS)
    return {key: value for key, value in config.items() if key not in removed}


def _find_token_ids(tokenizer: Tokenizer, config: dict[str, Any], form: TextForm) -> TokenIds:
    """Return the ids before and after a text, and the padding id."""
    bos = read_role_id(tokenizer, config, "bos", "cls")
    if bos is None and form.special_tokens.prefix:
        bos = form.special_tokens.prefix[0]
    eos = read_role_id(tokenizer, config, "eos", "sep")
    return TokenIds(bos, form.end_ids or (() if eos is None else (eos,)), form.pad_id)


def _name_tokens(
    tokenizer: Tokenizer, config: dict[str, Any], ids: TokenIds, form: TextForm
) -> dict[str, str | None]:
    """Return the roles to declare: padding, and for a generative model beginning and end.

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
    """Return the model arguments computed by a tokenizer."""
    types = ["token_type_ids"] if form.has_token_types else []
    return ["input_ids", *types, "attention_mask"]
