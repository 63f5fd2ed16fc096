"""Token classification: tags at first tokens, entities, loss and metrics, as in the peers."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from seqeval.metrics import classification_report, f1_score, precision_score, recall_score
from seqeval.scheme import BILOU, IOBES

from distributed import datasets
from distributed.datasets import TAGS, read_first_batch
from distributed.runs import BERT, LLAMA
from regauge.commands import prepare
from regauge.commands._parts.default_tables import complete_tables
from regauge.config import build
from regauge.data.dataset import Dataset
from regauge.data.loader import CollatorConfig
from regauge.data.settings import RowLayout
from regauge.data.tokenizer import LoadedTokenizer, find_first_tokens
from regauge.inference.export.postprocess import find_entities
from regauge.inference.export.preprocess import Preprocessor, TextWords
from regauge.models.io_spec import InputSpec
from regauge.models.sentence_transformers import Tokenization
from regauge.models.settings import Model
from regauge.system.errors import DataError, SettingsError
from regauge.tasks._entities import Entity, TagScheme
from regauge.tasks.tokens import Tokens
from regauge.training.heldout import compute_means
from tokenizer_families import draw_texts, write_tokenizer

CONFIG = CollatorConfig(datasets.VOCABULARY, 0, 4, (0, 1, 2, 3, 4))
SENTENCES = [
    (["EU", "rejects", "German", "call", "."], ["B-ORG", "O", "B-MISC", "O", "O"]),
    (["Peter", "Blackburn-Smith", "(", "Zürich", ")"], ["B-PER", "I-PER", "O", "B-LOC", "O"]),
    (["unbelievable", "3,000", "U.S.", "名前"], ["O", "O", "B-LOC", "O"]),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.write_tagged(tmp_path_factory.mktemp("data") / "tagged"))


def write_records(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare_tagged(folder: Path, records: list[dict[str, Any]], **tables: Any) -> Dataset:
    """Prepare records of words and tags as training rows."""
    base = {
        "data": {"path": str(folder / "data")},
        "source": {"kind": "jsonl", "files": (str(write_records(folder, records)),)},
        "rows": {"layout": "tagged"},
        "split": {"heldout_fraction": 0.0},
        "tokenizer": {"vocab_size": 400},
        "prepare": {"processes": 1},
        **tables,
    }
    prepare.run(build(prepare.PrepareSettings, base))
    return Dataset(folder / "data")


STRICT_BIOES: dict[str, Any] = {"mode": "strict", "scheme": IOBES}
SCHEMES: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "iob": (TAGS, TAGS, {}),
    "types with hyphens": (("B-x-y", "I-x-y", "B-z", "O"), ("B-x-y", "I-x-y", "B-z", "O"), {}),
    "iob without types": (("B", "I", "O"), ("B", "I", "O"), {}),
    "underscores": (("O", "B_x", "I_x", "I_y"), ("O", "B-x", "I-x", "I-y"), {}),
    "io": (("O", "I-x", "I-y"), ("O", "I-x", "I-y"), {}),
    "io without prefixes": (("x", "O", "y"), ("I-x", "O", "I-y"), {}),
    "ioe": (("I-x", "E-x", "I-y", "E-y", "O"), ("I-x", "E-x", "I-y", "E-y", "O"), {}),
    "bioes": (
        ("B-x", "I-x", "E-x", "S-x", "O", "I-y", "E-y", "B-y", "S-y"),
        ("B-x", "I-x", "E-x", "S-x", "O", "I-y", "E-y", "B-y", "S-y"),
        STRICT_BIOES,
    ),
    "bioes of short entities": (("O", "B-x", "E-x"), ("O", "B-x", "E-x"), STRICT_BIOES),
    "bilou": (
        ("O", "B-x", "I-x", "L-x", "U-x", "U-y"),
        ("O", "B-x", "I-x", "L-x", "U-x", "U-y"),
        {"mode": "strict", "scheme": BILOU},
    ),
    "bmes": (("B", "M", "E", "S"), ("B", "I", "E", "S"), STRICT_BIOES),
    "bmewo": (("O", "B-x", "M-x", "E-x", "W-x"), ("O", "B-x", "I-x", "E-x", "S-x"), STRICT_BIOES),
}
"""Scheme -> tags, the same tags for seqeval, and seqeval's options."""


@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_entities_equal_seqeval(scheme_name: str) -> None:
    """Random tags also have invalid sequences, such as an I after another type."""
    names, peer_names, options = SCHEMES[scheme_name]
    draw, scheme = np.random.default_rng(0), TagScheme(names)
    actual = [draw.integers(0, len(names), draw.integers(1, 12)).tolist() for _ in range(200)]
    predicted = [
        [tag if draw.random() < 0.8 else int(draw.integers(0, len(names))) for tag in tags]
        for tags in actual
    ]
    counts = np.zeros((3, len(scheme.types)))
    for ours, theirs in zip(actual, predicted, strict=True):
        groups = [set(scheme.find_entities(tags)) for tags in (ours, theirs)]
        for row, entities in enumerate((groups[0] & groups[1], groups[1], groups[0])):
            for entity in entities:
                counts[row, entity.type] += 1
    texts = [[[peer_names[tag] for tag in tags] for tags in rows] for rows in (actual, predicted)]
    correct, guessed, true = counts.sum(1)
    assert correct > 0
    assert correct / guessed == pytest.approx(precision_score(*texts, **options))
    assert correct / true == pytest.approx(recall_score(*texts, **options))
    assert 2 * correct / (guessed + true) == pytest.approx(f1_score(*texts, **options))
    report = classification_report(*texts, output_dict=True, **options)
    for index, name in enumerate(scheme.types):
        assert counts[2, index] == report[name]["support"]
        assert counts[0, index] / counts[1, index] == pytest.approx(report[name]["precision"])


@pytest.mark.parametrize("names", [("NOUN", "VERB", "X"), ("B-x", "Q-x", "Z-x")])
def test_names_of_other_kinds_tag_single_words(names: tuple[str, ...]) -> None:
    scheme = TagScheme(names)
    assert scheme.types == names
    assert scheme.find_entities([0, 0, 1]) == [Entity(0, 0, 1), Entity(0, 1, 2), Entity(1, 2, 3)]


@pytest.mark.parametrize("family", ["trained", "bert", "roberta", "llama", "t5"])
def test_tags_are_at_the_first_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    folder = write_tokenizer(family, tmp_path / family)
    tokenizer = LoadedTokenizer(folder)
    peer = transformers.AutoTokenizer.from_pretrained(folder, add_prefix_space=True)
    num_compared = 0
    for text in draw_texts(20):
        words = text.split()
        (encoded,) = tokenizer.encode_with_offsets([text])
        assert encoded.ids.tolist() == tokenizer.encode([text])[0].tolist()
        first_tokens = find_first_tokens(words, encoded.offsets)
        for word, token in zip(words, first_tokens, strict=True):
            if token is not None:  # a token of llama may have several words
                assert word.startswith(text[slice(*encoded.offsets[token])].split(" ")[-1])
        plain = peer(words, is_split_into_words=True, add_special_tokens=False)
        if plain["input_ids"] == encoded.ids.tolist():  # else it reads the first word differently
            word_ids = plain.word_ids()
            assert first_tokens == [word_ids.index(word) for word in range(len(words))]
            num_compared += 1
    assert num_compared == 20 or family in {"roberta", "llama"}


def test_a_sentence_becomes_a_row_of_tokens_and_tags(tmp_path: Path) -> None:
    records = [{"tokens": words, "tags": tags} for words, tags in SENTENCES]
    data = prepare_tagged(tmp_path, records)
    column = data.manifest.columns["tags"]
    names = ("B-LOC", "B-MISC", "B-ORG", "B-PER", "I-PER", "O")
    assert column.class_names == names
    assert column.class_counts["train"] == (2, 1, 1, 1, 1, 8)
    tokenizer = LoadedTokenizer(data.folder / "tokenizer")
    for row, (words, tags) in zip(data.rows("train").take(range(3)), SENTENCES, strict=True):
        expected = tokenizer.add_special_tokens(tokenizer.encode([" ".join(words)])[0])
        assert row["tokens"].tolist() == expected.tolist()
        assert len(row["tags"]) == len(expected)
        assert row["tags"][0] == row["tags"][-1] == -1
        assert [names[tag] for tag in row["tags"] if tag >= 0] == tags
        first = tokenizer.decode(expected[int(np.flatnonzero(row["tags"] >= 0)[0])][None])
        assert words[0].startswith(first.strip())


def test_a_long_sentence_is_truncated_and_counted(tmp_path: Path) -> None:
    records = [{"words": ["a"] * 30, "ner": [0] * 30}, {"words": ["b"], "ner": [1]}]
    rows = {"layout": "tagged", "fields": {"words": 10}, "labels": {"ner": ("O", "B-X")}}
    data = prepare_tagged(tmp_path, records, rows=rows)
    long, short = data.rows("train").take(range(2))
    assert len(long["words"]) == len(long["ner"]) == 10
    (encoded,) = LoadedTokenizer(data.folder / "tokenizer").encode_with_offsets(["a " * 29 + "a"])
    first_tokens = find_first_tokens(["a"] * 30, encoded.offsets)
    assert [token for token in range(8) if long["ner"][1 + token] == 0] == [
        token for token in first_tokens if token is not None and token < 8
    ]
    assert short["ner"].max() == 1
    assert sorted(short["ner"].tolist())[:-1] == [-1] * (len(short["ner"]) - 1)
    assert data.manifest.truncated == {"words": 1}
    Tokens(words="words", tags="ner").check_dataset(data.manifest)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "words and tags differ in number"),
        ({"tokens": "a b", "tags": ["O", "O"]}, "no list in 'tokens'"),
        ({"tokens": ["a"], "tags": "O"}, "no list in 'tags'"),
        ({"tokens": ["a", " "], "tags": ["O", "O"]}, "a word in 'tokens' is empty or not a text"),
        ({"tokens": ["a", 3], "tags": ["O", "O"]}, "a word in 'tokens' is empty or not a text"),
        ({"tokens": ["a"], "tags": [None]}, "no class in 'tags'"),
    ],
)
def test_unusable_records_are_rejected(tmp_path: Path, record: dict[str, Any], reason: str) -> None:
    good = {"tokens": ["a", "b"], "tags": ["O", "B-X"]}
    data = prepare_tagged(tmp_path, [good, {**good, "tokens": ["c", "d"]}, record])
    assert len(data.rows("train")) == 2
    rejected = json.loads((data.folder / "rejected.jsonl").read_text())
    assert rejected["reason"] == reason


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ({"fields": {"a": 9, "b": 9}}, "one field of words and one of tags"),
        ({"labels": ("a", "b")}, "one field of words and one of tags"),
        ({"fields": {"tokens": 1}}, "the limit of 'tokens' is below"),
        ({"fields": {"tags": 9}}, "'tags' is listed twice"),
        ({"length": 9}, "does not use 'length'"),
    ],
)
def test_invalid_rows_are_refused(tmp_path: Path, rows: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        prepare_tagged(tmp_path, [], rows={"layout": "tagged", **rows})


@pytest.mark.parametrize("model", [BERT, LLAMA], ids=lambda model: model["architecture"])
def test_the_loss_equals_transformers(data: Dataset, model: dict[str, Any]) -> None:
    task = Tokens().resolve_defaults(data.manifest)
    module = task.build_module(Model(**{**model, "dropout": 0.0}), data.manifest, 0).eval()
    inner: Any = module.model
    assert type(inner).__name__.endswith("ForTokenClassification")
    assert inner.config.id2label == dict(enumerate(TAGS))
    batch = read_first_batch(task, data, CONFIG)
    labels = torch.where(batch["weights"] > 0, batch["labels"], -100)
    assert (labels >= 0).sum() > 20
    with torch.no_grad():
        expected = inner(
            input_ids=batch["tokens"], attention_mask=(batch["segments"] > 0).long(), labels=labels
        ).loss
        loss, weight = task.loss(module(batch), batch)
    torch.testing.assert_close(loss / weight, expected, rtol=1e-5, atol=1e-6)


def test_metrics_equal_seqeval(data: Dataset) -> None:
    task = Tokens().resolve_defaults(data.manifest)
    batch = read_first_batch(task, data, CONFIG, 12)
    draw = torch.Generator().manual_seed(3)
    scores = torch.nn.functional.one_hot(batch["labels"], len(TAGS)).float()
    scores += torch.rand(scores.shape, generator=draw) * 1.3
    vectors = task.eval_outputs({"scores": scores}, batch)
    padded = torch.cat([vectors, torch.zeros(3, vectors.shape[1])])
    metrics = compute_means(task.metric_sums({"vectors": padded}, {}))
    mask = batch["weights"] > 0
    rows = [
        [
            [TAGS[tag] for tag in tags[is_word].tolist()]
            for tags, is_word in zip(values, mask, strict=True)
        ]
        for values in (batch["labels"], scores.argmax(2))
    ]
    losses = torch.nn.functional.cross_entropy(scores[mask], batch["labels"][mask])
    correct = (scores.argmax(2) == batch["labels"])[mask]
    assert 0.3 < metrics["f1"] < 0.95
    assert metrics == pytest.approx(
        {
            "loss": float(losses),
            "accuracy": float(correct.float().mean()),
            "precision": precision_score(*rows),
            "recall": recall_score(*rows),
            "f1": f1_score(*rows),
            "items": int(mask.sum()),
        },
        rel=1e-5,
    )
    report = task.class_report({"vectors": vectors})
    assert report is not None
    expected = classification_report(*rows, output_dict=True)
    for row in report["classes"]:
        peer = expected[row["name"]]
        assert row["f1"] == pytest.approx(peer["f1-score"])
        assert row["support"] == peer["support"]


def test_rows_follow_from_the_task() -> None:
    task = {"kind": "tokens", "words": "text", "tags": "ner", "class_names": ("O", "B-X")}
    expected = {"layout": "tagged", "fields": {"text": 128}, "labels": {"ner": ("O", "B-X")}}
    assert complete_tables({"source": {}, "task": task})["rows"] == expected
    assert build(RowLayout, expected).labels == expected["labels"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"words": "token"}, "no field 'token'; did you mean 'tokens'"),
        ({"tags": "tokens"}, "is not of type integers; choose from: tags"),
        ({"classes": 3}, "has 5 classes, and task.classes = 3; remove task.classes"),
        ({"classes": 9}, "has 5 classes, and task.classes = 9; remove task.classes"),
        ({"class_names": ("O", "B-X")}, "are B-LOC, B-PER, .* and task.class_names differ; remove"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(
    data: Dataset, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises((SettingsError, DataError), match=problem):
        Tokens(**changes).check_dataset(data.manifest)


@pytest.mark.parametrize("family", ["trained", "bert", "gpt2", "roberta", "t5"])
def test_words_of_a_text_have_their_characters(tmp_path: Path, family: str) -> None:
    folder = write_tokenizer(family, tmp_path / family)
    text = "  river stone   lemon "
    tokenization = Tokenization(max_length=64, special_tokens="read")
    preprocessor = Preprocessor(folder, tokenization, InputSpec())
    (words,) = preprocessor.find_words([text], None)
    assert [text[start:end] for start, end in words.spans] == ["river", "stone", "lemon"]
    (ids,) = preprocessor.encode_records([[text]]).records.texts[0].lengths
    assert (words.positions < ids).all()
    assert preprocessor.find_words([""], None)[0].spans.shape == (0, 2)


@pytest.mark.parametrize("family", ["trained", "bert", "roberta", "llama", "t5"])
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_words_end_at_whole_characters(
    tmp_path: Path, family: str, form: Literal["NFC", "NFD"]
) -> None:
    """A text that is cut between characters has the composed form of its parts."""
    names = "Zoë José Łukasz Мария Đặng 한국 हिंदी नमस्ते 👍🏽 👩‍👩‍👧 é́ x"
    text = unicodedata.normalize(form, f"{names}\t{names.replace(' ', ', ')}\n{names} ❤️")
    folder = write_tokenizer(family, tmp_path / family)
    tokenization = Tokenization(max_length=512, special_tokens="read")
    preprocessor = Preprocessor(folder, tokenization, InputSpec(max_lengths=(512,)))
    (words,) = preprocessor.find_words([text], None)
    whole = unicodedata.normalize("NFC", text)
    spans = words.spans.tolist()
    assert [stop for _, stop in spans] == sorted({stop for _, stop in spans})
    for cut in {cut for span in spans for cut in span}:
        parts = [unicodedata.normalize("NFC", part) for part in (text[:cut], text[cut:])]
        assert "".join(parts) == whole
        assert not text[cut:].startswith(("\u200d", "\ufe0f", "\U0001f3fd")), text[cut - 3 : cut]
        assert not unicodedata.category((text[cut:] or "x")[0]).startswith("M")


@pytest.mark.parametrize("family", ["trained", "bert", "gpt2", "roberta", "t5"])
def test_given_words_are_not_split(tmp_path: Path, family: str) -> None:
    """Tags are at the first token of each word, as in training."""
    folder = write_tokenizer(family, tmp_path / family)
    tokenization = Tokenization(max_length=64, special_tokens="read")
    preprocessor = Preprocessor(folder, tokenization, InputSpec())
    given = ["U.S.", "river", "stone-lemon", ",", "it's"]
    text = " ".join(given)
    split, whole = preprocessor.find_words([text, text], None, [[], given])
    assert [text[start:end] for start, end in whole.spans] == given
    assert {*whole.positions.tolist()} <= {*split.positions.tolist()} or family == "t5"
    short = Preprocessor(folder, tokenization, InputSpec(max_lengths=(6,)))
    (words,) = short.find_words([text], None, [given])
    assert text[slice(*words.spans[0])] == "U.S."
    assert len(words.positions) < len(given)
    assert words.positions.max() < 6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["trained", "bert", "gpt2", "roberta", "t5"])
def test_a_prompt_moves_the_tokens_of_words(
    tmp_path: Path, family: str, side: Literal["left", "right"]
) -> None:
    """The oracle is the tokens' characters in the text with its prompt."""
    folder = write_tokenizer(family, tmp_path / family)
    prompt, given = "silver window: ", ["U.S.", "river", "stone-lemon", ",", "it's"]
    text = " ".join(given)
    for limit in (64, 12):
        tokenization = Tokenization(
            max_length=limit,
            special_tokens="read",
            prompts={"p": prompt},
            truncation_side=side,
        )
        preprocessor = Preprocessor(folder, tokenization, InputSpec())
        described = preprocessor.describe_tokens([text], "p")[0]
        tokens = [token for token in described if not token["special"]]
        first, room = described.index(tokens[0]), limit - (len(described) - len(tokens))
        shown = tokens[-room:] if side == "left" else tokens[:room]
        (ids,) = preprocessor.encode_records([[text]], "p").records.texts
        plain = preprocessor.find_words([text, text], None, [[], given])
        prompted = preprocessor.find_words([text, text], "p", [[], given])
        for words, other in zip(prompted, plain, strict=True):
            assert limit == 12 or words.spans.tolist() == other.spans.tolist()
            for position, (start, end) in zip(words.positions, words.spans, strict=True):
                token = shown[position - first]
                assert token["id"] == ids.ids[position]
                piece = (prompt + text)[token["start"] : token["stop"]].strip()
                assert text[start:end].startswith(piece), (text[start:end], piece)
                assert token["stop"] > len(prompt.rstrip())


def test_words_after_the_limit_are_left_out(tmp_path: Path) -> None:
    folder = write_tokenizer("bert", tmp_path / "bert")
    tokenization = Tokenization(max_length=64, special_tokens="read")
    preprocessor = Preprocessor(folder, tokenization, InputSpec(max_lengths=(4,)))
    (words,) = preprocessor.find_words(["river stone lemon window silver winter"], None)
    assert words.positions.max() < 3, "the last position is the separator"
    assert 0 < len(words.spans) < 6


def test_entities_of_a_text_have_scores() -> None:
    text = "Ann Lee met Bo"
    spans = np.array([[0, 3], [4, 7], [8, 11], [12, 14]])
    words = TextWords(text, np.array([1, 2, 4, 5]), spans)
    tags = np.zeros((8, 2))
    tags[[1, 2, 3, 4, 5]] = [[1, 0.9], [2, 0.5], [1, 0.1], [0, 0.8], [2, 0.6]]
    assert find_entities(tags, words, ("O", "B-PER", "I-PER")) == [
        {"text": "Ann Lee", "label": "PER", "start": 0, "end": 7, "score": pytest.approx(0.7)},
        {"text": "Bo", "label": "PER", "start": 12, "end": 14, "score": pytest.approx(0.6)},
    ]
    plain = find_entities(tags, words, ())
    assert [(entity["text"], entity["label"]) for entity in plain] == [
        ("Ann", "1"),
        ("Lee", "2"),
        ("met", "0"),
        ("Bo", "2"),
    ]


def test_the_baseline_is_the_most_frequent_tag_of_a_word() -> None:
    train = [
        {"tokens": np.array([1, 7, 8, 9, 2]), "tags": np.array([-1, 0, 1, -1, -1])},
        {"tokens": np.array([1, 7, 7, 10, 2]), "tags": np.array([-1, 0, 2, 2, -1])},
        {"tokens": np.array([1, 10, 10, 7, 2]), "tags": np.array([-1, 2, 0, 0, -1])},
    ]
    heldout = [{"tokens": np.array([1, 7, 8, 10, 30, 2]), "tags": np.array([-1, 0, 1, 0, 2, -1])}]
    task = Tokens(words="tokens", tags="tags", classes=3, class_names=("O", "B-A", "B-C"))
    means = compute_means(task.fit_baselines(train, heldout)["most frequent tag"])
    # 7 is O, 8 is B-A, 10 is B-C, and an unknown word is O, as most words are.
    assert means["accuracy"] == pytest.approx(2 / 4)
    assert means["f1"] == pytest.approx(2 * 1 / (2 + 2))
