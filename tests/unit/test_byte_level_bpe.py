"""The fast encoder gives the same ids as the library."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from regauge.data import byte_level_bpe, settings, tokenizer
from regauge.data.dataset import TOKENIZER

PLANE = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000]
ALPHABETS = {
    "ascii": [chr(code) for code in range(128)],
    "latin": [chr(code) for code in range(0x250)],
    "plane": PLANE,
    "stable": [letter for letter in PLANE if byte_level_bpe._is_stable(letter)],
    "spaces": list(" \t\n\r\x0b\x0c\x1c\x1d\x85\xa0\u2003\u3000\u180e\u200b\ufeff a1'.s"),
    "cyrillic": [*map(chr, range(0x400, 0x530)), " ", "1", "."],
    "chinese": [*map(chr, range(0x4E00, 0x9FFF)), *"\uff0c\u3002 ab1"],
    "apostrophes": list("'stmdrevl ASTD a1"),
    "emoji": [*map(chr, range(0x1F300, 0x1F700)), " ", "a"],
}


def draw_texts(name: str, count: int) -> list[str]:
    """Return random texts of 1 to 60 characters of an alphabet."""
    draw, letters = np.random.default_rng(zlib.crc32(name.encode())), ALPHABETS[name]
    indices = [draw.integers(len(letters), size=draw.integers(1, 60)) for _ in range(count)]
    return ["".join(letters[index] for index in text_indices.tolist()) for text_indices in indices]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = draw_texts("latin", 300)
    texts += ["don't we've seen the whole of it, it's 1 or 22 words long, and they'll say so"] * 9
    path = tmp_path_factory.mktemp("words") / "tokenizer"
    tokenizer.train_tokenizer(iter([texts]), settings.TokenizerSettings(vocab_size=700), path)
    return path


def encode_with_library(folder: Path, texts: list[str]) -> list[list[int]]:
    """Return the ids that the library gives."""
    loaded = Tokenizer.from_file(str(folder / TOKENIZER))
    loaded.encode_special_tokens = True
    return [encoding.ids for encoding in loaded.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize("name", ALPHABETS)
def test_random_texts_have_the_ids_of_the_library(folder: Path, name: str) -> None:
    texts = ["", *draw_texts(name, 2000)]
    encoder = tokenizer.LoadedTokenizer(folder)
    encoded = encoder.encode(texts)
    assert all(ids.dtype == np.int32 for ids in encoded)
    assert [ids.tolist() for ids in encoded] == encode_with_library(folder, texts)
    bpe = byte_level_bpe.build_byte_level_bpe(Tokenizer.from_file(str(folder / TOKENIZER)))
    assert bpe is not None
    num_fast = sum(bpe.encode(text) is not None for text in texts)
    assert (
        num_fast == len(texts)
        if name in {"ascii", "apostrophes", "stable"}
        else num_fast < len(texts)
    )


def test_every_stable_character_has_the_ids_of_the_library(folder: Path) -> None:
    stable = ALPHABETS["stable"]
    assert len(stable) > 50_000
    texts = [f"a{letter} {letter}1{letter}{letter}b" for letter in stable]
    encoded = tokenizer.LoadedTokenizer(folder).encode(texts)
    assert [ids.tolist() for ids in encoded] == encode_with_library(folder, texts)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["unchanged", "NFC"])
@pytest.mark.parametrize("pattern", byte_level_bpe.PATTERNS, ids=["llama3", "qwen2"])
def test_patterns_of_language_models_have_the_ids_of_the_library(
    folder: Path, tmp_path: Path, pattern: str, normalizer: normalizers.Normalizer | None
) -> None:
    changed = Tokenizer.from_file(str(folder / TOKENIZER))
    splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    changed.pre_tokenizer = pre_tokenizers.Sequence([splitter, to_bytes])
    changed.normalizer = normalizer
    assert byte_level_bpe.build_byte_level_bpe(changed) is not None
    changed.save(str(tmp_path / TOKENIZER))
    texts = [text for name in ALPHABETS for text in draw_texts(name, 300)]
    texts += ["1234567 12\n\n 3", "'S it'S \u017f'\u017f \u212a", "a\r\n \n\tb  c"]
    encoded = tokenizer.LoadedTokenizer(tmp_path).encode(texts)
    assert [ids.tolist() for ids in encoded] == encode_with_library(tmp_path, texts)


def test_special_tokens_are_plain_text(folder: Path) -> None:
    special = list(Tokenizer.from_file(str(folder / TOKENIZER)).get_added_tokens_decoder().values())
    texts = [f"a{token.content} b" for token in special]
    assert len(texts) > 2
    encoded = tokenizer.LoadedTokenizer(folder).encode(texts)
    assert [ids.tolist() for ids in encoded] == encode_with_library(folder, texts)


@pytest.mark.parametrize("change", ["lowercase", "cutter", "added", "dropout", "byte"])
def test_unsupported_tokenizers_are_left_to_the_library(
    folder: Path, tmp_path: Path, change: str
) -> None:
    changed = Tokenizer.from_file(str(folder / TOKENIZER))
    assert byte_level_bpe.build_byte_level_bpe(changed) is not None
    if change == "lowercase":
        changed.normalizer = normalizers.Lowercase()
    elif change == "cutter":
        changed.pre_tokenizer = pre_tokenizers.Whitespace()
    elif change == "added":
        changed.add_tokens(["whole of"])
    else:
        document = json.loads(changed.to_str())
        if change == "dropout":
            document["model"]["dropout"] = 0.1
        else:
            del document["model"]["vocab"]["!"]
        changed = Tokenizer.from_str(json.dumps(document))
    assert byte_level_bpe.build_byte_level_bpe(changed) is None
    if change == "added":
        changed.save(str(tmp_path / TOKENIZER))
        texts = ["the whole of it", "wholeof"]
        encoded = tokenizer.LoadedTokenizer(tmp_path).encode(texts)
        assert [ids.tolist() for ids in encoded] == encode_with_library(tmp_path, texts)
