"""An artifact's rungs, and the batches that texts of any lengths are computed in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.artifacts.buckets import EVEN, FEW, STEPS, BucketBatch, Ladder, halves, ladder
from regauge.artifacts.export_settings import Shapes
from regauge.artifacts.manifest import Rung

ROWS = st.integers(1, 40).map(halves)


@st.composite
def ladders(draw: st.DrawFn) -> tuple[Rung, ...]:
    """Draw rungs as an export leaves them: some of the halves may have been struck out."""
    lengths = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=5)))
    found = []
    for length in lengths:
        most, *others = draw(ROWS)
        kept = draw(st.lists(st.booleans(), min_size=len(others), max_size=len(others)))
        smaller = [rows for rows, keep in zip(others, kept, strict=True) if keep]
        found.append(Rung(length=length, rows=(most, *smaller)))
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Rung, ...], np.ndarray, int]:
    """Draw rungs, the lengths of some texts that fit them, and a step."""
    rungs = draw(ladders())
    lengths = draw(st.lists(st.integers(0, rungs[-1].length), max_size=90))
    return rungs, np.array(lengths, np.int64), draw(st.integers(0, 7))


def members(batches: list[BucketBatch]) -> list[int]:
    return [int(member) for batch in batches for member in batch.members]


@given(case=cases(), filled=st.booleans())
def test_every_text_is_in_one_batch_that_its_own_length_chooses(
    case: tuple[tuple[Rung, ...], np.ndarray, int],
    filled: bool,  # noqa: FBT001 - hypothesis draws it
) -> None:
    rungs, lengths, step = case
    found = list(Ladder(rungs, filled=filled).batches(lengths, step))
    assert sorted(members(found)) == list(range(len(lengths)))
    for batch in found:
        assert 0 < len(batch.members) <= batch.rows
        for length in lengths[batch.members]:
            assert batch.length == min(rung.length for rung in rungs if rung.length >= length)


@given(case=cases(), filled=st.booleans())
def test_the_longest_come_first_and_equal_ones_in_their_order(
    case: tuple[tuple[Rung, ...], np.ndarray, int],
    filled: bool,  # noqa: FBT001 - hypothesis draws it
) -> None:
    rungs, lengths, step = case
    order = members(list(Ladder(rungs, filled=filled).batches(lengths, step)))
    for before, after in pairwise(order):
        assert (-lengths[before], before) < (-lengths[after], after)


@given(case=cases())
def test_a_filled_batch_has_a_declared_number_of_rows(
    case: tuple[tuple[Rung, ...], np.ndarray, int],
) -> None:
    rungs, lengths, step = case
    declared = {rung.length: rung.rows for rung in rungs}
    full: set[int] = set()
    for batch in Ladder(rungs, filled=True).batches(lengths, step):
        assert batch.rows in (declared[batch.length][step:] or declared[batch.length][-1:])
        assert batch.length not in full, "only the last batch of a length has empty rows"
        if len(batch.members) < batch.rows:
            full.add(batch.length)


@given(case=cases())
def test_any_other_batch_is_as_large_as_its_members_and_no_larger_than_the_step_allows(
    case: tuple[tuple[Rung, ...], np.ndarray, int],
) -> None:
    rungs, lengths, step = case
    most = {rung.length: max(1, rung.rows[0] // 2**step) for rung in rungs}
    found = list(Ladder(rungs, filled=False).batches(lengths, step))
    assert all(len(batch.members) == batch.rows <= most[batch.length] for batch in found)
    for batch, after in pairwise(found):
        if batch.length == after.length:
            assert batch.rows == most[batch.length]


@given(case=cases(), filled=st.booleans(), data=st.data())
def test_some_texts_are_batched_as_they_are_alone(
    case: tuple[tuple[Rung, ...], np.ndarray, int],
    filled: bool,  # noqa: FBT001 - hypothesis draws it
    data: st.DataObject,
) -> None:
    rungs, lengths, step = case
    some = (
        data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
        if len(lengths)
        else []
    )
    chosen = np.array(sorted(some), np.int64)
    asked = np.array(data.draw(st.permutations(some)), np.int64)
    made = Ladder(rungs, filled=filled)
    found = list(made.batches(lengths, step, asked))
    alone = list(made.batches(lengths[chosen], step))
    assert [batch[:2] for batch in found] == [batch[:2] for batch in alone]
    assert members(found) == chosen[members(alone)].tolist()


@pytest.mark.parametrize("filled", [True, False])
def test_equal_texts_come_in_their_order_however_they_are_named(*, filled: bool) -> None:
    made = Ladder((Rung(length=8, rows=(4, 2, 1)),), filled=filled)
    found = made.batches(np.full(9, 5), members=np.array([7, 3, 8, 1, 5]))
    assert members(list(found)) == [1, 3, 5, 7, 8]


def test_texts_are_cut_into_the_most_rows_that_are_left() -> None:
    made = Ladder((Rung(length=8, rows=(8, 4, 2, 1)),), filled=True)
    sizes = [batch.rows for batch in made.batches(np.full(23, 5))]
    assert sizes == [8, 8, 8]
    assert [batch.rows for batch in made.batches(np.full(21, 5))] == [8, 8, 4, 1]
    assert [batch.rows for batch in made.batches(np.full(23, 5), 2)] == [2] * 11 + [1]
    few = Ladder((Rung(length=8, rows=(8, 2)),), filled=True)
    assert [batch.rows for batch in few.batches(np.full(23, 5))] == [8, 8, 8]
    alone = Ladder((Rung(length=8, rows=(8, 1)),), filled=True)
    assert [batch.rows for batch in alone.batches(np.full(23, 5))] == [8, 8, 8]
    assert [batch.rows for batch in alone.batches(np.full(19, 5))] == [8, 8, 1, 1, 1]
    free = Ladder((Rung(length=8, rows=(8,)),), filled=False)
    assert [batch.rows for batch in free.batches(np.full(23, 5))] == [8, 8, 7]


@pytest.mark.parametrize("filled", [True, False])
def test_a_text_that_no_rung_holds_is_no_text_that_is_left_out(*, filled: bool) -> None:
    made = Ladder((Rung(length=4, rows=(2,)), Rung(length=8, rows=(2,))), filled=filled)
    lengths = np.array([3, 9, 8])
    with pytest.raises(ValueError, match="a row of 9 tokens is longer than 8"):
        list(made.batches(lengths))
    assert members(list(made.batches(lengths, members=np.array([0, 2])))) == [2, 0]


def test_every_declared_shape_is_told() -> None:
    rungs = (Rung(length=8, rows=(4, 2)), Rung(length=16, rows=(2,)))
    made = Ladder(rungs, filled=True)
    assert [batch[:2] for batch in made.shapes()] == [(8, 4), (8, 2), (16, 2)]
    assert all(len(batch.members) == 0 for batch in made.shapes())
    assert made.longest == 16


@given(
    limit=st.integers(3, 9000),
    tokens=st.integers(8, 20_000),
    rows=st.integers(1, 600),
    symbolic=st.booleans(),
)
def test_rungs_reach_the_limit_and_hold_about_the_tokens_that_are_asked_for(
    limit: int,
    tokens: int,
    rows: int,
    symbolic: bool,  # noqa: FBT001 - hypothesis draws it
) -> None:
    found = ladder(Shapes(tokens=tokens, rows=rows), limit, symbolic=symbolic)
    lengths = [rung.length for rung in found]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == limit
    for rung in found:
        most = rung.rows[0]
        assert 1 <= most <= rows
        assert most == 1 or most * rung.length <= tokens
        assert most < EVEN or most % EVEN == 0
        assert most * 2 >= min(rows, tokens // rung.length)
        assert rung.rows == (halves(most) if symbolic else tuple(dict.fromkeys((most, 1))))


@given(limit=st.integers(9, 4000))
def test_rungs_of_one_graph_are_close_and_those_with_graphs_of_their_own_few(limit: int) -> None:
    fine = [rung.length for rung in ladder(Shapes(), limit, symbolic=True)]
    assert fine[0] == 4
    for before, after in pairwise(fine):
        assert after - before <= next(step for most, step in STEPS if before < most)
    coarse = [rung.length for rung in ladder(Shapes(), limit, symbolic=False)]
    assert len(coarse) <= FEW + 1
    for before, after in pairwise(coarse):
        assert after <= 2 * before + EVEN
    assert coarse[0] <= max(EVEN, limit // 2 ** (FEW - 1) + EVEN)


@pytest.mark.parametrize(
    ("lengths", "limit", "found"),
    [
        ((32, 16), 64, [16, 32, 64]),
        ((16, 64, 128), 64, [16, 64]),
        ((100,), 64, [64]),
        ((64,), 64, [64]),
    ],
)
@pytest.mark.parametrize("symbolic", [True, False])
def test_lengths_that_are_named_are_kept_up_to_the_limit(
    lengths: Any, limit: int, found: list[int], *, symbolic: bool
) -> None:
    made = ladder(Shapes(lengths=lengths), limit, symbolic=symbolic)
    assert [rung.length for rung in made] == found


@given(rows=st.integers(1, 5000))
def test_halves_go_down_to_one(rows: int) -> None:
    found = halves(rows)
    assert (found[0], found[-1]) == (rows, 1)
    assert all(after == before // 2 for before, after in pairwise(found))
