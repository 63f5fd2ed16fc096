"""Tokenizers: deterministic training, loadable by transformers, and no special tokens in text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from regauge.data import settings, tokenizer
from regauge.data.dataset import TOKENIZER
from regauge.system.errors import DataError

TEXTS = [
    f"The number {number} is a value of the mask [MASK], naïve 日本 \n" for number in range(400)
]

EMPTY = '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'
"""A tokenizer without tokens."""


def batches() -> Iterator[list[str]]:
    yield TEXTS[:150]
    yield TEXTS[150:]


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "trained"
    tokenizer.train_tokenizer(batches(), settings.TokenizerSettings(vocab_size=400), folder)
    return folder


def test_the_number_of_threads_does_not_change_the_result(
    trained_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "one"
    code = (
        "from pathlib import Path; from unit import test_tokenizer as t;"
        f"options = t.settings.TokenizerSettings(vocab_size=400); folder = Path({str(folder)!r});"
        "t.tokenizer.train_tokenizer(t.batches(), options, folder)"
    )
    tests = str(Path(__file__).parents[1])
    variables = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONPATH": tests}
    subprocess.run([sys.executable, "-c", code], check=True, env=variables)
    assert (folder / TOKENIZER).read_bytes() == (trained_folder / TOKENIZER).read_bytes()


def test_the_info_has_the_special_tokens(trained_folder: Path) -> None:
    facts = tokenizer.LoadedTokenizer(trained_folder).info
    assert (facts.pad_token_id, facts.sep_token_id, facts.mask_token_id) == (0, 3, 4)
    assert facts.special_token_ids == (0, 1, 2, 3, 4)
    assert 261 < facts.vocab_size <= 400
    assert len(facts.sha256) == 64


def test_stored_truncation_and_padding_are_ignored(trained_folder: Path, tmp_path: Path) -> None:
    dataset, model = tmp_path / "data", tmp_path / "model"
    shutil.copytree(trained_folder, dataset / "tokenizer")
    tokenizer.check_same_tokenizer(dataset, model)  # the model has no tokenizer
    shutil.copytree(trained_folder, model)
    other = Tokenizer.from_file(str(trained_folder / TOKENIZER))
    other.enable_truncation(16)
    other.enable_padding(length=16)
    other.save(str(model / TOKENIZER))
    assert (model / TOKENIZER).read_bytes() != (trained_folder / TOKENIZER).read_bytes()
    tokenizer.check_same_tokenizer(dataset, model)
    other.add_tokens(["extraordinary"])
    other.save(str(model / TOKENIZER))
    with pytest.raises(DataError, match=r"another tokenizer .*; prepare the data with"):
        tokenizer.check_same_tokenizer(dataset, model)


def test_tokens_of_letters_are_words(trained_folder: Path) -> None:
    encoder = tokenizer.LoadedTokenizer(trained_folder)
    words = encoder.list_words()
    assert {"number", "value", "mask", "the"} <= set(words)
    assert words == sorted(set(words))
    assert all(word.isalpha() and len(word) >= 3 for word in words)
    assert "[MASK]" not in words


def test_text_is_encoded_and_decoded(trained_folder: Path) -> None:
    encoder = tokenizer.LoadedTokenizer(trained_folder)
    (ids,) = encoder.encode([TEXTS[7]])
    assert not set(ids.tolist()) & set(encoder.info.special_token_ids)
    wrapped = encoder.add_special_tokens(ids).tolist()
    assert wrapped == [2, *ids.tolist(), 3]
    assert encoder.num_special_tokens == 2
    decoder = Tokenizer.from_file(str(trained_folder / "tokenizer.json"))
    assert decoder.decode(ids.tolist()).removeprefix(" ") == TEXTS[7]


def test_transformers_loads_the_folder_and_gives_the_same_ids(trained_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(trained_folder))
    encoder = tokenizer.LoadedTokenizer(trained_folder)
    for text in TEXTS[:5]:
        assert (
            loaded(text).input_ids == encoder.add_special_tokens(encoder.encode([text])[0]).tolist()
        )
    assert (loaded.pad_token_id, loaded.mask_token_id, loaded.sep_token_id) == (0, 4, 3)


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, regauge.data.prepare.prepare;"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_a_copy_encodes_the_same(trained_folder: Path, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    shutil.copytree(trained_folder, source, dirs_exist_ok=True)
    (source / "model.safetensors").write_bytes(b"weights")
    (source / "config.json").write_text("{}")
    tokenizer.copy_tokenizer(source, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert tokenizer.hash_tokenizer(tmp_path / "copy") == tokenizer.hash_tokenizer(trained_folder)
    first, second = (
        tokenizer.LoadedTokenizer(trained_folder),
        tokenizer.LoadedTokenizer(tmp_path / "copy"),
    )
    assert first.info == second.info


def test_eos_can_be_the_end_token(tmp_path: Path) -> None:
    tokens = {"<eos>": 0, "a": 1, "b": 2}
    word_tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<eos>"))  # noqa: S106
    word_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    word_tokenizer.enable_truncation(2)
    word_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    encoder = tokenizer.LoadedTokenizer(tmp_path)
    assert encoder.add_special_tokens(encoder.encode(["a b a b"])[0]).tolist() == [1, 2, 1, 2, 0]
    facts = encoder.info
    assert (
        facts.pad_token_id,
        facts.mask_token_id,
        facts.sep_token_id,
        facts.special_token_ids,
    ) == (0, None, 0, (0,))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer folder"):
        tokenizer.hash_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match=r"has no tokenizer; set tokenizer\.path"):
        tokenizer.hash_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        tokenizer.LoadedTokenizer(tmp_path)


def test_a_model_folder_has_every_file_of_its_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from regauge.models.weights import write_config_and_tokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]
    (origin := tmp_path / "origin").mkdir()
    (origin / "vocab.txt").write_text("\n".join(words) + "\n")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (origin / "tokenizer_config.json").write_text(json.dumps(config))
    (origin / "notes.txt").write_text("no part of it")
    (target := tmp_path / "target").mkdir()
    write_config_and_tokenizer(target, transformers.BertConfig(), origin)
    names = {path.name for path in target.iterdir()}
    assert names == {"config.json", "tokenizer_config.json", "vocab.txt"}
    loaded = transformers.AutoTokenizer.from_pretrained(str(target))
    assert loaded("two one").input_ids == [2, 6, 5, 3]


@pytest.mark.parametrize(
    ("name", "text", "damage"),
    [
        ("tokenizer.json", "[]", "cannot be read"),
        ("tokenizer.json", "[" * 5000, "cannot be read"),
        ("tokenizer.json", EMPTY, "has no tokens"),
        ("tokenizer_config.json", "[]", "cannot be read: it contains [], not an object"),
        ("tokenizer_config.json", '{"pad_token": 5}', "is damaged: 'pad_token.str' must be"),
        ("tokenizer_config.json", '{"pad_token": {"content": [1]}}', "is damaged: 'pad_token.str'"),
    ],
)
def test_a_damaged_tokenizer_is_one_line(
    trained_folder: Path, tmp_path: Path, name: str, text: str, damage: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(trained_folder, folder)
    (folder / name).write_text(text)
    with pytest.raises(DataError) as caught:
        tokenizer.LoadedTokenizer(folder)
    assert f"{folder / name} {damage}" in caught.value.problem
    assert caught.value.remedy == "replace it"


def write_wordpiece(folder: Path) -> Path:
    words = ["[UNK]", "[CLS]", "[SEP]", "river", "##s", "##ide", "run"]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = models.WordPiece(vocabulary, unk_token=words[0])
    wordpiece = Tokenizer(model)
    wordpiece.pre_tokenizer = pre_tokenizers.Whitespace()
    wordpiece.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    folder.mkdir()
    wordpiece.save(str(folder / TOKENIZER))
    return folder


def test_a_chunk_is_cut_to_whole_words(trained_folder: Path, tmp_path: Path) -> None:
    loaded = tokenizer.LoadedTokenizer(trained_folder)
    (ids,) = loaded.encode(["unforeseeable rivers"])
    num_inner = len(loaded.encode(["unforeseeable"])[0])
    assert num_inner > 2
    for start in range(num_inner + 1):
        chunk = loaded.drop_partial_word(loaded.add_prefix(ids[start:]))
        assert chunk[: len(loaded.prefix)].tolist() == loaded.prefix.tolist()
        words = loaded.decode(chunk.tolist()).strip()
        assert words == ("rivers" if start else "unforeseeable rivers")
    pieces = tokenizer.LoadedTokenizer(write_wordpiece(tmp_path / "wordpiece"))
    (ids,) = pieces.encode(["riverside run"])
    assert pieces.drop_partial_word(pieces.add_prefix(ids[1:])).tolist() == [1, 6]
    assert pieces.drop_partial_word(pieces.add_prefix(ids)).tolist() == [1, *ids.tolist()]
    assert pieces.drop_partial_word(pieces.add_prefix(ids[1:3])).tolist() == [1, *ids[1:3].tolist()]
