"""First weights: the same for every strategy, whether they are drawn or read from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from distributed.runs import BERT, GPT, LLAMA
from regauge.errors import SettingsError
from regauge.models import weights as folders
from regauge.models.architectures import Head, build
from regauge.models.attention_masks import reading
from regauge.models.init_weights import META, InitialWeights, initial_weights, materialize
from regauge.models.settings import Model

VOCABULARY = 300
SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 64}
READ = {
    "bert": WIDE,
    "electra": WIDE,
    "roberta": {**WIDE, "max_position_embeddings": 40},
    "mpnet": {**WIDE, "max_position_embeddings": 40},
    "modernbert": WIDE,
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4},
    "gpt_neox": WIDE,
    "llama": {**WIDE, "num_key_value_heads": 2},
    "mistral": {**WIDE, "num_key_value_heads": 4, "sliding_window": 4},
    "qwen3": {**WIDE, "num_key_value_heads": 2, "head_dim": 16},
    "gemma2": {**WIDE, "num_key_value_heads": 2, "sliding_window": 4},
}
"""Architectures, and the dimensions of one of each."""


def made(model: dict[str, Any], head: Head = "none", seed: int = 3) -> Any:
    return build(Model(**{**model, "attention": "eager"}), head, VOCABULARY, seed)[0]


def empty(model: dict[str, Any], head: Head = "none") -> Any:
    with META:
        return made(model, head)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(("model", "head"), [(BERT, "masked"), (GPT, "causal"), (LLAMA, "causal")])
def test_a_model_is_filled_later_as_it_is_at_once(model: dict[str, Any], head: Head) -> None:
    later = empty(model, head)
    assert all(value.is_meta for value in later.parameters())
    assert not any(value.is_meta for value in later.buffers())
    found = initial_weights(later, Model(**model), 3)
    materialize(later, found)
    assert same(weights(later), weights(made(model, head)))
    assert set(found.sums) == set(weights(later))


def test_a_weight_depends_on_its_seed_and_name_alone() -> None:
    deep = {**BERT, "config": {**BERT["config"], "num_hidden_layers": 5}}
    one, longer = weights(made(BERT)), weights(made(deep))
    assert all(longer[name].equal(value) for name, value in one.items())
    first, second = (f"encoder.layer.{layer}.output.dense.weight" for layer in (0, 1))
    assert not one[first].equal(one[second])
    assert not one[first].equal(weights(made(BERT, seed=4))[first])


def test_the_generator_of_the_process_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    made(BERT)
    assert torch.rand(3).equal(expected)


def test_weights_are_drawn_as_transformers_draws_them() -> None:
    bert = weights(made({**BERT, "config": {**BERT["config"], "hidden_size": 128}}))
    dense = bert["encoder.layer.0.attention.self.query.weight"]
    assert float(dense.std()) == pytest.approx(0.02, rel=0.05)
    assert not bert["encoder.layer.0.attention.self.query.bias"].any()
    assert bert["encoder.layer.0.output.LayerNorm.weight"].eq(1).all()
    assert not bert["embeddings.word_embeddings.weight"][0].any()  # of padding
    gpt = weights(made({**GPT, "config": {**GPT["config"], "n_embd": 128}}))
    scaled = gpt["h.1.mlp.c_proj.weight"]  # by a rule for the module that holds it
    assert float(scaled.std()) == pytest.approx(0.02 / (2 * 2) ** 0.5, rel=0.05)
    assert float(gpt["h.1.mlp.c_fc.weight"].std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("architecture", READ)
def test_buffers_are_those_that_transformers_makes(architecture: str) -> None:
    own = empty({"architecture": architecture, "config": READ[architecture]})
    plain = AutoModel.from_config(own.config)
    expected = dict(plain.named_buffers())
    found = dict(own.named_buffers())
    assert found.keys() == expected.keys()
    assert all(found[name].equal(value) for name, value in expected.items())


@pytest.mark.parametrize("architecture", READ)
def test_a_model_without_weights_reads_as_one_with_them(architecture: str) -> None:
    model = {"architecture": architecture, "config": READ[architecture]}
    assert reading(empty(model)) == reading(made(model))


def test_what_cannot_read_rows_is_refused_without_weights() -> None:
    with pytest.raises(SettingsError, match="'bloom' does not keep the texts of a row apart"):
        reading(empty({"architecture": "bloom", "config": {"hidden_size": 64, "n_head": 4}}))


def test_tied_weights_are_one_and_are_read_once() -> None:
    bert = made(BERT, "masked")
    assert bert.cls.predictions.decoder.weight is bert.bert.embeddings.word_embeddings.weight
    names = [name for name, _ in initial_weights(empty(BERT, "masked"), Model(**BERT), 0)]
    assert len(names) == len(set(names)) == len(weights(bert))


def test_a_module_beside_the_model_is_drawn_by_its_own_rule() -> None:
    with META:
        both = nn.ModuleDict({"model": made(BERT), "extra": nn.Linear(4, 3)})
    materialize(both, InitialWeights(nn.ModuleDict({**both}), 3, {}))
    assert both["extra"].weight.abs().max() <= 0.5  # a bound of nn.Linear's: 1 / sqrt(4)
    assert both["extra"].weight.std() > 0.05
    assert same(weights(both["model"]), weights(made(BERT)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a BERT with its head in several files."""
    monkeypatch.setattr(folders, "LARGEST_FILE", 20_000)
    bert = made(BERT, "masked", seed=8)
    folders.save(tmp_path / "bert", bert.config, bert.named_parameters(), tmp_path)
    return tmp_path / "bert"


def test_a_folder_of_several_files_is_what_transformers_reads(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    assert not list(folder.glob(".*"))
    plain = AutoModelForMaskedLM.from_pretrained(folder)
    expected = weights(made(BERT, "masked", seed=8))
    assert same(weights(plain), expected)
    assert same(weights(made({"path": str(folder)}, "masked")), expected)
    assert same(folders.whole(folder), expected)


def test_one_file_has_no_index(tmp_path: Path) -> None:
    bert = made(BERT)
    folders.save(tmp_path / "bert", bert.config, bert.named_parameters(), tmp_path)
    assert [path.name for path in (tmp_path / "bert").glob("*.safetensors*")] == [folders.WHOLE]


def test_rows_of_a_weight_are_read_alone(folder: Path) -> None:
    place = folders.stored(folder)["bert.embeddings.word_embeddings.weight"]
    whole = place[:]
    assert place.shape == tuple(whole.shape) == (VOCABULARY, 32)
    assert place[7:11].equal(whole[7:11])


def test_a_body_is_read_from_a_model_with_a_head_and_back(folder: Path, tmp_path: Path) -> None:
    """The head that is not there is drawn, and said; the one that is not needed is said, too."""
    plain = {"path": str(folder)}
    with META:
        body = made(plain)
    found = initial_weights(body, Model(**plain), 3)
    assert found.remarks == (
        f"'{folder}' has 5 weights that are left out: {_first_head(folder)} …",
    )
    materialize(body, found)
    folders.save(tmp_path / "body", body.config, body.named_parameters(), tmp_path)
    headless = {"path": str(tmp_path / "body")}
    headed = empty(headless, "masked")
    found = initial_weights(headed, Model(**headless), 3)
    (remark,) = found.remarks
    assert "has no head for this task: 5 weights are drawn, cls.predictions" in remark
    materialize(headed, found)
    whole, drawn = weights(made(plain, "masked")), weights(made(BERT, "masked", seed=3))
    for name, value in weights(headed).items():
        expected = drawn if name.startswith("cls") else whole
        assert value.equal(expected[name]), name


def _first_head(folder: Path) -> str:
    return next(name for name in folders.stored(folder) if name.startswith("cls."))


def test_layer_norms_are_found_by_their_first_names_and_half_precision_is_widened(
    tmp_path: Path,
) -> None:
    bert = made(BERT, seed=8)
    old = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): value.detach().to(torch.bfloat16)
        for name, value in bert.named_parameters()
    }  # fmt: skip
    bert.config.save_pretrained(tmp_path)
    save_file(old, tmp_path / folders.WHOLE)
    found = weights(made({"path": str(tmp_path)}))
    expected = {name: value.to(torch.bfloat16).float() for name, value in weights(bert).items()}
    assert same(found, expected)
    assert all(value.dtype == torch.float32 for value in found.values())


def test_weights_of_another_model_are_refused_before_anything_is_allocated(
    folder: Path, tmp_path: Path
) -> None:
    llama = made(LLAMA, "causal")
    llama.config.save_pretrained(tmp_path)
    for file in folder.glob("*.safetensors*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model = {"path": str(tmp_path)}
    with pytest.raises(SettingsError, match=r"lacks 20 of 20 weights of a llama, such as 'model\."):
        initial_weights(empty(model, "causal"), Model(**model), 0)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_hidden_layers", 3, "lacks 16 of 53 weights of a bert, such as 'bert.encoder.layer.2"),
        ("intermediate_size", 32, r"0.intermediate.dense.bias' is \(64,\) there, \(32,\) by its"),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    folder: Path, field: str, value: int, said: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(SettingsError, match=said):
        made({"path": str(folder)}, "masked")


def test_a_missing_and_a_damaged_file_are_named(folder: Path) -> None:
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    whole = second.read_bytes()
    second.write_bytes(whole[:50])
    with pytest.raises(SettingsError, match=f"{second.name} cannot be read"):
        made({"path": str(folder)}, "masked")
    second.write_bytes(whole)
    first.unlink()
    with pytest.raises(SettingsError, match=f"{first.name} is missing; copy the whole folder"):
        made({"path": str(folder)}, "masked")


def test_architectures_that_are_stored_by_other_names_have_a_way_in(tmp_path: Path) -> None:
    dimensions = {**WIDE, "num_key_value_heads": 2, "num_local_experts": 2}
    mixtral = made({"architecture": "mixtral", "config": dimensions}, "causal")
    mixtral.save_pretrained(tmp_path)  # transformers writes them as they were first published
    with pytest.raises(SettingsError, match=f"run: regauge import {tmp_path} --to OTHER"):
        made({"path": str(tmp_path)}, "causal")
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_heads_that_cannot_share_keys_are_refused() -> None:
    llama = empty({"architecture": "llama", "config": {**WIDE, "num_key_value_heads": 3}})
    with pytest.raises(SettingsError, match="4 heads of attention cannot share 3 of keys"):
        reading(llama)
