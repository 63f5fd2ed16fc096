"""Long texts lose the side that their tokenizer declares, as in transformers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from regauge.data import settings
from regauge.data.layouts import EncodedRecord, build_layout
from regauge.data.tokenizer import LoadedTokenizer, read_truncation_side, truncate_ids
from regauge.inference.export.preprocess import Preprocessor
from regauge.inference.export.records import TextRecords
from regauge.models.io_spec import InputSpec
from regauge.models.sentence_transformers import Tokenization
from regauge.system.errors import DataError
from tokenizer_families import WORDS, draw_texts, write_tokenizer

transformers = pytest.importorskip("transformers")

LENGTH = 8


def list_rows(records: TextRecords) -> list[list[int]]:
    """Return the ids of the first text of each record."""
    (texts,) = records.texts
    return [row.tolist() for row in np.split(texts.ids, np.cumsum(texts.lengths)[:-1])]


def declare_side(folder: Path, side: str, where: str) -> Path:
    """Declare the side in `tokenizer_config.json` or in `tokenizer.json`."""
    if where == "config":
        path = folder / "tokenizer_config.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**document, "truncation_side": side}), encoding="utf-8")
    else:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.enable_truncation(LENGTH, direction=side)
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@given(ids=st.lists(st.integers(0, 9), max_size=12), limit=st.integers(0, 14))
def test_ids_are_truncated_on_one_side(ids: list[int], limit: int) -> None:
    array = np.array(ids)
    assert truncate_ids(array, limit, "right").tolist() == ids[:limit]
    assert truncate_ids(array, limit, "left").tolist() == (ids[-limit:] if limit else [])


@pytest.mark.parametrize("where", ["config", "json"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["bert", "roberta", "llama", "t5", "gpt2"])
def test_long_texts_and_pairs_are_truncated_as_in_transformers(
    family: str, side: str, where: str, tmp_path: Path
) -> None:
    folder = declare_side(write_tokenizer(family, tmp_path / "tokenizer"), side, where)
    assert read_truncation_side(folder) == LoadedTokenizer(folder).truncation_side == side
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenization = Tokenization(
        max_length=LENGTH, convention="transformers", truncation_side=read_truncation_side(folder)
    )
    texts, others = draw_texts(12, seed=3, max_words=20), draw_texts(12, seed=4, max_words=20)
    single = Preprocessor(folder, tokenization, InputSpec()).encode_records([texts])
    fields = InputSpec(text_fields=("a", "b"), is_pair=True)
    pairs = Preprocessor(folder, tokenization, fields).encode_records([texts, others])
    assert single.num_truncated > 0
    options = {"truncation": True, "max_length": LENGTH}
    assert list_rows(single.records) == [loaded(text, **options).input_ids for text in texts]
    assert list_rows(pairs.records) == [
        loaded(text, other, **options).input_ids for text, other in zip(texts, others, strict=True)
    ]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["bert", "roberta", "llama", "t5", "gpt2"])
def test_a_very_long_text_is_cut_without_an_effect_on_its_tokens(
    family: str, side: str, tmp_path: Path
) -> None:
    folder = declare_side(write_tokenizer(family, tmp_path / "tokenizer"), side, "config")
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenization = Tokenization(
        max_length=LENGTH, convention="transformers", truncation_side=read_truncation_side(folder)
    )
    preprocessor = Preprocessor(folder, tokenization, InputSpec())
    texts = [" ".join(draw_texts(200, seed=seed, max_words=20)) for seed in range(4)]
    parts = list(map(preprocessor.cut, texts))
    assert {len(part) for part in parts} == {preprocessor.max_characters}
    expected = [loaded(text, truncation=True, max_length=LENGTH).input_ids for text in texts]
    assert list_rows(preprocessor.encode_records([parts]).records) == expected
    words = preprocessor.find_words(texts, None)
    encoded = loaded(texts, truncation=True, max_length=LENGTH, return_offsets_mapping=True)
    for text, located, offsets in zip(texts, words, encoded.offset_mapping, strict=True):
        expected_starts = {start for start, end in offsets if text[start:end].strip()}
        assert located.text == text
        assert len(located.spans)
        starts = {start for start, _ in located.spans.tolist()}
        assert all(any(abs(start - other) <= 1 for other in expected_starts) for start in starts)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("layout", ["fields", "packed"])
def test_rows_are_truncated_on_the_side_of_the_tokenizer(
    layout: str, side: str, tmp_path: Path
) -> None:
    folder = declare_side(write_tokenizer("word level", tmp_path / "tokenizer"), side, "config")
    tokenizer = LoadedTokenizer(folder)
    options = {
        "fields": {"fields": {"text": LENGTH}},
        "packed": {"length": LENGTH, "too_long": "truncate"},
    }
    rows = settings.RowLayout(layout=layout, **options[layout])
    (ids,) = tokenizer.encode([" ".join(WORDS)])
    truncated: Counter[str] = Counter()
    encoded = EncodedRecord({"text": " ".join(WORDS)}, [ids], tokenizer, truncated, Counter())
    ((cell,),) = build_layout(rows).build_cells(encoded)
    inner = ids[: LENGTH - 2] if side == "right" else ids[2 - LENGTH :]
    assert cell.tolist() == [2, *inner.tolist(), 3]
    assert truncated == {"text": 1}
    assert tokenizer.info.truncation_side == side


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_conversation_is_truncated_on_the_side_of_the_tokenizer(
    side: str, tmp_path: Path
) -> None:
    folder = declare_side(write_tokenizer("trained", tmp_path / "tokenizer"), side, "config")
    tokenizer = LoadedTokenizer(folder)
    options = {"chat_template": "alpaca", "length": 70, "too_long": "truncate"}
    layout = build_layout(settings.RowLayout(layout="chat", **options))
    turns = [("user", "river"), ("assistant", "stone"), ("user", "silver"), ("assistant", "lemon")]
    messages = [{"role": role, "content": content} for role, content in turns]
    record = {"messages": json.dumps(messages)}
    ids = layout.encode_texts(layout.select_texts(record, tokenizer), tokenizer)
    encoded = EncodedRecord(record, ids, tokenizer, Counter(), Counter())
    ((tokens, marks),) = layout.build_cells(encoded)
    assert len(ids[0]) > len(tokens) == len(marks) == 70
    cut = slice(None, 70) if side == "right" else slice(-70, None)
    assert tokens.tolist() == ids[0][cut].tolist()
    assert ("lemon" in tokenizer.decode(tokens[marks > 0].tolist())) == (side == "left")


def test_an_unknown_side_is_refused(tmp_path: Path) -> None:
    folder = declare_side(write_tokenizer("bert", tmp_path / "tokenizer"), "middle", "config")
    with pytest.raises(DataError, match=r"truncation_side = 'middle'; set it to"):
        LoadedTokenizer(folder)


def test_a_joined_pair_keeps_the_special_tokens_of_the_other_end(tmp_path: Path) -> None:
    folder = write_tokenizer("word level", tmp_path / "tokenizer")
    fields = InputSpec(text_fields=("a", "b"), max_lengths=(LENGTH, LENGTH), is_pair=True)
    texts = [[" ".join(WORDS[:5])], [" ".join(WORDS[5:10])]]
    first, second = ([*range(5, 10)], [*range(10, 15)])
    expected = {
        "right": ([2, *first, 3, *second[:2], 3], 7),
        "left": ([2, *first[4:], 3, *second, 3], 3),
    }
    for side, (ids, start) in expected.items():
        tokenization = Tokenization(max_length=len(ids), truncation_side=side)
        records = Preprocessor(folder, tokenization, fields).encode_records(texts).records
        assert list_rows(records) == [ids]
        assert records.features[0].tolist() == [start]
