"""Packing: every token once, rows never too long, little padding, deterministic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.data.packing import assemble_rows, pack_chunks


def build_chunks(lengths: list[int]) -> list[np.ndarray]:
    """Return chunks of numbered tokens, so that the origin of each token is known."""
    ends = np.cumsum([0, *lengths])
    return [np.arange(start, start + size) for start, size in zip(ends, lengths, strict=False)]


@given(st.lists(st.integers(1, 16), max_size=80), st.integers(1, 20))
def test_every_chunk_is_in_one_row_and_no_row_is_too_long(lengths: list[int], waiting: int) -> None:
    chunks = build_chunks(lengths)
    rows = list(pack_chunks(chunks, 16, waiting))
    assert all(0 < sum(map(len, row)) <= 16 for row in rows)
    packed = sorted((chunk.tolist() for row in rows for chunk in row), key=lambda ids: ids[0])
    assert packed == [chunk.tolist() for chunk in chunks]


@pytest.mark.parametrize("shape", ["short", "uniform", "mixed"])
def test_rows_are_nearly_full(shape: str) -> None:
    random = np.random.default_rng(0)
    lengths = {
        "short": random.integers(3, 40, 20_000),
        "uniform": random.integers(3, 129, 20_000),
        "mixed": np.where(random.random(20_000) < 0.5, 128, random.integers(3, 128, 20_000)),
    }[shape].tolist()
    rows = sum(1 for _ in pack_chunks(build_chunks(lengths), 128))
    assert sum(lengths) / (rows * 128) >= 0.97


def test_the_number_of_waiting_chunks_is_limited() -> None:
    lengths = [9] + [10] * 500
    rows = list(pack_chunks(build_chunks(lengths), 16, max_waiting=20))
    assert rows[0][0][0] == 0
    firsts = [row[0][0] for row in rows]
    assert firsts == sorted(firsts)


def test_packing_is_deterministic() -> None:
    lengths = np.random.default_rng(1).integers(1, 65, 3000).tolist()
    first, second = (
        [[chunk.tolist() for chunk in row] for row in pack_chunks(build_chunks(lengths), 64)]
        for _ in range(2)
    )
    assert first == second


def test_segments_number_the_chunks_of_a_row() -> None:
    chunks = [np.array([[7, 1], [8, 0]]), np.array([[9, 1]])]
    (tokens, loss_mask), segments = assemble_rows([chunks, chunks[1:]], 5, [3, 0])
    assert tokens.tolist() == [[7, 8, 9, 3, 3], [9, 3, 3, 3, 3]]
    assert loss_mask.tolist() == [[1, 0, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert segments.tolist() == [[1, 1, 2, 0, 0], [1, 0, 0, 0, 0]]
    assert tokens.dtype == segments.dtype == np.int32
