"""Writes a final model's tokenizer and token ids: other libraries then form texts as the run did.

A run adds tokens, such as the end token, even if its tokenizer does not. The exported files declare
all of them, so other libraries do not have to know Regauge's conventions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer

from regauge.data.chat_templates import find_end_token_ids, has_template
from regauge.data.dataset import TOKENIZER
from regauge.data.special_tokens import SpecialTokens, enclose_texts, read_role_id
from regauge.data.tokenizer import LoadedTokenizer
from regauge.data.tokenizer_config import (
    CONFIG,
    ROLES,
    SPECIAL_TOKENS_MAP,
    read_tokenizer_config,
    write_document,
)
from regauge.models.dual_encoder import DOCUMENT_ENCODER, has_document_encoder
from regauge.models.generation.generation_config import (
    TokenIds,
    write_generation_config,
    write_token_ids,
)
from regauge.models.tokenizer_convention import write_convention
from regauge.system.json_files import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.data.dataset import TokenizerInfo
    from regauge.models.modules import TextModule

_POST_PROCESSOR_KEYS = ("add_bos_token", "add_eos_token")
"""Keys with which transformers before 5.0 replaces some classes' post-processors."""
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""transformers class for an unchanged `tokenizer.json`."""


class TextUse(NamedTuple):
    """How a task uses texts."""

    tokenizer: Path
    """The dataset's tokenizer."""
    info: TokenizerInfo
    """What the dataset's rows were made with."""
    max_length: int | None
    """Maximum text length in tokens; None if unlimited."""
    is_generative: bool
    """Whether the model continues a text."""
    has_special_tokens: bool
    """Whether a text may have special tokens, such as the mask."""


def write_text_form(
    folder: Path, module: TextModule, use: TextUse | None, start: Path | None
) -> None:
    """Adapt a model folder's tokenizers and configurations to the texts of its task.

    `use` is None for a custom module. `start` is the folder of the initial weights.
    """
    write_convention(folder)
    if use is None or not (use.tokenizer / TOKENIZER).is_file():
        return
    documents = [folder / DOCUMENT_ENCODER] if has_document_encoder(folder) else []
    for target in (folder, *documents):
        ids = _adapt_tokenizer(target, use, has_token_types=module.has_token_types)
        has_fixed_padding = module.attention_spec.first_position > 0
        write_token_ids(target, ids, has_fixed_padding=has_fixed_padding)
        if use.is_generative:
            write_generation_config(target, ids, start)


def _adapt_tokenizer(folder: Path, use: TextUse, *, has_token_types: bool) -> TokenIds:
    """Rewrite a folder's tokenizer files, and return the ids for its model configuration.

    A generative model's prompt lacks a suffix, and transformers generates only from prompts padded
    on the left.
    """
    dataset_tokenizer, is_chat = LoadedTokenizer(use.tokenizer), has_template(use.tokenizer)
    suffix = () if use.is_generative else tuple(dataset_tokenizer.suffix.tolist())
    special_tokens = SpecialTokens(tuple(dataset_tokenizer.prefix.tolist()), suffix)
    path = folder / TOKENIZER
    document = read_json(path, "replace it")
    if enclose_texts(document, special_tokens):
        write_document(path, document)
    tokenizer = Tokenizer.from_file(str(path))
    config = _select_known_roles(tokenizer, read_tokenizer_config(folder))
    end_ids = find_end_token_ids(use.tokenizer) if use.is_generative else ()
    bos = read_role_id(tokenizer, config, "bos", "cls")
    if bos is None and special_tokens.prefix:
        bos = special_tokens.prefix[0]
    eos = read_role_id(tokenizer, config, "eos", "sep")
    ids = TokenIds(bos, end_ids or (() if eos is None else (eos,)), use.info.pad_token_id)
    config["pad_token"] = tokenizer.id_to_token(ids.pad)
    # A chat template may test which roles are defined, so a chat model gets no other role.
    if end_ids and not is_chat:
        config.setdefault("eos_token", tokenizer.id_to_token(end_ids[0]))
        if ids.bos is not None:
            config.setdefault("bos_token", tokenizer.id_to_token(ids.bos))
    config |= {
        "tokenizer_class": _TOKENIZER_CLASS,
        "truncation_side": use.info.truncation_side,
        "padding_side": "left" if use.is_generative else "right",
        "model_input_names": [
            "input_ids",
            *(["token_type_ids"] if has_token_types else []),
            "attention_mask",
        ],
    }
    config.setdefault("clean_up_tokenization_spaces", False)
    if use.max_length is not None and not use.is_generative:
        config["model_max_length"] = use.max_length
    if not (use.has_special_tokens or (use.is_generative and is_chat)):
        config["split_special_tokens"] = True
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
