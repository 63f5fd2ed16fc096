"""The tokenizer: trained the same each time, read by transformers, and deaf to special words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from regauge.data import settings, tokenizer
from regauge.data.dataset import TOKENIZER
from regauge.errors import DataError

TEXTS = [
    f"The number {number} is a value of the mask [MASK], naïve 日本 \n" for number in range(400)
]


def batches() -> Iterator[list[str]]:
    yield TEXTS[:150]
    yield TEXTS[150:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "trained"
    tokenizer.train(batches(), settings.Tokenizer(vocabulary=400), folder)
    return folder


def test_a_single_thread_trains_the_same(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    code = (
        "from pathlib import Path; from unit import test_tokenizer as t;"
        f"wanted = t.settings.Tokenizer(vocabulary=400); folder = Path({str(folder)!r});"
        "t.tokenizer.train(t.batches(), wanted, folder)"
    )
    tests = str(Path(__file__).parents[1])
    variables = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONPATH": tests}
    subprocess.run([sys.executable, "-c", code], check=True, env=variables)
    assert (folder / TOKENIZER).read_bytes() == (trained / TOKENIZER).read_bytes()


def test_facts_name_the_special_tokens(trained: Path) -> None:
    facts = tokenizer.Encoder(trained).facts
    assert (facts.pad, facts.separator, facts.mask) == (0, 3, 4)
    assert facts.special == (0, 1, 2, 3, 4)
    assert 261 < facts.vocabulary <= 400
    assert len(facts.sha256) == 64


def test_how_texts_were_cut_makes_no_other_tokenizer(trained: Path, tmp_path: Path) -> None:
    dataset, model = tmp_path / "data", tmp_path / "model"
    shutil.copytree(trained, dataset / "tokenizer")
    tokenizer.check_same(dataset, model)  # a model without one is anybody's
    shutil.copytree(trained, model)
    other = Tokenizer.from_file(str(trained / TOKENIZER))
    other.enable_truncation(16)
    other.enable_padding(length=16)
    other.save(str(model / TOKENIZER))
    assert (model / TOKENIZER).read_bytes() != (trained / TOKENIZER).read_bytes()
    tokenizer.check_same(dataset, model)
    other.add_tokens(["extraordinary"])
    other.save(str(model / TOKENIZER))
    with pytest.raises(DataError, match=r"another tokenizer .*; prepare the data with"):
        tokenizer.check_same(dataset, model)


def test_tokens_that_are_letters_are_taken_for_words(trained: Path) -> None:
    encoder = tokenizer.Encoder(trained)
    found = encoder.plain_words()
    assert {"number", "value", "mask", "the"} <= set(found)
    assert found == sorted(set(found))
    assert all(word.isalpha() and len(word) >= 3 for word in found)
    assert "[MASK]" not in found


def test_text_is_wrapped_and_comes_back(trained: Path) -> None:
    encoder = tokenizer.Encoder(trained)
    (ids,) = encoder.encode([TEXTS[7]])
    assert not set(ids.tolist()) & set(encoder.facts.special)
    wrapped = encoder.wrap(ids).tolist()
    assert wrapped == [2, *ids.tolist(), 3]
    assert encoder.overhead == 2
    decoder = Tokenizer.from_file(str(trained / "tokenizer.json"))
    assert decoder.decode(ids.tolist()).removeprefix(" ") == TEXTS[7]


def test_transformers_reads_the_folder_and_agrees(trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(trained))
    encoder = tokenizer.Encoder(trained)
    for text in TEXTS[:5]:
        assert loaded(text).input_ids == encoder.wrap(encoder.encode([text])[0]).tolist()
    assert (loaded.pad_token_id, loaded.mask_token_id, loaded.sep_token_id) == (0, 4, 3)


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, regauge.preparation.prepare;"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_a_copy_encodes_the_same(trained: Path, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    shutil.copytree(trained, source, dirs_exist_ok=True)
    (source / "model.safetensors").write_bytes(b"weights")
    (source / "config.json").write_text("{}")
    tokenizer.copy(source, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert tokenizer.fingerprint(tmp_path / "copy") == tokenizer.fingerprint(trained)
    first, second = tokenizer.Encoder(trained), tokenizer.Encoder(tmp_path / "copy")
    assert first.facts == second.facts


def test_a_tokenizer_that_ends_documents_with_eos(tmp_path: Path) -> None:
    tokens = {"<eos>": 0, "a": 1, "b": 2}
    made = Tokenizer(models.WordLevel(tokens, unk_token="<eos>"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    encoder = tokenizer.Encoder(tmp_path)
    assert encoder.wrap(encoder.encode(["a b a b"])[0]).tolist() == [1, 2, 1, 2, 0]
    facts = encoder.facts
    assert (facts.pad, facts.mask, facts.separator, facts.special) == (0, None, 0, (0,))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer folder"):
        tokenizer.fingerprint(tmp_path / "none")
    with pytest.raises(DataError, match="holds no tokenizer"):
        tokenizer.fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        tokenizer.Encoder(tmp_path)


def test_a_model_s_folder_has_every_file_of_its_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from regauge.models.weights import describe

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]
    (origin := tmp_path / "origin").mkdir()
    (origin / "vocab.txt").write_text("\n".join(words) + "\n")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (origin / "tokenizer_config.json").write_text(json.dumps(config))
    (origin / "notes.txt").write_text("no part of it")
    (target := tmp_path / "target").mkdir()
    describe(target, transformers.BertConfig(), origin)
    names = {path.name for path in target.iterdir()}
    assert names == {"config.json", "tokenizer_config.json", "vocab.txt"}
    loaded = transformers.AutoTokenizer.from_pretrained(str(target))
    assert loaded("two one").input_ids == [2, 6, 5, 3]
