"""Tiny tokenizers of each family, in the files that transformers writes for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from regauge.data.settings import TokenizerSettings
from regauge.data.tokenizer import train_tokenizer

WORDS = (
    "river",
    "stone",
    "lemon",
    "window",
    "silver",
    "winter",
    "summer",
    "doctor",
    "engine",
    "forest",
    "music",
    "letter",
    "copper",
    "mirror",
    "pepper",
    "ticket",
    "button",
)
"""No word has the letter a, so that most of the vocabularies lack it."""
VOCABULARY_SIZE = 120


def draw_texts(count: int, seed: int = 0, max_words: int = 8) -> list[str]:
    """Return texts of random words that every family can encode."""
    draw = np.random.default_rng(seed)
    return [
        " ".join(draw.choice(WORDS, int(draw.integers(1, max_words + 1)))) for _ in range(count)
    ]


def write_tokenizer(family: str, folder: Path) -> Path:
    """Write the tokenizer of a family to a folder, and return the folder."""
    FAMILIES[family](folder)
    return folder


def _write_trained(folder: Path) -> None:
    texts = iter([draw_texts(200)])
    train_tokenizer(texts, TokenizerSettings(vocab_size=300), folder)


def _write_llama(folder: Path) -> None:
    """Write a BPE with a dummy prefix whose class adds the beginning by `add_bos_token`."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    _train_bpe(tokenizer, ["<unk>", "<s>", "</s>"], draw_texts(300))
    tokenizer.post_processor = build_template(tokenizer, "<s> $A", "<s> $A <s>:1 $B:1")
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    flags = {"add_bos_token": True, "add_eos_token": False}
    _save(tokenizer, folder, "LlamaTokenizerFast", **roles, **flags)


def _write_gpt2(folder: Path) -> None:
    tokenizer = _train_family_byte_pairs(["<|endoftext|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    _save(tokenizer, folder, "GPT2TokenizerFast", **roles)


def _write_bert(folder: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted(set("".join(WORDS)))
    words = [*special, *letters, *(f"##{letter}" for letter in letters), *WORDS]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    _save(tokenizer, folder, "BertTokenizerFast", **_name_roles(special))


def _write_roberta(folder: Path) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = _train_family_byte_pairs(special)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    roles = {"bos": 0, "cls": 0, "pad": 1, "eos": 2, "sep": 2, "unk": 3, "mask": 4}
    named = {f"{role}_token": special[number] for role, number in roles.items()}
    _save(tokenizer, folder, "RobertaTokenizerFast", **named)


def _write_t5(folder: Path) -> None:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=special,
        unk_token="<unk>",  # noqa: S106
        show_progress=False,
    )
    tokenizer.train_from_iterator(draw_texts(300), trainer)
    tokenizer.post_processor = build_template(tokenizer, "$A </s>", "$A </s> $B </s>")
    roles = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    _save(tokenizer, folder, "T5TokenizerFast", **roles, extra_ids=0)


def _write_word_level(folder: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.Sequence(
        [build_template(tokenizer, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")]
    )
    _save(tokenizer, folder, **_name_roles(special))


def _write_no_pad(folder: Path) -> None:
    tokenizer = _train_family_byte_pairs(["<s>", "</s>"])
    tokenizer.post_processor = build_template(tokenizer, "<s> $A", "<s> $A $B:1")
    _save(tokenizer, folder, bos_token="<s>", eos_token="</s>")  # noqa: S106


def _write_no_unknown(folder: Path) -> None:
    """Write a BPE that leaves out the characters that it does not know."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    _train_bpe(tokenizer, special, draw_texts(300))
    tokenizer.post_processor = build_template(
        tokenizer, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    )
    _save(tokenizer, folder, **_name_roles(special))


def _write_bos_only(folder: Path) -> None:
    tokenizer = _train_family_byte_pairs(["<s>"])
    tokenizer.post_processor = build_template(tokenizer, "<s> $A", "<s> $A <s>:1 $B:1")
    _save(tokenizer, folder, bos_token="<s>")  # noqa: S106


def train_byte_pairs(special_tokens: list[str], texts: list[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE that is trained on texts; its vocabulary has all bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _train_bpe(tokenizer, special_tokens, texts, vocab_size, pre_tokenizers.ByteLevel.alphabet())
    return tokenizer


def build_template(tokenizer: Tokenizer, single: str, pair: str) -> processors.TemplateProcessing:
    """Return the post-processor with these templates of one text and of two."""
    names = {word.partition(":")[0] for word in f"{single} {pair}".split()} - {"$A", "$B"}
    special_tokens = [(name, tokenizer.token_to_id(name)) for name in sorted(names)]
    return processors.TemplateProcessing(single, pair, special_tokens)


def _train_family_byte_pairs(special_tokens: list[str]) -> Tokenizer:
    vocab_size = VOCABULARY_SIZE + len(pre_tokenizers.ByteLevel.alphabet())
    return train_byte_pairs(special_tokens, draw_texts(300), vocab_size)


def _train_bpe(
    tokenizer: Tokenizer,
    special_tokens: list[str],
    texts: list[str],
    vocab_size: int = VOCABULARY_SIZE,
    alphabet: Sequence[str] = (),
) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)


def _name_roles(special_tokens: list[str]) -> dict[str, Any]:
    return {f"{token.strip('[]').lower()}_token": token for token in special_tokens}


def _save(
    tokenizer: Tokenizer, folder: Path, kind: str = "PreTrainedTokenizerFast", **values: Any
) -> None:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    document = {"tokenizer_class": kind, **values}
    (folder / "tokenizer_config.json").write_text(json.dumps(document), encoding="utf-8")


FAMILIES: dict[str, Callable[[Path], None]] = {
    "trained": _write_trained,
    "llama": _write_llama,
    "gpt2": _write_gpt2,
    "bert": _write_bert,
    "roberta": _write_roberta,
    "t5": _write_t5,
    "word level": _write_word_level,
    "no pad": _write_no_pad,
    "no unknown": _write_no_unknown,
    "bos only": _write_bos_only,
}
