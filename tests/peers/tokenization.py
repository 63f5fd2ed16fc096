"""Tokenizers as other libraries write them, of three kinds, built without randomness."""

from __future__ import annotations

from typing import Any

from peers.texts import LINES
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

VOCABULARY = 320
"""Entries of a trained byte-level BPE."""


def build_tokenizer(
    kind: str, limit: int, *, has_types: bool = False, **options: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a kind, whose texts have at most `limit` tokens."""
    tokenizer, roles = BUILDERS[kind]()
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=limit,
        model_input_names=names if has_types else [names[0], names[2]],
        **{f"{role}_token": token for role, token in roles.items()},
        **options,
    )


def build_word_pieces() -> tuple[Tokenizer, dict[str, str]]:
    """Return a WordPiece tokenizer as of BERT: lower case, "[CLS] text [SEP]", token types."""
    roles = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    entries = [*roles.values(), *letters, *(f"##{letter}" for letter in letters), *".,:", *WORDS]
    vocabulary = {entry: index for index, entry in enumerate(dict.fromkeys(entries))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106 - a token of text
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer, roles


def build_byte_pairs() -> tuple[Tokenizer, dict[str, str]]:
    """Return a byte-level BPE tokenizer as of RoBERTa: "<s> text </s>", two ends between texts."""
    roles = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
    tokenizer = _train_byte_pairs([*roles.values()])
    tokenizer.post_processor = _build_template(tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    return tokenizer, {**roles, "bos": "<s>", "eos": "</s>"}


def build_unigrams() -> tuple[Tokenizer, dict[str, str]]:
    """Return a Unigram tokenizer as of XLM-RoBERTa: words with a space marker, and letters."""
    roles = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
    characters = "▁abcdefghijklmnopqrstuvwxyz0123456789.,:"
    pieces = [(token, 0.0) for token in roles.values()]
    pieces += [(f"▁{word}", -3.0 - index / 100) for index, word in enumerate(WORDS)]
    pieces += [(character, -6.0 - index / 100) for index, character in enumerate(characters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = _build_template(tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    return tokenizer, {**roles, "bos": "<s>", "eos": "</s>"}


def build_opened_byte_pairs() -> tuple[Tokenizer, dict[str, str]]:
    """Return a byte-level BPE tokenizer as of Llama: "<s> text", without an end."""
    roles = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}
    tokenizer = _train_byte_pairs([*roles.values()])
    tokenizer.post_processor = _build_template(tokenizer, "<s> $A", "<s> $A <s> $B")
    return tokenizer, roles


def build_plain_byte_pairs() -> tuple[Tokenizer, dict[str, str]]:
    """Return a byte-level BPE tokenizer as of GPT-2: no special tokens around a text."""
    end = "<|endoftext|>"
    return _train_byte_pairs([end]), {"bos": end, "eos": end, "unk": end, "pad": end}


WORDS = sorted({word for line in LINES for word in line.split()})
BUILDERS = {
    "wordpiece": build_word_pieces,
    "bpe": build_byte_pairs,
    "unigram": build_unigrams,
    "opened": build_opened_byte_pairs,
    "plain": build_plain_byte_pairs,
}
"""Tokenizers with their special tokens by role."""


def _train_byte_pairs(special_tokens: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def _build_template(tokenizer: Tokenizer, single: str, pair: str) -> processors.TemplateProcessing:
    names = [token for token in ("<s>", "</s>") if token in pair]
    special_tokens = [(token, tokenizer.token_to_id(token)) for token in names]
    return processors.TemplateProcessing(single, pair, special_tokens)
