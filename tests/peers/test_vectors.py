"""Vectors equal those of sentence-transformers, text by text, for folders that it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers import reference
from peers.architectures import DECODERS, ENCODERS, POSITIONS, SHORT_LIMIT
from peers.comparison import check_equal, compute_in_batches
from peers.folders import save_encoder
from peers.texts import TEXTS

import regauge


@pytest.mark.parametrize("limit", [POSITIONS, SHORT_LIMIT])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, mode) for name in ENCODERS for mode in ("mean", "cls")),
        *((name, "lasttoken") for name in DECODERS),
    ],
)
def test_vectors_equal_sentence_transformers(
    name: str, mode: str, limit: int, tmp_path: Path
) -> None:
    folder = save_encoder(tmp_path, name, mode, limit, is_normalized=mode != "cls")
    expected = reference.encode(folder)
    model = regauge.load(folder, threads=1)
    assert model.program.tokenization.max_length == limit
    for size in (1, 16):
        check_equal(compute_in_batches(model.encode, size, TEXTS), expected)
