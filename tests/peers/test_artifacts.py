"""An exported artifact computes the outputs of the library that wrote its folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from peers import reference
from peers.architectures import POSITIONS
from peers.comparison import check_equal, compute_in_batches
from peers.folders import save_classifier, save_encoder, save_generator
from peers.reference import NEW_TOKENS
from peers.texts import QUERIES, TEXTS

import regauge
from regauge.cli import main
from regauge.inference.export.model import LoadedModel

EAGER = (
    'candidates.backends=["eager"]',
    'candidates.precisions=["fp32"]',
    "candidates.threads=[1]",
    "candidates.timing_seconds=0.02",
    "parity.num_texts=32",
)


def export_folder(folder: Path, target: Path, *overrides: str) -> LoadedModel:
    """Export a folder for the backend `eager` in fp32 and load the artifact without the folder."""
    command = ["export", "--model", str(folder), "--to", str(target), *EAGER, *overrides]
    assert main(command) == 0
    folder.rename(folder.with_name("moved"))
    return regauge.load(target, threads=1)


def test_an_artifact_of_an_encoder(tmp_path: Path) -> None:
    folder = save_encoder(
        tmp_path, "deberta-v2", dense_width=12, truncate_dim=8, prompts={"query": "find: "}
    )
    expected = reference.encode(folder)
    prompted = reference.encode(folder, prompt_name="query")
    model = export_folder(folder, tmp_path / "artifact")
    for size in (1, 16):
        check_equal(compute_in_batches(model.encode, size, TEXTS), expected)
    check_equal(model.encode(TEXTS, prompt="query"), prompted)


def test_an_artifact_of_a_cross_encoder(tmp_path: Path) -> None:
    activation = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}
    folder = save_classifier(tmp_path / "model", "modernbert", num_labels=1, **activation)
    expected = reference.score(folder, QUERIES, TEXTS)
    assert 0 < expected.min() < expected.max() < 1
    pairs = 'text.pair_fields=["query", "document"]'
    model = export_folder(folder, tmp_path / "artifact", pairs)
    for size in (1, 16):
        values = compute_in_batches(
            lambda *pair: model.predict(*pair)["value"], size, QUERIES, TEXTS
        )
        check_equal(values[:, None], expected)


def test_an_artifact_of_a_causal_model(tmp_path: Path) -> None:
    folder = save_generator(tmp_path / "model", "qwen2")
    path = folder / "generation_config.json"
    declared = {"repetition_penalty": 0.4, "eos_token_id": [5, *range(40, 60)]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **declared}))
    tokens = reference.generate(folder, POSITIONS - NEW_TOKENS)
    texts = reference.decode(folder, tokens)
    lengths = {len(row) for row in tokens}
    assert np.ptp(list(lengths)) > 0
    model = export_folder(folder, tmp_path / "artifact", f"text.max_new_tokens={NEW_TOKENS}")
    assert model.predict(TEXTS)["generated_text"] == texts
    assert [model.predict(text)["generated_text"][0] for text in TEXTS] == texts
