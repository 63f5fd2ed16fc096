"""Initial weights: drawn from a seed or read from a folder, equal for every strategy."""

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
from regauge.models import weights as weight_files
from regauge.models.architectures import HeadKind, build_model, load_model
from regauge.models.attention_masks import detect_attention_spec
from regauge.models.init_weights import META, InitialWeights, build_initial_weights, materialize
from regauge.models.settings import Model
from regauge.system.errors import SettingsError

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
"""Architectures with the configuration of a small model."""


def build(model: dict[str, Any], head: HeadKind = "none", seed: int = 3) -> Any:
    return build_model(Model(**{**model, "attention": "eager"}), head, VOCABULARY, seed)[0]


def build_on_meta(model: dict[str, Any], head: HeadKind = "none") -> Any:
    with META:
        return build(model, head)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}


def save(module: Any, folder: Path) -> Path:
    weight_files.save_model_folder(folder, module.config, module.named_parameters(), folder.parent)
    return folder


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(("model", "head"), [(BERT, "masked"), (GPT, "causal"), (LLAMA, "causal")])
def test_materializing_later_gives_the_same_weights(model: dict[str, Any], head: HeadKind) -> None:
    later = build_on_meta(model, head)
    assert all(value.is_meta for value in later.parameters())
    assert not any(value.is_meta for value in later.buffers())
    initial_weights = build_initial_weights(later, Model(**model), 3)
    materialize(later, initial_weights)
    assert are_equal(weights(later), weights(build(model, head)))
    assert set(initial_weights.bit_sums) == set(weights(later))


def test_a_weight_depends_only_on_its_seed_and_name() -> None:
    deep = {**BERT, "config": {**BERT["config"], "num_hidden_layers": 5}}
    one, longer = weights(build(BERT)), weights(build(deep))
    assert all(longer[name].equal(value) for name, value in one.items())
    first, second = (f"encoder.layer.{layer}.output.dense.weight" for layer in (0, 1))
    assert not one[first].equal(one[second])
    assert not one[first].equal(weights(build(BERT, seed=4))[first])


def test_the_default_generator_is_not_changed() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(BERT)
    assert torch.rand(3).equal(expected)


def test_weights_are_initialized_by_the_rules_of_transformers() -> None:
    bert = weights(build({**BERT, "config": {**BERT["config"], "hidden_size": 128}}))
    dense = bert["encoder.layer.0.attention.self.query.weight"]
    assert float(dense.std()) == pytest.approx(0.02, rel=0.05)
    assert not bert["encoder.layer.0.attention.self.query.bias"].any()
    assert bert["encoder.layer.0.output.LayerNorm.weight"].eq(1).all()
    assert not bert["embeddings.word_embeddings.weight"][0].any()  # the row of the padding token
    gpt = weights(build({**GPT, "config": {**GPT["config"], "n_embd": 128}}))
    scaled = gpt["h.1.mlp.c_proj.weight"]  # by a rule of the enclosing module
    assert float(scaled.std()) == pytest.approx(0.02 / (2 * 2) ** 0.5, rel=0.05)
    assert float(gpt["h.1.mlp.c_fc.weight"].std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("architecture", READ)
def test_buffers_equal_transformers(architecture: str) -> None:
    module = build_on_meta({"architecture": architecture, "config": READ[architecture]})
    plain = AutoModel.from_config(module.config)
    expected = dict(plain.named_buffers())
    buffers = dict(module.named_buffers())
    assert buffers.keys() == expected.keys()
    assert all(buffers[name].equal(value) for name, value in expected.items())


@pytest.mark.parametrize("architecture", READ)
def test_the_attention_spec_does_not_need_weights(architecture: str) -> None:
    model = {"architecture": architecture, "config": READ[architecture]}
    assert detect_attention_spec(build_on_meta(model)) == detect_attention_spec(build(model))


def test_an_unsupported_architecture_is_refused_without_weights() -> None:
    bloom = build_on_meta({"architecture": "bloom", "config": {"hidden_size": 64, "n_head": 4}})
    with pytest.raises(SettingsError, match="'bloom' does not isolate the texts of a packed row"):
        detect_attention_spec(bloom)


def test_tied_weights_are_read_once() -> None:
    bert = build(BERT, "masked")
    assert bert.cls.predictions.decoder.weight is bert.bert.embeddings.word_embeddings.weight
    initial_weights = build_initial_weights(build_on_meta(BERT, "masked"), Model(**BERT), 0)
    names = [name for name, _ in initial_weights]
    assert len(names) == len(set(names)) == len(weights(bert))


def test_a_module_outside_the_model_is_initialized_by_its_rule() -> None:
    with META:
        both = nn.ModuleDict({"model": build(BERT), "extra": nn.Linear(4, 3)})
    materialize(both, InitialWeights(nn.ModuleDict({**both}), 3, {}))
    assert both["extra"].weight.abs().max() <= 0.5  # the bound of nn.Linear: 1 / sqrt(4)
    assert both["extra"].weight.std() > 0.05
    assert are_equal(weights(both["model"]), weights(build(BERT)))


TIES: dict[str, HeadKind] = {"llama": "causal", "gpt2": "causal", "bert": "masked"}


@pytest.mark.parametrize("stored", ["another head", "an equal head", "only the head"])
@pytest.mark.parametrize("kind", TIES)
def test_tied_weights_are_read_as_by_transformers(tmp_path: Path, kind: str, stored: str) -> None:
    """A stored head that differs from the embeddings is kept, whatever the configuration says."""
    head = TIES[kind]
    config = {**READ[kind], "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    model = build({"architecture": kind, "config": config}, head)
    model.config.architectures = [type(model).__name__]
    (target, source), *others = model.all_tied_weights_keys.items()
    values = weights(model)
    if stored == "another head":  # a folder that unties the bias must store both
        values |= {name: values[tied].clone() for name, tied in others}
    table = values.pop(source)
    generator = torch.Generator().manual_seed(1)
    other = torch.randn(table.shape, generator=generator)
    values |= {
        "another head": {target: other, source: table},
        "an equal head": {target: table.clone(), source: table},
        "only the head": {target: other},
    }[stored]
    folder = tmp_path / "start"
    model.config.save_pretrained(folder)
    save_file(values, folder / weight_files.WEIGHTS_FILE)
    auto: Any = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM}[head]
    expected = auto.from_pretrained(folder).state_dict()
    trained, loaded = build({"path": str(folder)}, head), load_model(folder)
    trained.config.architectures = model.config.architectures
    saved = load_model(save(trained, tmp_path / "saved"))
    for built in (trained, loaded, saved):
        assert are_equal(built.state_dict(), expected)
        assert built.config.tie_word_embeddings == (stored != "another head")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a BERT with head, in several weight files."""
    monkeypatch.setattr(weight_files, "MAX_FILE_BYTES", 20_000)
    return save(build(BERT, "masked", seed=8), tmp_path / "bert")


def test_transformers_loads_a_folder_of_several_files(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    assert not list(folder.glob(".*"))
    plain = AutoModelForMaskedLM.from_pretrained(folder)
    expected = weights(build(BERT, "masked", seed=8))
    assert are_equal(weights(plain), expected)
    assert are_equal(weights(build({"path": str(folder)}, "masked")), expected)
    assert are_equal(weight_files.read_weights(folder), expected)


def test_one_file_has_no_index(tmp_path: Path) -> None:
    files = save(build(BERT), tmp_path / "bert").glob("*.safetensors*")
    assert [path.name for path in files] == [weight_files.WEIGHTS_FILE]


def test_a_slice_of_rows_can_be_read(folder: Path) -> None:
    stored = weight_files.list_weights(folder)["bert.embeddings.word_embeddings.weight"]
    whole = stored[:]
    assert stored.shape == tuple(whole.shape) == (VOCABULARY, 32)
    assert stored[7:11].equal(whole[7:11])


def test_weights_load_with_an_extra_or_a_missing_head(folder: Path, tmp_path: Path) -> None:
    """A missing head is initialized randomly; missing and unused heads are reported."""
    plain = {"path": str(folder)}
    with META:
        body = build(plain)
    initial_weights = build_initial_weights(body, Model(**plain), 3)
    first_head = next(name for name in weight_files.list_weights(folder) if name.startswith("cls."))
    (warning,) = initial_weights.warnings
    assert warning == f"'{folder}': 5 weights are not used: {first_head}, …"
    materialize(body, initial_weights)
    headless = {"path": str(save(body, tmp_path / "body"))}
    headed = build_on_meta(headless, "masked")
    initial_weights = build_initial_weights(headed, Model(**headless), 3)
    (warning,) = initial_weights.warnings
    assert "no head for this task: 5 weights are initialized randomly: cls.predictions" in warning
    materialize(headed, initial_weights)
    stored_weights = weights(build(plain, "masked"))
    random_weights = weights(build(BERT, "masked", seed=3))
    for name, value in weights(headed).items():
        expected = random_weights if name.startswith("cls") else stored_weights
        assert value.equal(expected[name]), name


def test_legacy_layer_norm_names_and_half_precision_are_converted(
    tmp_path: Path,
) -> None:
    bert = build(BERT, seed=8)
    old = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): value.detach().to(torch.bfloat16)
        for name, value in bert.named_parameters()
    }  # fmt: skip
    bert.config.save_pretrained(tmp_path)
    save_file(old, tmp_path / weight_files.WEIGHTS_FILE)
    loaded = weights(build({"path": str(tmp_path)}))
    expected = {name: value.to(torch.bfloat16).float() for name, value in weights(bert).items()}
    assert are_equal(loaded, expected)
    assert all(value.dtype == torch.float32 for value in loaded.values())


def test_weights_of_another_model_are_refused_before_allocation(
    folder: Path, tmp_path: Path
) -> None:
    llama = build(LLAMA, "causal")
    llama.config.save_pretrained(tmp_path)
    for file in folder.glob("*.safetensors*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model = {"path": str(tmp_path)}
    with pytest.raises(SettingsError, match=r"lacks 20 of 20 weights of a llama, such as 'model\."):
        build_initial_weights(build_on_meta(model, "causal"), Model(**model), 0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 3, "lacks 16 of 53 weights of a bert, such as 'bert.encoder.layer.2"),
        ("intermediate_size", 32, r"dense.bias' is \(64,\), but config.json implies \(32,\)"),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    folder: Path, field: str, value: int, message: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(SettingsError, match=message):
        build({"path": str(folder)}, "masked")


def test_missing_and_damaged_files_are_named(folder: Path) -> None:
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    whole = second.read_bytes()
    second.write_bytes(whole[:50])
    with pytest.raises(SettingsError, match=f"{second.name} cannot be read"):
        build({"path": str(folder)}, "masked")
    second.write_bytes(whole)
    first.unlink()
    with pytest.raises(SettingsError, match=f"{first.name} is missing; copy the whole folder"):
        build({"path": str(folder)}, "masked")


def test_other_stored_names_are_refused_with_the_import_command(tmp_path: Path) -> None:
    dimensions = {**WIDE, "num_key_value_heads": 2, "num_local_experts": 2}
    mixtral = build({"architecture": "mixtral", "config": dimensions}, "causal")
    mixtral.save_pretrained(tmp_path)  # transformers writes the names of the first release
    with pytest.raises(SettingsError, match=f"run: regauge import {tmp_path} --to OTHER"):
        build({"path": str(tmp_path)}, "causal")
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_heads_that_cannot_share_keys_are_refused() -> None:
    llama = build_on_meta({"architecture": "llama", "config": {**WIDE, "num_key_value_heads": 3}})
    with pytest.raises(SettingsError, match="4 attention heads cannot share 3 key-value heads"):
        detect_attention_spec(llama)
