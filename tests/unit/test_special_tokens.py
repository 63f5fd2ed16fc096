"""Special tokens around texts: read from every kind of post-processor, for any vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from distributed import datasets, runs
from regauge.data.special_tokens import SpecialTokens, enclose_texts, read_special_tokens
from regauge.data.tokenizer import LoadedTokenizer
from regauge.inference.export.preprocess import Preprocessor
from regauge.models.io_spec import InputSpec
from regauge.models.sentence_transformers import Tokenization
from regauge.system.errors import DataError
from regauge.training.task_schedule import read_manifests
from tokenizer_families import FAMILIES, WORDS, draw_texts, write_tokenizer
from unit.preparing import prepare_dataset

SPECIAL = ("[CLS]", "[SEP]", "<s>", "</s>", "<a>")
IDS = {token: number for number, token in enumerate(SPECIAL)}
special_lists = st.lists(st.sampled_from(SPECIAL), max_size=3)


def build_words(letters: str) -> Tokenizer:
    """Return a tokenizer whose vocabulary has only the special tokens and some letters."""
    vocabulary = {**IDS, **{letter: len(IDS) + at for at, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def build_processor(kind: str, prefix: list[str], suffix: list[str]) -> Any:
    """Return a post-processor, and the tokens before and after a text."""
    if kind == "template":
        single = " ".join([*prefix, "$A", *suffix])
        return processors.TemplateProcessing(single, f"{single} $B", list(IDS.items()))
    first, last = (prefix or ["[CLS]"])[0], (suffix or ["[SEP]"])[0]
    kinds = {"bert": processors.BertProcessing, "roberta": processors.RobertaProcessing}
    return kinds[kind]((last, IDS[last]), (first, IDS[first]))


@given(
    kind=st.sampled_from(["template", "bert", "roberta"]),
    prefix=special_lists,
    suffix=special_lists,
    letters=st.sampled_from(["a", "xyz", "ACGT"]),
    nesting=st.sampled_from(["alone", "in sequence"]),
)
@settings(max_examples=60, deadline=None)
def test_a_post_processor_is_read_for_any_vocabulary(
    kind: str, prefix: list[str], suffix: list[str], letters: str, nesting: str
) -> None:
    tokenizer = build_words(letters)
    processor = build_processor(kind, prefix, suffix)
    byte_level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = (
        processors.Sequence([byte_level, processor]) if nesting == "in sequence" else processor
    )
    around = read_special_tokens(tokenizer, Path("folder"))
    for text in ("", letters[0], letters):
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).ids == [*around.prefix, *plain, *around.suffix]


@given(prefix=special_lists, suffix=special_lists, before=special_lists)
@settings(max_examples=40, deadline=None)
def test_a_written_post_processor_encloses_texts_and_pairs(
    prefix: list[str], suffix: list[str], before: list[str]
) -> None:
    tokenizer = build_words("xy")
    tokenizer.post_processor = build_processor("template", before, suffix)
    document = json.loads(tokenizer.to_str())
    start, end = ([IDS[token] for token in tokens] for tokens in (prefix, suffix))
    enclose_texts(document, SpecialTokens(tuple(start), tuple(end)))
    written = Tokenizer.from_str(json.dumps(document))
    x, y = (written.token_to_id(letter) for letter in "xy")
    assert written.encode("x").ids == [*start, x, *end]
    pair = written.encode("x", "y")
    assert pair.ids == [*start, x, *end, y, *end]
    assert pair.type_ids == [0] * (len(start) + 1 + len(end)) + [1] * (1 + len(end))
    assert not enclose_texts(document, SpecialTokens(tuple(start), tuple(end)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_texts_have_the_ids_of_transformers(
    family: str, flags: dict[str, bool], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(family, tmp_path / "tokenizer")
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **flags}
    path.write_text(json.dumps(config), encoding="utf-8")
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer = LoadedTokenizer(folder, ensure_end_token=False)
    for text in ("", *draw_texts(20, seed=1)):
        (ids,) = tokenizer.encode([text])
        assert tokenizer.add_special_tokens(ids).tolist() == loaded(text).input_ids
    firsts, seconds = draw_texts(5, seed=2), draw_texts(5, seed=3)
    pairs = tokenizer.encode_pairs(firsts, seconds, 100)
    for first, second, pair in zip(firsts, seconds, pairs, strict=True):
        assert pair.ids.tolist() == loaded(first, second).input_ids


def test_a_post_processor_that_repeats_the_text_is_refused(tmp_path: Path) -> None:
    tokenizer = build_words("xy")
    tokenizer.post_processor = processors.TemplateProcessing("$A $A", "$A $B", [])
    with pytest.raises(DataError, match=r"returns the text 2 times; set post_processor"):
        read_special_tokens(tokenizer, tmp_path)


@pytest.fixture
def bases(tmp_path: Path) -> Path:
    """Return the tokenizer of a vocabulary of four letters, without an unknown token."""
    vocabulary = {**IDS, **{letter: len(IDS) + at for at, letter in enumerate("ACGT")}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = build_processor("template", ["[CLS]"], ["[SEP]"])
    (tmp_path / "data" / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "data" / "tokenizer" / "tokenizer.json"))
    return tmp_path / "data" / "tokenizer"


def test_a_vocabulary_without_the_letter_a_has_special_tokens_on_both_sides(bases: Path) -> None:
    tokenizer = LoadedTokenizer(bases)
    (ids,) = tokenizer.encode(["GATTACA"])
    assert tokenizer.add_special_tokens(ids).tolist() == [0, 7, 5, 8, 8, 5, 6, 5, 1]
    assert tokenizer.add_special_tokens(tokenizer.encode([""])[0]).tolist() == [0, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_bpe_without_an_unknown_token_leaves_out_characters(
    family: str, tmp_path: Path
) -> None:
    tokenizer = LoadedTokenizer(write_tokenizer(family, tmp_path / "tokenizer"))
    known, unknown = (ids.tolist() for ids in tokenizer.encode(["river", "riverΩ"]))
    assert tokenizer.omits_unknown_characters == (known == unknown)
    assert tokenizer.omits_unknown_characters == (family == "no unknown")


def test_characters_that_are_left_out_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tokenizer("no unknown", tmp_path / "tokenizer")
    lines = (json.dumps({"text": text}) for text in draw_texts(30))
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    prepare_dataset(tmp_path, tokenizer={"path": str(folder)})
    assert "has no unknown token: it leaves out unknown characters" in caplog.text


def test_documents_of_older_versions_with_other_special_tokens_are_refused(bases: Path) -> None:
    older = Tokenization(max_length=8)
    with pytest.raises(DataError, match=r"older version put .* at the end of texts; export"):
        Preprocessor(bases, older, InputSpec())
    read = older.model_copy(update={"special_tokens": "read"})
    Preprocessor(bases, read, InputSpec())
    data = datasets.write_pairs(bases.parent.parent / "rows")
    run = runs.settings(bases.parent.parent / "run", data, "contrastive")
    assert len(read_manifests(run)) == 1
    shutil.copy(bases / "tokenizer.json", data / "tokenizer" / "tokenizer.json")
    with pytest.raises(DataError, match=r"at the end of texts; prepare the data again"):
        read_manifests(run)
    path = data / "manifest.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, "special_tokens": "read"}), encoding="utf-8")
    assert len(read_manifests(run)) == 1


@pytest.mark.parametrize("splits", [False, True])
def test_special_tokens_in_texts_are_parsed_as_the_tokenizer_declares(
    splits: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    folder = write_tokenizer("roberta", tmp_path / "tokenizer")
    path = folder / "tokenizer_config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, "split_special_tokens": splits}), encoding="utf-8")
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenization = Tokenization(max_length=30, convention="transformers", special_tokens="read")
    text = "river </s> stone"
    records = Preprocessor(folder, tokenization, InputSpec()).encode_records([[text]]).records
    assert records.texts[0].ids.tolist() == loaded(text).input_ids
    fields = InputSpec(text_fields=("a", "b"), is_pair=True)
    pairs = Preprocessor(folder, tokenization, fields).encode_records([[text], [text]]).records
    assert pairs.texts[0].ids.tolist() == loaded(text, text).input_ids


def test_an_unknown_word_without_an_unknown_token_is_one_line(tmp_path: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(("[CLS]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder := tmp_path / "words").mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"cls_token": "[CLS]"}', encoding="utf-8")
    loaded = LoadedTokenizer(folder)
    assert [ids.tolist() for ids in loaded.encode(["", "river stone"])] == [[], [1, 2]]
    for encode in (
        lambda: loaded.encode(["stone", "river sea"]),
        lambda: loaded.encode_pairs(["river"], ["sea"], 8),
    ):
        with pytest.raises(
            DataError, match=r"cannot encode .*river.*: WordLevel .*; set model\.unk_token"
        ):
            encode()
