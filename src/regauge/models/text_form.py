"""Writes a final model's tokenizer and token ids, so that it reads texts as in the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from regauge.data.chat_templates import find_end_token_ids, has_template
from regauge.data.dataset import TOKENIZER
from regauge.data.exported_tokenizer import TextForm, adapt_tokenizer
from regauge.data.special_tokens import SpecialTokens
from regauge.data.tokenizer import LoadedTokenizer
from regauge.models.dual_encoder import DOCUMENT_ENCODER, has_document_encoder
from regauge.models.generation.generation_config import write_generation_config, write_token_ids
from regauge.models.tokenizer_convention import write_convention

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.data.dataset import TokenizerInfo
    from regauge.models.modules import TextModule


class TextUse(NamedTuple):
    """How a task uses texts."""

    tokenizer: Path
    """The dataset's tokenizer."""
    facts: TokenizerInfo
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
    form = _build_text_form(module, use)
    documents = [folder / DOCUMENT_ENCODER] if has_document_encoder(folder) else []
    for target in (folder, *documents):
        ids = adapt_tokenizer(target, form)
        has_fixed_padding = module.attention_spec.first_position > 0
        write_token_ids(target, ids, has_fixed_padding=has_fixed_padding)
        if use.is_generative:
            write_generation_config(target, ids, start)


def _build_text_form(module: TextModule, use: TextUse) -> TextForm:
    tokenizer, is_chat = LoadedTokenizer(use.tokenizer), has_template(use.tokenizer)
    suffix = () if use.is_generative else tuple(tokenizer.suffix.tolist())
    parses_special_tokens = use.has_special_tokens or (use.is_generative and is_chat)
    return TextForm(
        special_tokens=SpecialTokens(tuple(tokenizer.prefix.tolist()), suffix),
        end_ids=find_end_token_ids(use.tokenizer) if use.is_generative else (),
        pad_id=use.facts.pad_token_id,
        truncation_side=use.facts.truncation_side,
        padding_side="left" if use.is_generative else "right",
        has_token_types=module.has_token_types,
        has_chat_template=is_chat,
        max_length=None if use.is_generative else use.max_length,
        splits_special_tokens=None if parses_special_tokens else True,
    )
