"""A server process of the command line, and tiny artifacts that it serves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from peers.folders import save_classifier, save_encoder, save_model
from transformers import AutoModelForTokenClassification

from distributed import datasets
from end_to_end.predicting import QUICK, export_run, train_model
from end_to_end.test_custom_module import CODE
from regauge.cli import main
from regauge.system import choices
from serve import servers

LIMIT = 48
"""Longest text of the tiny models, in tokens."""
BUCKETS = (16, 32, LIMIT)
MODULE = "served_module"
LABELS = {0: "joy", 1: "anger", 2: "fear"}
PROMPTS = {"query": "anna asks: "}
TAGS = {0: "O", 1: "B-PER", 2: "I-PER"}
OPENVINO = (
    *QUICK,
    'candidates.backends=["openvino"]',
    'candidates.precisions=["fp32"]',
    'candidates.quantization=["none"]',
)
UNCHECKED = ("parity.metrics=false", "parity.batch_invariance=false")


class LiveServer(NamedTuple):
    """A running server."""

    url: str
    artifacts: Mapping[str, Path]


def export_tiny_artifacts(folder: Path) -> dict[str, Path]:
    """Export a tiny model of each kind; return their folders by name.

    `encoder` is the first one: it returns normalized means of 32 numbers.
    """
    classes = {"id2label": LABELS, "label2id": {name: key for key, name in LABELS.items()}}
    tags = {"id2label": TAGS, "label2id": {name: key for key, name in TAGS.items()}}
    pair = 'text.pair_fields=["query","document"]'
    sigmoid = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    scorer = {"num_labels": 1, "sentence_transformers": sigmoid}
    tagger = folder / "tagger_model"
    sources = {
        "encoder": (save_encoder(folder / "encoder_model", "bert", prompts=PROMPTS), ()),
        "classifier": (save_classifier(folder / "classifier_model", "bert", **classes), ()),
        "reranker": (save_classifier(folder / "reranker_model", "bert", **scorer), (pair,)),
        "tagger": (save_model(tagger, "bert", AutoModelForTokenClassification, LIMIT, **tags), ()),
    }
    shared = (*OPENVINO, f"buckets.lengths={list(BUCKETS)}", "parity.metrics=false")
    artifacts: dict[str, Path] = {}
    for name, (source, options) in sources.items():
        artifacts[name] = folder / name
        command = ["export", "--model", str(source), "--to", str(folder / name)]
        assert main([*command, *shared, *options]) == 0
    run = train_model(folder / "ranker_model", "rank", datasets.write_groups)
    artifacts["ranker"] = export_run(run, folder / "ranker", *OPENVINO, *UNCHECKED)
    artifacts["module"] = _export_module(folder)
    return artifacts


def _export_module(folder: Path) -> Path:
    """Export a custom module with the inputs `image` and `kind`; return the folder."""
    (folder / f"{MODULE}.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(choices, "_allowed_paths", set())
        patch.setattr(choices, "_module_folders", [])
        command = ["export", "--module", f"{MODULE}:tensor", "--to", str(folder / "module")]
        assert main([*command, *OPENVINO, *UNCHECKED]) == 0
    sys.modules.pop(MODULE, None)
    return folder / "module"


@contextmanager
def start_server(
    artifacts: Mapping[str, Path], folder: Path, variables: dict[str, str] | None = None
) -> Iterator[LiveServer]:
    """Serve artifacts on a free port until the block ends; a stop signal then ends the server."""
    models = [f"{name}={path}" for name, path in artifacts.items()]
    arguments = (*models, "serve.workers.count=auto")
    with servers.start_server(folder, *arguments, environment=variables) as server:
        yield LiveServer(server.address, artifacts)
        assert server.stop() == 0, server.log
