"""A ranker with an encoder of queries and one of documents: begun, trained, saved, read again."""

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
from regauge.checkpoint.export_weights import moment
from regauge.config import choose
from regauge.data.batches import Draw
from regauge.data.dataset import Dataset
from regauge.data.loader import Facts
from regauge.errors import SettingsError
from regauge.models.architectures import blocks
from regauge.models.init_weights import META, initial_weights, materialize
from regauge.models.ranker import Ranker
from regauge.models.settings import Interactions, Lora, Model
from regauge.processes import World
from regauge.tasks.rank import Rank
from regauge.training.run import attempt

FACTS = Facts(datasets.VOCABULARY, 0, 4, (0, 1, 2, 3, 4), datasets.MEMBERS)
SCRATCH = Model(**{**BERT, "dropout": 0.0})
SHARED = Rank(numbers=("price",), shapes=2, interactions=Interactions(hidden=(16,)))
APART = SHARED.model_copy(update={"encoders": "apart"})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(datasets.groups(tmp_path_factory.mktemp("data") / "groups"))


@pytest.fixture(scope="module")
def trained(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of both encoders, saved at step 4 and at its end."""
    folder = tmp_path_factory.mktemp("runs") / "apart"
    attempt(run(folder, data.folder, SCRATCH), World())
    return folder


def run(folder: Path, data: Path, model: Model, **changes: Any) -> Any:
    made = settings(folder, data, "apart", task={"encoder": "whole"}, stop={"steps": 6}, **changes)
    return made.model_copy(update={"model": model})


def made(task: Rank, data: Dataset, model: Model = SCRATCH) -> Any:
    with META:
        module = task.module(model, data.manifest, 7)
    weights = initial_weights(module, model, 7)
    materialize(module, weights)
    module.remarks = weights.remarks
    return module.eval()


def scores(module: Ranker, data: Dataset) -> torch.Tensor:
    rows = data.split("train")
    (piece,) = SHARED.cut(rows, np.arange(6), 6, SHARED.ladder(data.manifest))
    arrays = SHARED.batch(rows, piece, Draw(0, 0, 0), FACTS)
    batch = {name: torch.from_numpy(value) for name, value in arrays.items()}
    found: torch.Tensor = module(batch)["scores"]
    return found


def test_both_encoders_begin_alike_and_then_give_the_scores_of_one(data: Dataset) -> None:
    apart = made(APART, data)
    pairs = zip(apart.model.parameters(), apart.documents.parameters(), strict=True)
    assert all(own.equal(other) for own, other in pairs)
    assert not {id(own) for own in apart.model.parameters()} & {
        id(other) for other in apart.documents.parameters()
    }
    with torch.no_grad():
        torch.testing.assert_close(scores(apart, data), scores(made(SHARED, data), data))


def test_each_encoder_reads_its_own_side_alone(data: Dataset) -> None:
    apart = made(APART, data)
    with torch.no_grad():
        before = scores(apart, data)
        apart.documents.embeddings.word_embeddings.weight += 1.0 * torch.randn(300, 32)
        by_documents = scores(apart, data)
    assert not by_documents.allclose(before)
    scores(apart, data).sum().backward()
    words = [each.embeddings.word_embeddings.weight.grad for each in (apart.model, apart.documents)]
    used = [set((grad.abs().sum(1) > 0).nonzero().flatten().tolist()) for grad in words]
    rows = data.split("train").take(range(6))
    assert used[0] <= {0, *(int(token) for row in rows for token in row["query"])}
    shown = {int(token) for row in rows for text in row["document"] for token in text}
    assert used[1] <= {0, *shown}
    assert min(map(len, used)) > 3


@pytest.mark.parametrize(("encoder", "count"), [("frozen", 0), (1, 1), (2, 2)])
def test_what_is_trained_of_an_encoder_is_trained_of_both(
    encoder: str | int, count: int, data: Dataset
) -> None:
    module = made(APART.model_copy(update={"encoder": encoder}), data)
    for model in (module.model, module.documents):
        assert [
            all(value.requires_grad for value in block.parameters()) for block in blocks(model)
        ] == [number >= 2 - count for number in range(2)]
        assert not model.embeddings.word_embeddings.weight.requires_grad
    assert len(blocks(module)) == 4


def test_a_trained_pair_is_two_folders_that_transformers_loads(trained: Path) -> None:
    words = [0, 17, 18, 19]
    vectors = []
    for folder in (trained / "model", trained / "model" / "documents"):
        model, found = AutoModel.from_pretrained(
            folder, add_pooling_layer=False, output_loading_info=True
        )
        assert not found["missing_keys"] | found["unexpected_keys"]
        assert (folder / "tokenizer.json").is_file()
        with torch.no_grad():
            vectors.append(model(torch.tensor([words])).last_hidden_state)
    assert not vectors[0].allclose(vectors[1])
    head = load_file(trained / "model" / "head.safetensors")
    assert head
    assert all(name.startswith("head.") for name in head)


def test_the_folder_of_a_pair_gives_both_encoders_and_the_head_again(
    trained: Path, data: Dataset
) -> None:
    read = made(APART, data, Model(path=str(trained)))
    for root, model in (("", read.model), ("documents", read.documents)):
        saved = load_file(trained / "model" / root / "model.safetensors")
        assert all(saved[name].equal(value) for name, value in model.named_parameters())
    assert not read.remarks
    alone = made(SHARED, data, Model(path=str(trained)))
    assert alone.remarks == (f"'{trained}' has an encoder of documents that is left out",)


def test_a_run_goes_on_from_a_pair_as_it_was_at_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    target = moment(trained, 4, tmp_path / "at-4")
    last = moment(trained, 6, tmp_path / "at-6")
    for root in ("", "documents"):
        then, now, final = (
            load_file(folder / root / "model.safetensors")
            for folder in (target, last, trained / "model")
        )
        assert then.keys() == now.keys() == final.keys()
        assert all(now[name].equal(final[name]) for name in final)
        assert not all(then[name].equal(final[name]) for name in final)
    assert (
        load_file(last / "head.safetensors").keys()
        == load_file(trained / "model" / "head.safetensors").keys()
    )


def test_encoders_are_apart_only_where_texts_are_read() -> None:
    with pytest.raises(SettingsError, match="no text is read, and encoders are apart"):
        choose(
            "tasks",
            {"kind": "rank", "query": (), "document": (), "numbers": ("a",), "encoders": "apart"},
        )
    with pytest.raises(SettingsError, match="encoders"):
        choose("tasks", {"kind": "rank", "encoders": "two"})


def test_adapters_are_trained_beside_both_encoders_and_merged_in_both_folders(
    trained: Path, data: Dataset, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    model = Model(path=str(trained), lora=Lora(rank=2))
    attempt(run(tmp_path / "run", data.folder, model), World())
    last = moment(tmp_path / "run", 6, tmp_path / "at-6")
    for root in ("", "documents"):
        before = load_file(trained / "model" / root / "model.safetensors")
        final = load_file(tmp_path / "run" / "model" / root / "model.safetensors")
        again = load_file(last / root / "model.safetensors")
        assert before.keys() == final.keys() == again.keys()
        assert not all(before[name].equal(final[name]) for name in before)
        assert all(torch.allclose(again[name], final[name]) for name in before)
        beside = load_file(tmp_path / "run" / "adapter" / root / "adapter_model.safetensors")
        assert beside
        assert all(".lora_" in name for name in beside)
