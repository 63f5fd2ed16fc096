"""Near-duplicates: clusters agree with a pairwise comparison; the time is not quadratic."""

from __future__ import annotations

import time

import numpy as np
import pytest

from regauge.data import duplicates
from regauge.data.lexical import split_words

WORDS = [f"word{number}" for number in range(5000)]


def build_documents(count: int, length: int, seed: int = 0) -> list[list[str]]:
    random = np.random.default_rng(seed)
    return [[WORDS[index] for index in random.integers(0, 5000, length)] for _ in range(count)]


def find_labels(texts: list[str], similarity: float = 0.7) -> list[int]:
    signatures = duplicates.SignatureTable([duplicates.compute_signatures(texts)])
    labels: list[int] = duplicates.find_clusters(signatures, similarity).tolist()
    return labels


def test_variants_of_a_document_are_one_cluster() -> None:
    texts, owners = [], []
    for number, words in enumerate(build_documents(300, 80)):
        for variant in range(4):
            changed = list(words)
            changed[20 * variant] = f"changed{variant}"
            texts.append(" ".join(changed))
            owners.append(number)
    labels = find_labels(texts)
    assert labels == [owner * 4 for owner in owners]


def test_the_estimate_of_the_similarity_is_accurate() -> None:
    first = build_documents(1, 400)[0]
    second = first[:300] + build_documents(1, 100, seed=5)[0]
    one, two = (
        set(duplicates._hash_shingles([" ".join(words)])[0].tolist()) for words in (first, second)
    )
    true = len(one & two) / len(one | two)
    signatures = duplicates.compute_signatures([" ".join(first), " ".join(second)])
    assert abs((signatures[0] == signatures[1]).mean() - true) < 0.15
    assert 0.5 < true < 0.7


SCRIPTS = {
    "Chinese": (0x4E00, 0x9FA5),
    "Japanese": (0x3041, 0x3096),
    "Thai": (0x0E01, 0x0E3A),
    "Lao": (0x0E94, 0x0EA3),
    "Khmer": (0x1780, 0x17B3),
    "Myanmar": (0x1000, 0x102A),
    "Tibetan": (0x0F40, 0x0F47),
    "emoji": (0x1F600, 0x1F64F),
    "punctuation": (0x21, 0x2F),
}
"""First and last character of scripts without spaces between words."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_copies_in_scripts_without_spaces_are_one_cluster(script: str) -> None:
    """In each text, a comma ends a clause of ten characters."""
    random = np.random.default_rng(1)
    first, last = SCRIPTS[script]
    texts, owners = [], []
    for number in range(40):
        characters = [chr(code) for code in random.integers(first, last + 1, 120)]
        for copy in range(3):
            changed = list(characters)
            changed[40 * copy] = chr(int(random.integers(first, last + 1)))
            clauses = ["".join(changed[start : start + 10]) for start in range(0, 120, 10)]
            texts.append(("," if script == "punctuation" else "、").join(clauses))
            owners.append(3 * number)
    assert find_labels(texts) == owners


def test_case_and_spacing_are_ignored() -> None:
    labels = find_labels(["One  two three, four.", "one two THREE four", "five six seven eight"])
    assert labels == [0, 0, 2]


def test_very_short_texts_are_distinguished() -> None:
    assert find_labels(["", "a", "a b", "b", "!", "a", " "]) == [0, 1, 2, 3, 4, 1, 0]


def test_links_merge_whole_chains() -> None:
    count = 1000
    order = np.random.default_rng(0).permutation(count)
    labels = duplicates.link(np.arange(count), order[:-1], order[1:])
    assert not labels.any()
    labels = duplicates.link(np.arange(6), np.array([5, 1]), np.array([3, 2]))
    assert labels.tolist() == [0, 1, 1, 3, 4, 3]


def test_the_representative_depends_on_the_cluster_alone() -> None:
    hashes = build_hashes(b"c", b"a", b"b", b"d", b"e" * 9)
    labels = np.array([0, 1, 0, 0, 4])
    assert duplicates.find_representatives(labels, hashes).tolist() == [2, 1, 2, 2, 4]


def test_equal_records_get_the_number_of_the_first() -> None:
    hashes = build_hashes(b"b", b"a", b"b", b"a" * 16, b"a", b"b")
    assert duplicates.find_equal_records(hashes).tolist() == [0, 1, 0, 3, 1, 0]
    differ_late = build_hashes(b"c" * 8 + b"d", b"c" * 8 + b"e", b"c" * 8 + b"d")
    assert duplicates.find_equal_records(differ_late).tolist() == [0, 1, 0]
    assert duplicates.find_equal_records(build_hashes(b"a")).tolist() == [0]
    assert duplicates.find_equal_records(hashes[:0]).tolist() == []


def test_ascii_and_unicode_texts_are_split_alike() -> None:
    text = "".join(map(chr, range(128))) + " Don't  SHOUT_at 3.14\x1cme\x0b\x85"
    apart = text.replace("\x85", "")
    assert duplicates._split_words(apart) == [word.encode() for word in split_words(apart)]
    assert duplicates._split_words(text) == duplicates._split_words(apart)
    assert duplicates._split_words("Ærø ÉTÉ") == ["ærø".encode(), "été".encode()]


def build_hashes(*contents: bytes) -> np.ndarray:
    rows = b"".join(content.ljust(duplicates.HASH_BYTES, b"\0") for content in contents)
    return np.frombuffer(rows, dtype=np.uint8).reshape(len(contents), -1)


@pytest.mark.parametrize("cuts", [[], [0, 1, 7, 7, 2000], [300, 301]])
def test_clusters_do_not_depend_on_the_chunks_of_a_signature_table(cuts: list[int]) -> None:
    random = np.random.default_rng(0)
    signatures = random.integers(0, 2**32, (2500, duplicates.HASHES), dtype=np.uint32)
    for copy, share in ((500, 0.1), (1000, 0.25), (1500, 0.5), (2000, 0.0)):
        other = random.random((500, duplicates.HASHES)) < share
        signatures[copy : copy + 500] = np.where(
            other, signatures[copy : copy + 500], signatures[:500]
        )
    split_table = duplicates.SignatureTable(np.split(signatures, cuts))
    single_table = duplicates.SignatureTable([signatures])
    some = random.integers(0, 2500, 900)
    assert (split_table.take(some) == signatures[some]).all()
    assert (split_table.band_keys([3, 31, 0]) == single_table.band_keys([3, 31, 0])).all()
    labels = duplicates.find_clusters(split_table, 0.7)
    assert (labels == duplicates.find_clusters(single_table, 0.7)).all()
    is_similar = (signatures[:500] == signatures[500:1000]).mean(axis=1) >= 0.7
    assert (labels[500:1000][is_similar] == labels[:500][is_similar]).all()
    assert is_similar.sum() > 400
    assert (labels[2000:] == np.arange(500)).all()


def test_draws_are_uniform_and_depend_on_the_seed() -> None:
    contents = [number.to_bytes(4, "big") for number in range(4000)]
    shares = [duplicates.draw_uniform(content, 0, "heldout") for content in contents]
    assert abs(np.mean([share < 0.05 for share in shares]) - 0.05) < 0.015
    assert shares != [duplicates.draw_uniform(content, 1, "heldout") for content in contents]


def test_joined_texts_have_no_repeated_text() -> None:
    fields: dict[str, str | int] = {
        "summary": "One.",
        "body": "Two.",
        "text": "One.\n\nTwo.",
        "label": 3,
    }
    assert duplicates.join_texts(fields) == "One.\n\nTwo."
    assert duplicates.join_texts({"a": "x", "b": "yy"}) == "yy\n\nx"
    assert duplicates.join_texts({"label": 3}) == ""


@pytest.mark.parametrize("is_similar", [True, False])
def test_clustering_is_not_quadratic(is_similar: bool) -> None:  # noqa: FBT001
    signatures = np.random.default_rng(0).integers(0, 2**32, (40_000, 128), dtype=np.uint32)
    if is_similar:
        signatures[:] = signatures[0]
    start = time.monotonic()
    labels = duplicates.find_clusters(duplicates.SignatureTable([signatures]), 0.7)
    assert time.monotonic() - start < 10
    assert len(set(labels.tolist())) == (1 if is_similar else 40_000)


def test_texts_of_a_batch_are_independent() -> None:
    texts = [
        "",
        "one",
        "one two",
        "one two three",
        *(" ".join(words) for words in build_documents(20, 30)),
    ]
    alone = np.concatenate([duplicates.compute_signatures([text]) for text in texts])
    assert (duplicates.compute_signatures(texts) == alone).all()
