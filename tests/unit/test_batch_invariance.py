"""Which numbers of rows are kept of a program whose bits depend on more than a text."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from regauge.artifacts.batch_invariance import Shown, shown
from regauge.artifacts.buckets import halves
from regauge.artifacts.manifest import Rung
from regauge.artifacts.rows import Rows
from unit.runners import Counting, texts

MOST = {4: 16, 8: 12, 20: 1}
RUNGS = tuple(Rung(length=length, rows=halves(most)) for length, most in MOST.items())


def records(count: int, shortest: int, longest: int) -> Rows:
    return Rows.of(texts(count, longest, seed=longest, shortest=shortest))


def of(runner: Counting, rungs: tuple[Rung, ...] = RUNGS) -> Shown | None:
    return shown(runner, rungs, records)


def rows(found: Shown | None) -> list[tuple[int, ...]]:
    assert found is not None
    return [rung.rows for rung in found.rungs]


class Sized(Counting):
    """Another program in batches of some sizes: in the last bit, as another order of sums is."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        super().__init__()
        self._sizes: Collection[tuple[int, int]] = sizes

    def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Tensor:
        found = super().__call__(tokens, lengths, *features)
        if tuple(tokens.shape) in self._sizes:
            return found * (1 + torch.finfo(torch.float32).eps)
        return found


def test_where_a_text_alone_decides_every_size_is_kept() -> None:
    runner = Counting()
    found = of(runner)
    assert rows(found) == [(16, 8, 4, 2, 1), (12, 6, 3, 1), (1,)]
    assert found is not None
    assert [rung.length for rung in found.rungs] == [4, 8, 20]
    assert found.texts == sum(MOST.values())
    assert set(runner.shapes) == {(count, rung.length) for rung in RUNGS for count in rung.rows}


def test_a_size_that_computes_otherwise_is_lost_alone() -> None:
    found = of(Sized((4, 4), (1, 4), (3, 8)))
    assert rows(found) == [(16, 8, 2), (12, 6, 1), (1,)]


def test_where_the_largest_size_is_the_odd_one_it_alone_is_kept() -> None:
    assert rows(of(Sized((16, 4)))) == [(16,), (12, 6, 3, 1), (1,)]


def test_only_declared_sizes_are_tried() -> None:
    runner = Counting()
    found = of(runner, (Rung(length=4, rows=(9, 5)),))
    assert rows(found) == [(9, 5)]
    assert set(runner.shapes) == {(9, 4), (5, 4)}


def test_a_program_whose_rows_see_each_other_has_no_proof() -> None:
    class Neighbours(Counting):
        def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Tensor:
            found = super().__call__(tokens, lengths, *features)
            return found + torch.roll(found, 1, 0)

    assert of(Neighbours()) is None


def test_a_program_that_sees_where_a_row_stands_has_no_proof() -> None:
    class Placed(Counting):
        def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Tensor:
            found = super().__call__(tokens, lengths, *features)
            return found + torch.arange(len(found))[:, None]

    assert of(Placed()) is None


def test_one_rung_without_a_proof_leaves_none_to_the_others() -> None:
    class Long(Counting):
        def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Tensor:
            found = super().__call__(tokens, lengths, *features)
            return found + torch.arange(len(found))[:, None] if tokens.shape[1] == 8 else found

    assert of(Long()) is None
    assert of(Long(), RUNGS[:1]) is not None


def test_texts_have_the_lengths_that_a_rung_alone_has() -> None:
    asked: list[tuple[int, int, int]] = []

    def made(count: int, shortest: int, longest: int) -> Rows:
        asked.append((count, shortest, longest))
        return records(count, shortest, longest)

    shown(Counting(), RUNGS, made)
    assert asked == [(16, 1, 4), (12, 5, 8), (1, 9, 20)]
