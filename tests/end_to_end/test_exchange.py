"""Weights out and in again: every form carries the same tensors, and nothing in one runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distributed import datasets
from distributed.runs import settings
from regauge import processes
from regauge.checkpoint import exchange
from regauge.cli import main
from regauge.errors import SettingsError
from regauge.models import weights as folders
from regauge.models.build import build, class_name
from regauge.models.settings import Model
from regauge.training.run import attempt

HF = ["--format", "hf"]
DIMENSIONS = [
    "model.architecture=bert",
    f"model.config.vocab_size={datasets.VOCABULARY}",
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "model.config.intermediate_size=64",
    "model.config.max_position_embeddings=32",
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    data = datasets.pairs(folder / "data")
    attempt(settings(folder / "out", data, "contrastive", stop={"steps": 8}), processes.World())
    return folder / "out"


def test_every_form_holds_the_same_weights(encoder: Path, tmp_path: Path) -> None:
    final = load_file(encoder / "model" / "model.safetensors")
    assert main(["export", str(encoder), *HF, "--to", str(tmp_path / "hf")]) == 0
    assert main(["export", str(encoder), "--format", "torch", "--to", str(tmp_path / "w.pt")]) == 0
    form = ["--format", "sentence-transformers", "--to", str(tmp_path / "st")]
    assert main(["export", str(encoder), *form]) == 0
    plain = torch.load(tmp_path / "w.pt", weights_only=True)
    for weights in (
        load_file(tmp_path / "hf" / "model.safetensors"),
        load_file(tmp_path / "st" / "model.safetensors"),
        plain,
    ):
        assert weights.keys() == final.keys()
        assert all(torch.equal(weights[name], final[name]) for name in final)
    modules = json.loads((tmp_path / "st" / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == [
        "Transformer",
        "Pooling",
        "Normalize",
    ]


def test_a_kept_checkpoint_is_exported(encoder: Path, tmp_path: Path) -> None:
    export = ["export", str(encoder), *HF, "--to"]
    assert main([*export, str(tmp_path / "at"), "target.step=4"]) == 0
    assert main([*export, str(tmp_path / "end"), "target.step=latest"]) == 0
    final = load_file(encoder / "model" / "model.safetensors")
    early = load_file(tmp_path / "at" / "model.safetensors")
    late = load_file(tmp_path / "end" / "model.safetensors")
    assert all(torch.equal(late[name], final[name]) for name in final)
    assert any(not torch.equal(early[name], final[name]) for name in final)


def test_a_state_dict_and_a_folder_come_in_alike(encoder: Path, tmp_path: Path) -> None:
    main(["export", str(encoder), "--format", "torch", "--to", str(tmp_path / "w.pt")])
    assert main(["import", str(tmp_path / "w.pt"), "--to", str(tmp_path / "a"), *DIMENSIONS]) == 0
    assert main(["import", str(encoder / "model"), "--to", str(tmp_path / "b")]) == 0
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_what_does_not_fit_is_refused(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", str(encoder), "--format", "torch", "--to", str(tmp_path / "w.pt")])
    capsys.readouterr()
    weights, target = str(tmp_path / "w.pt"), str(tmp_path / "a")
    assert main(["import", weights, "--to", target]) == 2
    assert "does not say its architecture" in capsys.readouterr().err
    assert (
        main(["import", weights, "--to", target, *DIMENSIONS, "model.config.hidden_size=64"]) == 64
    )
    assert "set model.config to its dimensions" in capsys.readouterr().err
    assert main(["export", str(encoder), "--to", weights]) == 2
    assert "exists" in capsys.readouterr().err
    assert not Path(target).exists()


def test_a_form_that_is_refused_leaves_its_place_alone(tmp_path: Path) -> None:
    (target := tmp_path / "to").mkdir()
    with pytest.raises(SettingsError, match="did not train a text encoder"):
        exchange.export(tmp_path / "model", target, "sentence-transformers", pooled=False)
    assert target.is_dir()


def test_an_encoder_whose_width_has_another_name_is_described(tmp_path: Path) -> None:
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
    model, _ = build(Model(architecture="distilbert", config=sizes), "none", 96, seed=0)
    model.config.architectures = [class_name(model)]
    folders.save(tmp_path / "model", model.config, model.named_parameters(), tmp_path)
    made = exchange.export(
        tmp_path / "model", tmp_path / "to", "sentence-transformers", pooled=True
    )
    described = json.loads((made / "1_Pooling" / "config.json").read_text())
    assert described["word_embedding_dimension"] == 32
