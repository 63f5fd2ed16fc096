"""The ids of texts from those of their words, beside the library's own."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from regauge.data import bpe_cache, settings, tokenizer
from regauge.data.dataset import TOKENIZER

PLANE = [chr(place) for place in range(0x10000) if not 0xD800 <= place < 0xE000]
ALPHABETS = {
    "ascii": [chr(place) for place in range(128)],
    "latin": [chr(place) for place in range(0x250)],
    "plane": PLANE,
    "settled": [letter for letter in PLANE if bpe_cache._settled(letter)],
    "spaces": list(" \t\n\r\x0b\x0c\x1c\x1d\x85\xa0\u2003\u3000\u180e\u200b\ufeff a1'.s"),
    "cyrillic": [*map(chr, range(0x400, 0x530)), " ", "1", "."],
    "chinese": [*map(chr, range(0x4E00, 0x9FFF)), *"\uff0c\u3002 ab1"],
    "apostrophes": list("'stmdrevl ASTD a1"),
    "emoji": [*map(chr, range(0x1F300, 0x1F700)), " ", "a"],
}


def drawn(name: str, count: int) -> list[str]:
    """Return random texts of 1 to 60 characters of an alphabet."""
    draw, letters = np.random.default_rng(zlib.crc32(name.encode())), ALPHABETS[name]
    places = [draw.integers(len(letters), size=draw.integers(1, 60)) for _ in range(count)]
    return ["".join(letters[place] for place in some.tolist()) for some in places]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = drawn("latin", 300)
    texts += ["don't we've seen the whole of it, it's 1 or 22 words long, and they'll say so"] * 9
    path = tmp_path_factory.mktemp("words") / "tokenizer"
    tokenizer.train(iter([texts]), settings.Tokenizer(vocabulary=700), path)
    return path


def library(folder: Path, texts: list[str]) -> list[list[int]]:
    found = Tokenizer.from_file(str(folder / TOKENIZER))
    found.encode_special_tokens = True
    return [each.ids for each in found.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize("name", ALPHABETS)
def test_random_texts_have_the_ids_that_the_library_gives(folder: Path, name: str) -> None:
    texts = ["", *drawn(name, 2000)]
    encoder = tokenizer.Encoder(folder)
    found = encoder.encode(texts)
    assert all(ids.dtype == np.int32 for ids in found)
    assert [ids.tolist() for ids in found] == library(folder, texts)
    known = bpe_cache.words_of(Tokenizer.from_file(str(folder / TOKENIZER)))
    assert known is not None
    own = sum(known.ids(text) is not None for text in texts)
    assert own == len(texts) if name in {"ascii", "apostrophes"} else own < len(texts)


def test_every_settled_character_is_read_as_the_library_reads_it(folder: Path) -> None:
    settled = ALPHABETS["settled"]
    assert len(settled) > 50_000
    texts = [f"a{letter} {letter}1{letter}{letter}b" for letter in settled]
    found = tokenizer.Encoder(folder).encode(texts)
    assert [ids.tolist() for ids in found] == library(folder, texts)


def test_words_are_forgotten_before_there_are_too_many(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpe_cache, "MOST_WORDS", 10)
    known = bpe_cache.words_of(Tokenizer.from_file(str(folder / TOKENIZER)))
    assert known is not None
    texts = [f"word {number} of many" for number in range(50)] + ["x" * 500]
    found = [known.ids(text) for text in texts]
    assert [ids.tolist() for ids in found if ids is not None] == library(folder, texts)
    assert len(known.known) <= 10
    assert max(map(len, known.known)) <= bpe_cache.LONGEST


@pytest.mark.parametrize("change", ["lowercase", "cutter", "added", "dropout"])
def test_tokenizers_of_another_make_are_left_to_the_library(
    folder: Path, tmp_path: Path, change: str
) -> None:
    made = Tokenizer.from_file(str(folder / TOKENIZER))
    assert bpe_cache.words_of(made) is not None
    if change == "lowercase":
        made.normalizer = normalizers.Lowercase()
    elif change == "cutter":
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    elif change == "added":
        made.add_tokens(["whole of"])
    else:
        document = json.loads(made.to_str())
        document["model"]["dropout"] = 0.1
        made = Tokenizer.from_str(json.dumps(document))
    assert bpe_cache.words_of(made) is None
    if change == "added":
        made.save(str(tmp_path / TOKENIZER))
        texts = ["the whole of it", "wholeof"]
        found = tokenizer.Encoder(tmp_path).encode(texts)
        assert [ids.tolist() for ids in found] == library(tmp_path, texts)
