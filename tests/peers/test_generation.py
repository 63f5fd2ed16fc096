"""Generated tokens equal those of transformers, text by text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peers import reference
from peers.architectures import DECODERS, POSITIONS, SHORT_LIMIT
from peers.comparison import compute_in_batches
from peers.folders import save_generator
from peers.reference import NEW_TOKENS
from peers.texts import TEXTS

import regauge
from regauge.system.errors import SettingsError


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


def test_stop_strings_and_prompt_lookup_equal_transformers(tmp_path: Path) -> None:
    """Stop strings are part of the answer; prompt lookup does not change it."""
    folder = save_generator(tmp_path, "llama")
    limit = POSITIONS - NEW_TOKENS
    whole = reference.generate(folder, limit)
    tokens = [row[2:3] for row in whole if len(row) > 3]
    stop = next(
        text for text in reference.decode(folder, tokens) if text.strip() and text.isascii()
    )
    path = folder / "generation_config.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "stop_strings": [stop, "§§"]}))
    expected = reference.generate(folder, limit)
    assert expected != whole
    path.write_text(
        json.dumps({**document, "stop_strings": [stop, "§§"], "prompt_lookup_num_tokens": 3})
    )
    model = regauge.load(folder, threads=1, text={"max_new_tokens": NEW_TOKENS})
    assert model.predict(TEXTS)["generated_text"] == reference.decode(folder, expected)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"num_beams": 2, "stop_strings": ["a"]}, "beam search with stop_strings"),
        ({"token_healing": True}, "token healing"),
    ],
)
def test_unsupported_ways_of_generation_are_refused(
    tmp_path: Path, options: dict[str, Any], mode: str
) -> None:
    folder = save_generator(tmp_path, "llama")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))
    with pytest.raises(SettingsError, match=mode):
        regauge.load(folder, threads=1).generate("a b")
