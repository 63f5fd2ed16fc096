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
)
from transformers import PreTrainedTokenizerFast

from tokenizer_families import build_template, train_byte_pairs

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
    single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = build_template(tokenizer, single, pair)
    return tokenizer, roles


def build_byte_pairs() -> tuple[Tokenizer, dict[str, str]]:
    """Return a byte-level BPE tokenizer as of RoBERTa: "<s> text </s>", two ends between texts."""
    roles = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
    tokenizer = train_byte_pairs([*roles.values()], LINES, VOCABULARY)
    tokenizer.post_processor = build_template(tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
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
    tokenizer.post_processor = build_template(tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    return tokenizer, {**roles, "bos": "<s>", "eos": "</s>"}


def build_opened_byte_pairs() -> tuple[Tokenizer, dict[str, str]]:
    """Return a byte-level BPE tokenizer as of Llama: "<s> text", without an end."""
    roles = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}
    tokenizer = train_byte_pairs([*roles.values()], LINES, VOCABULARY)
    tokenizer.post_processor = build_template(tokenizer, "<s> $A", "<s> $A <s> $B")
    return tokenizer, roles


def build_plain_byte_pairs() -> tuple[Tokenizer, dict[str, str]]:
    """Return a byte-level BPE tokenizer as of GPT-2: no special tokens around a text."""
    end = "<|endoftext|>"
    roles = dict.fromkeys(("bos", "eos", "unk", "pad"), end)
    return train_byte_pairs([end], LINES, VOCABULARY), roles


WORDS = sorted({word for line in LINES for word in line.split()})
BUILDERS = {
    "wordpiece": build_word_pieces,
    "bpe": build_byte_pairs,
    "unigram": build_unigrams,
    "opened": build_opened_byte_pairs,
    "plain": build_plain_byte_pairs,
}
"""Tokenizers with their special tokens by role."""
