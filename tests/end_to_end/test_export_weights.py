"""Export and import of weights: every format has the same tensors, pooling and dimensions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize

from distributed import datasets
from distributed.runs import settings
from regauge.cli import main
from regauge.data.dataset import read_manifest
from regauge.inference.export.export_settings import TextSettings
from regauge.inference.export.programs import build_folder_spec
from regauge.models.io_spec import InputSpec
from regauge.models.sentence_transformers import PoolingMode
from regauge.models.settings import Model
from regauge.system import processes
from regauge.system.errors import SettingsError
from regauge.tasks.contrastive import Contrastive
from regauge.training.checkpoint import export_weights
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
    data = datasets.write_pairs(folder / "data")
    attempt(settings(folder / "out", data, "contrastive", stop={"steps": 8}), processes.World())
    return folder / "out"


def test_every_format_contains_the_same_weights(encoder: Path, tmp_path: Path) -> None:
    final = load_file(encoder / "model" / "model.safetensors")
    assert main(["export", str(encoder), *HF, "--to", str(tmp_path / "hf")]) == 0
    assert main(["export", str(encoder), "--format", "torch", "--to", str(tmp_path / "w.pt")]) == 0
    sentence_transformers = ["--format", "sentence-transformers", "--to", str(tmp_path / "st")]
    assert main(["export", str(encoder), *sentence_transformers]) == 0
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


def test_a_checkpoint_is_exported(encoder: Path, tmp_path: Path) -> None:
    export = ["export", str(encoder), *HF, "--to"]
    assert main([*export, str(tmp_path / "at"), "export.step=4"]) == 0
    assert main([*export, str(tmp_path / "end"), "export.step=latest"]) == 0
    final = load_file(encoder / "model" / "model.safetensors")
    early = load_file(tmp_path / "at" / "model.safetensors")
    late = load_file(tmp_path / "end" / "model.safetensors")
    assert all(torch.equal(late[name], final[name]) for name in final)
    assert any(not torch.equal(early[name], final[name]) for name in final)


@pytest.mark.full
def test_a_state_dict_and_a_folder_are_imported_equally(encoder: Path, tmp_path: Path) -> None:
    main(["export", str(encoder), "--format", "torch", "--to", str(tmp_path / "w.pt")])
    assert main(["import", str(tmp_path / "w.pt"), "--to", str(tmp_path / "a"), *DIMENSIONS]) == 0
    assert main(["import", str(encoder / "model"), "--to", str(tmp_path / "b")]) == 0
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_invalid_imports_and_exports_are_refused(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", str(encoder), "--format", "torch", "--to", str(tmp_path / "w.pt")])
    capsys.readouterr()
    weights, target = str(tmp_path / "w.pt"), str(tmp_path / "a")
    assert main(["import", weights, "--to", target]) == 2
    assert "so its architecture is unknown" in capsys.readouterr().err
    assert (
        main(["import", weights, "--to", target, *DIMENSIONS, "model.config.hidden_size=64"]) == 64
    )
    assert "set model.config to its dimensions" in capsys.readouterr().err
    assert not Path(target).exists()


def test_a_refused_export_does_not_change_the_target_folder(tmp_path: Path) -> None:
    (target := tmp_path / "to").mkdir()
    with pytest.raises(SettingsError, match="did not train a text encoder"):
        export_weights.export_model(tmp_path / "model", target, "sentence-transformers")
    assert target.is_dir()


@pytest.mark.parametrize("modes", [("mean",), ("cls",), ("lasttoken", "max")])
def test_pooling_is_kept_by_warm_start_and_export(
    modes: tuple[PoolingMode, ...], tmp_path: Path
) -> None:
    data, sizes = datasets.write_pairs(tmp_path / "data"), {"dim": 32, "n_layers": 1, "n_heads": 2}
    model = {"architecture": "distilbert", "config": {**sizes, "hidden_dim": 64}, "path": None}
    first, second = tmp_path / "first", tmp_path / "second"
    task = {} if modes == ("mean",) else {"pooling": modes}
    for folder, start in ((first, model), (second, {"path": str(first)})):
        run = settings(folder, data, "contrastive", task=task, model=start, stop={"steps": 4})
        attempt(run, processes.World())
        task = {}
    early = export_weights.export_checkpoint(second, 4, tmp_path / "early")
    tokens, lengths = torch.arange(1, 17, dtype=torch.int32).view(2, 8), torch.tensor([8, 8])
    for folder in (first / "model", second / "model", early):
        configuration = json.loads((folder / "1_Pooling" / "config.json").read_text())
        assert configuration["word_embedding_dimension"] == sizes["dim"]
        for fields, max_length in ((None, datasets.LENGTH), (InputSpec(max_lengths=(16,)), 16)):
            spec = build_folder_spec(folder, TextSettings(), fields)
            tokenization = spec.entry.required_tokenization
            assert (tokenization.convention, tokenization.max_length) == ("regauge", max_length)
            program: Any = spec.program
            with torch.no_grad():
                states = program.module.model(tokens).last_hidden_state
                pooled = {"mean": states.mean(1), "cls": states[:, 0]}
                pooled |= {"lasttoken": states[:, -1], "max": states.amax(1)}
                expected = normalize(torch.cat([pooled[mode] for mode in modes], -1), dim=-1)
                assert torch.allclose(program(tokens, lengths), expected, atol=1e-5)


def test_the_pooling_of_the_weights_can_be_overridden(
    tmp_path: Path,
) -> None:
    data = datasets.write_pairs(tmp_path / "data")
    changes: dict[str, Any] = {"task": {"pooling": ("cls",)}, "stop": {"steps": 1}}
    attempt(settings(tmp_path / "run", data, "contrastive", **changes), processes.World())
    modes_by_setting = {
        pooling: Contrastive(pooling=pooling)
        .build_module(Model(path=str(tmp_path / "run")), read_manifest(data), seed=0)
        .pooling.modes
        for pooling in ((), ("mean",), ("max", "cls"))
    }
    assert modes_by_setting == {(): ("cls",), ("mean",): ("mean",), ("max", "cls"): ("max", "cls")}


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.0}, {"dropout": 0.4}])
def test_an_exported_model_has_the_dropout_of_its_start(
    encoder: Path, tmp_path: Path, changes: dict[str, float]
) -> None:
    start = tmp_path / "start"
    shutil.copytree(encoder / "model", start)
    rates = {"hidden_dropout_prob": 0.15, "attention_probs_dropout_prob": 0.25}
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**config, **rates}))
    data = datasets.write_pairs(tmp_path / "data")
    model = {"path": str(start), **changes}
    run = settings(tmp_path / "run", data, "contrastive", model=model, stop={"steps": 1})
    attempt(run, processes.World())
    exported = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert {name: exported[name] for name in rates} == rates
