"""Generated tokens equal those of transformers, text by text."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers import reference
from peers.architectures import DECODERS, POSITIONS, SHORT_LIMIT
from peers.comparison import compute_in_batches
from peers.folders import save_generator
from peers.reference import NEW_TOKENS
from peers.texts import TEXTS

import regauge


@pytest.mark.parametrize("limit", [POSITIONS - NEW_TOKENS, SHORT_LIMIT])
@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens_equal_transformers(name: str, limit: int, tmp_path: Path) -> None:
    folder = save_generator(tmp_path, name, limit)
    expected = reference.generate(folder, limit)
    model = regauge.load(folder, threads=1, text={"max_new_tokens": NEW_TOKENS})
    assert model.program.tokenization.max_length == limit
    for size in (1, 16):
        rows = compute_in_batches(lambda batch: model._compute([batch], None), size, TEXTS)
        assert [row[row >= 0].astype(int).tolist() for row in rows] == expected
    assert model.predict(TEXTS)["generated_text"] == reference.decode(folder, expected)
    assert len(set(map(tuple, expected))) > len(TEXTS) // 2
