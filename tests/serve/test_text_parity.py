"""A text worker computes the parity rows of an artifact before it is ready."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from end_to_end.predicting import EAGER
from regauge.cli import main
from regauge.inference.export.model import load
from regauge.serving.text_generation import engine_choice, text_version
from regauge.serving.text_generation.paged_engine import PagedTextEngine
from regauge.serving.text_generation.settings import TextServing
from regauge.serving.text_generation.static_engine import StaticTextEngine
from regauge.serving.text_generation.text_requests import TextEngine
from regauge.serving.text_generation.text_worker import TextEngineWorker
from regauge.serving.workers.worker_requests import LoadRequest
from regauge.system.errors import DataError
from serve.servers import copy_artifact, is_running, list_children, update_manifest
from serve.text_server import MODEL_NAME, OneModel, serve
from serve.writers import MAX_TOKENS, write_model


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of a small causal model."""
    folder = tmp_path_factory.mktemp("causal")
    model = write_model(folder / "model")
    options = (*EAGER, "parity.metrics=false", "text.max_new_tokens=6")
    target = folder / "artifact"
    assert main(["export", "--model", str(model), "--to", str(target), *options]) == 0
    return target


def load_engine(artifact: Path) -> TextEngine:
    return TextEngineWorker.load(LoadRequest(path=str(artifact), threads=1)).engine


def refuse_batching(*_: Any) -> None:
    raise ValueError("no continuous batching")


@pytest.mark.parametrize("kind", [PagedTextEngine, StaticTextEngine])
def test_the_rows_of_a_sound_artifact_come_out_again(
    artifact: Path, kind: type[TextEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is StaticTextEngine:
        monkeypatch.setattr(engine_choice, "_load_paged", refuse_batching)
    engine = load_engine(artifact)
    assert isinstance(engine, kind)
    assert not engine.has_work
    engine.close()


def test_an_answer_is_as_long_as_the_exported_limit(artifact: Path) -> None:
    prompt = "The sea"
    with serve(artifact, TextServing(engine="transformers")) as (address, model):
        assert model.version.limit_answer(len(prompt)) == 6
        assert model.version.limit_answer(MAX_TOKENS - 2) == 2
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": prompt}]}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 6
    text = load(artifact, threads=1).generate(prompt)
    assert answer["choices"][0]["message"]["content"] == text


def test_an_artifact_with_other_weights_is_refused(artifact: Path, tmp_path: Path) -> None:
    damaged = copy_artifact(artifact, tmp_path / "damaged")
    path = damaged / "weights.safetensors"
    weights = {name: torch.randn_like(value) for name, value in load_file(path).items()}
    save_file(weights, path)
    update_manifest(damaged)
    with pytest.raises(DataError, match=r"row \d of parity_rows.json"):
        load_engine(damaged)


def test_workers_end_if_the_tokenizer_does_not_load(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = set(list_children(os.getpid()))
    workers: set[int] = set()

    def fail(*_: Any) -> None:
        workers.update(set(list_children(os.getpid())) - earlier)
        raise DataError("the tokenizer is damaged", "restore it")

    monkeypatch.setattr(text_version, "Preprocessor", fail)
    with pytest.raises(DataError, match="the tokenizer is damaged"):
        asyncio.run(OneModel(artifact, TextServing(engine="transformers")).runtime.start())
    [worker] = workers
    assert not is_running(worker)
