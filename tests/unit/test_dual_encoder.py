"""Rankers with separate encoders of queries and documents: training, saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from distributed import datasets
from distributed.runs import BERT, settings
from regauge.config import parse_choice
from regauge.data.batches import RandomKey
from regauge.data.dataset import Dataset
from regauge.data.loader import CollatorConfig
from regauge.models.architectures import find_blocks
from regauge.models.init_weights import META, build_initial_weights, materialize
from regauge.models.ranker import Ranker
from regauge.models.settings import Interactions, Lora, Model
from regauge.system.errors import SettingsError
from regauge.system.processes import World
from regauge.tasks.rank import Rank
from regauge.training.checkpoint.export_weights import export_checkpoint
from regauge.training.run import attempt

CONFIG = CollatorConfig(datasets.VOCABULARY, 0, 4, (0, 1, 2, 3, 4), datasets.MEMBERS)
SCRATCH = Model(**{**BERT, "dropout": 0.0})
SHARED = Rank(numeric_features=("price",), max_buckets=2, interactions=Interactions(hidden=(16,)))
SEPARATE = SHARED.model_copy(update={"encoders": "separate"})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.write_groups(tmp_path_factory.mktemp("data") / "groups"))


@pytest.fixture(scope="module")
def trained_run(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with separate encoders and checkpoints at steps 4 and 6."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    attempt(run(folder, data.folder, SCRATCH), World())
    return folder


def run(folder: Path, data: Path, model: Model, **changes: Any) -> Any:
    run_settings = settings(
        folder, data, "apart", model={"trainable_layers": "all"}, stop={"steps": 6}, **changes
    )
    return run_settings.model_copy(update={"model": model})


def build(task: Rank, data: Dataset, model: Model = SCRATCH) -> Any:
    with META:
        module = task.build_module(model, data.manifest, 7)
    weights = build_initial_weights(module, model, 7)
    materialize(module, weights)
    module.load_warnings = weights.warnings
    return module.eval()


def scores(module: Ranker, data: Dataset) -> torch.Tensor:
    rows = data.rows("train")
    (piece,) = SHARED.split_batch(rows, np.arange(6), 6, SHARED.bucket_lengths(data.manifest))
    arrays = SHARED.build_batch(rows, piece, RandomKey(0, 0, 0), CONFIG)
    batch = {name: torch.from_numpy(value) for name, value in arrays.items()}
    output: torch.Tensor = module(batch)["scores"]
    return output


def test_separate_encoders_start_equal_to_a_shared_one(data: Dataset) -> None:
    separate = build(SEPARATE, data)
    pairs = zip(separate.model.parameters(), separate.documents.parameters(), strict=True)
    assert all(query.equal(document) for query, document in pairs)
    assert not {id(value) for value in separate.model.parameters()} & {
        id(value) for value in separate.documents.parameters()
    }
    with torch.no_grad():
        torch.testing.assert_close(scores(separate, data), scores(build(SHARED, data), data))


def test_each_encoder_reads_only_its_texts(data: Dataset) -> None:
    separate = build(SEPARATE, data)
    with torch.no_grad():
        before = scores(separate, data)
        separate.documents.embeddings.word_embeddings.weight += 1.0 * torch.randn(300, 32)
        by_documents = scores(separate, data)
    assert not by_documents.allclose(before)
    scores(separate, data).sum().backward()
    words = [
        encoder.embeddings.word_embeddings.weight.grad
        for encoder in (separate.model, separate.documents)
    ]
    used = [set((grad.abs().sum(1) > 0).nonzero().flatten().tolist()) for grad in words]
    rows = data.rows("train").take(range(6))
    assert used[0] <= {0, *(int(token) for row in rows for token in row["query"])}
    document_tokens = {int(token) for row in rows for text in row["document"] for token in text}
    assert used[1] <= {0, *document_tokens}
    assert min(map(len, used)) > 3


@pytest.mark.parametrize(("layers", "count"), [("none", 0), (1, 1), (2, 2)])
def test_trainable_layers_apply_to_both_encoders(
    layers: str | int, count: int, data: Dataset
) -> None:
    module = build(SEPARATE, data, SCRATCH.model_copy(update={"trainable_layers": layers}))
    for model in (module.model, module.documents):
        assert [
            all(value.requires_grad for value in block.parameters()) for block in find_blocks(model)
        ] == [number >= 2 - count for number in range(2)]
        assert not model.embeddings.word_embeddings.weight.requires_grad
    assert len(find_blocks(module)) == 4


def test_transformers_loads_both_encoder_folders(trained_run: Path) -> None:
    words = [0, 17, 18, 19]
    vectors = []
    for folder in (trained_run / "model", trained_run / "model" / "documents"):
        model, loading_info = AutoModel.from_pretrained(
            folder, add_pooling_layer=False, output_loading_info=True
        )
        assert not loading_info["missing_keys"] | loading_info["unexpected_keys"]
        assert (folder / "tokenizer.json").is_file()
        with torch.no_grad():
            vectors.append(model(torch.tensor([words])).last_hidden_state)
    assert not vectors[0].allclose(vectors[1])
    head = load_file(trained_run / "model" / "head.safetensors")
    assert head
    assert all(name.startswith("head.") for name in head)


def test_both_encoders_and_the_head_are_loaded_from_a_run(trained_run: Path, data: Dataset) -> None:
    read = build(SEPARATE, data, Model(path=str(trained_run)))
    for root, model in (("", read.model), ("documents", read.documents)):
        saved = load_file(trained_run / "model" / root / "model.safetensors")
        assert all(saved[name].equal(value) for name, value in model.named_parameters())
    assert not read.load_warnings
    alone = build(SHARED, data, Model(path=str(trained_run)))
    assert alone.load_warnings == (f"'{trained_run}' has a document encoder that is not used",)


def test_a_checkpoint_is_exported_with_both_encoders(trained_run: Path, tmp_path: Path) -> None:
    target = export_checkpoint(trained_run, 4, tmp_path / "at-4")
    last = export_checkpoint(trained_run, 6, tmp_path / "at-6")
    for root in ("", "documents"):
        then, now, final = (
            load_file(folder / root / "model.safetensors")
            for folder in (target, last, trained_run / "model")
        )
        assert then.keys() == now.keys() == final.keys()
        assert all(now[name].equal(final[name]) for name in final)
        assert not all(then[name].equal(final[name]) for name in final)
    assert (
        load_file(last / "head.safetensors").keys()
        == load_file(trained_run / "model" / "head.safetensors").keys()
    )


def test_separate_encoders_need_texts() -> None:
    with pytest.raises(
        SettingsError, match='encoders = "separate" needs texts; set query and document'
    ):
        parse_choice(
            "tasks",
            {
                "kind": "rank",
                "query": (),
                "document": (),
                "numeric_features": ("a",),
                "encoders": "separate",
            },
        )
    with pytest.raises(SettingsError, match="encoders"):
        parse_choice("tasks", {"kind": "rank", "encoders": "two"})


def test_adapters_of_both_encoders_are_trained_and_merged(
    trained_run: Path, data: Dataset, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    model = Model(path=str(trained_run), lora=Lora(rank=2))
    attempt(run(tmp_path / "run", data.folder, model), World())
    last = export_checkpoint(tmp_path / "run", 6, tmp_path / "at-6")
    for root in ("", "documents"):
        before = load_file(trained_run / "model" / root / "model.safetensors")
        final = load_file(tmp_path / "run" / "model" / root / "model.safetensors")
        exported = load_file(last / root / "model.safetensors")
        assert before.keys() == final.keys() == exported.keys()
        assert not all(before[name].equal(final[name]) for name in before)
        assert all(torch.allclose(exported[name], final[name]) for name in before)
        adapter = load_file(tmp_path / "run" / "adapter" / root / "adapter_model.safetensors")
        assert adapter
        assert all(".lora_" in name for name in adapter)
