"""Near-duplicates: found as a pairwise comparison finds them, and in time that grows with them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from regauge.data import duplicates

WORDS = [f"word{number}" for number in range(5000)]


def documents(count: int, length: int, seed: int = 0) -> list[list[str]]:
    random = np.random.default_rng(seed)
    return [[WORDS[place] for place in random.integers(0, 5000, length)] for _ in range(count)]


def labels_of(texts: list[str], similarity: float = 0.7) -> list[int]:
    signed = duplicates.Signatures([duplicates.signatures(texts)])
    labels: list[int] = duplicates.clusters(signed, similarity).tolist()
    return labels


def test_variants_are_one_cluster_and_others_are_not() -> None:
    texts, owners = [], []
    for number, words in enumerate(documents(300, 80)):
        for variant in range(4):
            changed = list(words)
            changed[20 * variant] = f"changed{variant}"
            texts.append(" ".join(changed))
            owners.append(number)
    labels = labels_of(texts)
    assert labels == [owner * 4 for owner in owners]


def test_similarity_is_estimated_well() -> None:
    first = documents(1, 400)[0]
    second = first[:300] + documents(1, 100, seed=5)[0]
    one, two = (
        set(duplicates._shingles([" ".join(words)])[0].tolist()) for words in (first, second)
    )
    true = len(one & two) / len(one | two)
    signed = duplicates.signatures([" ".join(first), " ".join(second)])
    assert abs((signed[0] == signed[1]).mean() - true) < 0.15
    assert 0.5 < true < 0.7


def test_case_and_spacing_make_no_difference() -> None:
    labels = labels_of(["One  two three, four.", "one two THREE four", "five six seven eight"])
    assert labels == [0, 0, 2]


def test_texts_with_hardly_a_word_are_told_apart() -> None:
    assert labels_of(["", "a", "a b", "b", "!", "a"]) == [0, 1, 2, 3, 0, 1]


def test_links_join_whole_chains() -> None:
    count = 1000
    order = np.random.default_rng(0).permutation(count)
    labels = duplicates._linked(np.arange(count), order[:-1], order[1:])
    assert not labels.any()
    labels = duplicates._linked(np.arange(6), np.array([5, 1]), np.array([3, 2]))
    assert labels.tolist() == [0, 1, 1, 3, 4, 3]


def test_the_representative_depends_on_the_cluster_alone() -> None:
    hashes = hashed(b"c", b"a", b"b", b"d", b"e" * 9)
    labels = np.array([0, 1, 0, 0, 4])
    assert duplicates.representatives(labels, hashes).tolist() == [2, 1, 2, 2, 4]


def test_equal_records_are_named_after_the_first_of_them() -> None:
    hashes = hashed(b"b", b"a", b"b", b"a" * 16, b"a", b"b")
    assert duplicates.equal(hashes).tolist() == [0, 1, 0, 3, 1, 0]
    differ_late = hashed(b"c" * 8 + b"d", b"c" * 8 + b"e", b"c" * 8 + b"d")
    assert duplicates.equal(differ_late).tolist() == [0, 1, 0]
    assert duplicates.equal(hashed(b"a")).tolist() == [0]
    assert duplicates.equal(hashes[:0]).tolist() == []


def test_words_of_ascii_are_those_of_any_text() -> None:
    text = "".join(map(chr, range(128))) + " Don't  SHOUT_at 3.14\x1cme\x0b\x85"
    apart = text.replace("\x85", "")
    assert duplicates._words(apart) == [
        word.encode() for word in duplicates._WORD.findall(apart.lower())
    ]
    assert duplicates._words(text) == duplicates._words(apart)
    assert duplicates._words("Ærø ÉTÉ") == ["ærø".encode(), "été".encode()]


def hashed(*contents: bytes) -> np.ndarray:
    rows = b"".join(content.ljust(duplicates.HASH_BYTES, b"\0") for content in contents)
    return np.frombuffer(rows, dtype=np.uint8).reshape(len(contents), -1)


@pytest.mark.parametrize("cuts", [[], [0, 1, 7, 7, 2000], [300, 301]])
def test_it_makes_no_difference_in_which_parts_signatures_lie(cuts: list[int]) -> None:
    random = np.random.default_rng(0)
    signed = random.integers(0, 2**32, (2500, duplicates.HASHES), dtype=np.uint32)
    for copy, share in ((500, 0.1), (1000, 0.25), (1500, 0.5), (2000, 0.0)):
        other = random.random((500, duplicates.HASHES)) < share
        signed[copy : copy + 500] = np.where(other, signed[copy : copy + 500], signed[:500])
    parts = duplicates.Signatures(np.split(signed, cuts))
    whole = duplicates.Signatures([signed])
    some = random.integers(0, 2500, 900)
    assert (parts.take(some) == signed[some]).all()
    assert (parts.band_keys([3, 31, 0]) == whole.band_keys([3, 31, 0])).all()
    labels = duplicates.clusters(parts, 0.7)
    assert (labels == duplicates.clusters(whole, 0.7)).all()
    alike = (signed[:500] == signed[500:1000]).mean(axis=1) >= 0.7
    assert (labels[500:1000][alike] == labels[:500][alike]).all()
    assert alike.sum() > 400
    assert (labels[2000:] == np.arange(500)).all()


def test_a_keyed_share_is_even_and_depends_on_the_seed() -> None:
    contents = [number.to_bytes(4, "big") for number in range(4000)]
    shares = [duplicates.keyed_share(content, 0, "heldout") for content in contents]
    assert abs(np.mean([share < 0.05 for share in shares]) - 0.05) < 0.015
    assert shares != [duplicates.keyed_share(content, 1, "heldout") for content in contents]


def test_whole_text_says_nothing_twice() -> None:
    fields: dict[str, str | int] = {
        "summary": "One.",
        "body": "Two.",
        "text": "One.\n\nTwo.",
        "label": 3,
    }
    assert duplicates.whole_text(fields) == "One.\n\nTwo."
    assert duplicates.whole_text({"a": "x", "b": "yy"}) == "yy\n\nx"
    assert duplicates.whole_text({"label": 3}) == ""


@pytest.mark.parametrize("alike", [True, False])
def test_time_does_not_grow_with_the_square(alike: bool) -> None:  # noqa: FBT001
    signed = np.random.default_rng(0).integers(0, 2**32, (40_000, 128), dtype=np.uint32)
    if alike:
        signed[:] = signed[0]
    start = time.monotonic()
    labels = duplicates.clusters(duplicates.Signatures([signed]), 0.7)
    assert time.monotonic() - start < 10
    assert len(set(labels.tolist())) == (1 if alike else 40_000)


def test_texts_of_one_batch_do_not_reach_into_each_other() -> None:
    texts = ["", "one", "one two", "one two three", *(" ".join(each) for each in documents(20, 30))]
    alone = np.concatenate([duplicates.signatures([text]) for text in texts])
    assert (duplicates.signatures(texts) == alone).all()
