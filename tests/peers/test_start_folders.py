"""Runs, commands and plans read a start folder as transformers and peft do, or all refuse it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peers.architectures import PEERS, POSITIONS
from peers.folders import build_model, save_folder
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor, nn

import regauge
from libraries import record_warnings
from regauge import config
from regauge.cli import main
from regauge.data.dataset import assume_manifest
from regauge.models import architectures
from regauge.models.settings import Model
from regauge.models.weight_shapes import ParamSpec
from regauge.models.weights import base_weight_name
from regauge.planner.run_plans.planned_model import read_model
from regauge.planner.run_plans.run_request import PlannedRun
from regauge.serving.model_version import open_served_artifact
from regauge.system.errors import RegaugeError, SettingsError

peft = pytest.importorskip("peft", reason="not proved here: adapters, which need peft")

WEIGHTS, CONFIG = "model.safetensors", "config.json"
NUM_CLASSES = 3
FIELDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TASKS: dict[architectures.HeadKind, dict[str, Any]] = {
    "masked": {"kind": "mlm"},
    "causal": {"kind": "clm"},
    "classes": {"kind": "classify", "text_fields": ["text"], "classes": NUM_CLASSES},
    "tokens": {"kind": "tokens", "words": "words", "classes": NUM_CLASSES},
    "none": {"kind": "contrastive"},
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "modernbert")
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
TIED_MODELS = [
    ("bert", "masked"),
    ("modernbert", "masked"),
    ("gpt2", "causal"),
    ("llama", "causal"),
    *(pytest.param(name, "masked", marks=pytest.mark.full) for name in ("roberta", "electra")),
    *(pytest.param(name, "causal", marks=pytest.mark.full) for name in ("qwen3", "gemma2")),
]


def save(folder: Path, name: str, head: architectures.HeadKind, **fields: Any) -> Path:
    """Write a folder with a model of transformers and a tokenizer; return it."""
    auto_class = getattr(transformers, architectures.AUTO_CLASSES[head])
    values = {**PEERS[name].sizes, **FIELDS, **fields}
    config = transformers.CONFIG_MAPPING[name](**{"num_labels": NUM_CLASSES, **values})
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))  # noqa: S106 - a token of text
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")  # noqa: S106
    return save_folder(folder, build_model(auto_class, config), tokenizer)


def edit(folder: Path, weights: dict[str, Tensor], **fields: Any) -> None:
    """Write other weights, and fields of the configuration."""
    values = {name: value.contiguous().clone() for name, value in weights.items()}
    save_file(values, folder / WEIGHTS, {"format": "pt"})
    document = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**document, **fields}))


def build_start(head: architectures.HeadKind, **settings: Any) -> Any:
    """Return the model of a run at step 0."""
    classes = architectures.ClassHead(NUM_CLASSES) if head in ("classes", "tokens") else None
    model = Model(attention="eager", **settings)
    return architectures.build_model(model, head, 1, 0, class_head=classes)[0]


def plan_weights(head: architectures.HeadKind, **settings: Any) -> dict[str, ParamSpec]:
    """Return the weights of a run by the plan."""
    tables = {"task": TASKS[head], "model": settings, "batch": {"rows": 8}}
    run = config.build(PlannedRun, tables, (), "run.toml")
    manifest = assume_manifest(run.task.row_layout(), {})
    return dict(read_model(run, manifest, None).weights.specs)


def list_parameters(model: nn.Module) -> dict[str, ParamSpec]:
    """Return the weights of a model by their names without adapters."""
    return {
        base_weight_name(name): ParamSpec(tuple(value.shape), value.requires_grad)
        for name, value in model.named_parameters()
    }


def compute(model: nn.Module) -> Tensor:
    """Return the logits of two rows."""
    tokens = torch.arange(5, 29).view(2, 12)
    with torch.no_grad():
        outputs = model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    return outputs["logits"] if "logits" in outputs else outputs["last_hidden_state"]


def count_elements(weights: dict[str, ParamSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in weights.values())


@pytest.mark.parametrize("stored", ["absent", "equal", "different"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("name", "head"), TIED_MODELS)
def test_stored_weights_decide_whether_the_output_layer_is_tied(
    name: str, head: architectures.HeadKind, stored: str, tmp_path: Path, *, is_tied: bool
) -> None:
    """Without a layer that config.json unties, transformers and a run draw a random one."""
    folder = save(tmp_path, name, head, tie_word_embeddings=True)
    auto_class = getattr(transformers, architectures.AUTO_CLASSES[head])
    weights = load_file(folder / WEIGHTS)
    for alias, origin in auto_class.from_pretrained(folder).all_tied_weights_keys.items():
        weights.pop(alias, None)
        if stored != "absent":
            is_other = stored == "different" and weights[origin].dim() > 1
            weights[alias] = weights[origin] + (torch.randn(weights[origin].shape) * is_other)
    edit(folder, weights, tie_word_embeddings=is_tied)
    expected = auto_class.from_pretrained(folder, attn_implementation="eager")
    started, planned = (make(head, path=str(folder)) for make in (build_start, plan_weights))
    assert count_elements(planned) == count_elements(list_parameters(started))
    if stored == "absent" and not is_tied:
        problem = "lacks the weight"
        with pytest.raises(SettingsError, match=problem):
            architectures.load_model(folder)
        return
    logits = compute(expected)
    torch.testing.assert_close(compute(started), logits, rtol=0, atol=1e-4)
    loaded = architectures.load_model(folder)
    torch.testing.assert_close(compute(loaded), logits, rtol=0, atol=1e-4)
    are_tied = is_tied and stored != "different"
    for model in (started, loaded):
        assert model.config.tie_word_embeddings == are_tied


@pytest.mark.parametrize(("layer", "bias"), [("absent", 1), ("equal", 1), ("different", 0)])
def test_a_layer_that_is_untied_in_part_is_refused_or_equal(
    layer: str, bias: int, tmp_path: Path
) -> None:
    """BERT ties the bias of its output layer too, and transformers unties each weight alone."""
    folder = save(tmp_path / "model", "bert", "masked", tie_word_embeddings=True)
    weights = load_file(folder / WEIGHTS)
    name, head = "cls.predictions.decoder.weight", "cls.predictions.bias"
    if layer != "absent":
        weights[name] = weights["bert.embeddings.word_embeddings.weight"] + (layer == "different")
    if bias:
        weights["cls.predictions.decoder.bias"] = weights[head] + 1
    edit(folder, weights)
    if layer != "equal":
        assert_refused(folder, "masked", "unties its output layer only in part: it has no")
        return
    expected = compute(transformers.BertForMaskedLM.from_pretrained(folder))
    started = build_start("masked", path=str(folder))
    torch.testing.assert_close(compute(started), expected, rtol=0, atol=1e-4)
    planned = plan_weights("masked", path=str(folder))
    assert count_elements(planned) == count_elements(list_parameters(started))
    assert main(["import", str(folder), "--to", str(tmp_path / "other")]) == 0
    saved = transformers.BertForMaskedLM.from_pretrained(tmp_path / "other")
    torch.testing.assert_close(compute(saved), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "model-00001-of-00002.safetensors"])
def test_weights_under_other_names_are_refused(name: str, tmp_path: Path) -> None:
    """Neither does transformers read them."""
    folder = save(tmp_path / "model", "llama", "causal")
    (folder / WEIGHTS).rename(folder / name)
    with pytest.raises(OSError, match="no file named"):
        transformers.LlamaForCausalLM.from_pretrained(folder)
    assert_refused(folder, "causal", f"has {name}, but neither {WEIGHTS}")
    assert main(["import", str(folder), "--to", str(tmp_path / "imported")]) == 2


def write_shards(folder: Path, model: Any) -> None:
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / WEIGHTS).unlink()
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1


def write_old_names(folder: Path, model: Any) -> None:
    """Write the names of BERT's first release, with a buffer that is computed today."""
    weights = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in model.state_dict().items()
    }
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    weights[f"{prefix}embeddings.position_ids"] = torch.arange(POSITIONS)[None]
    edit(folder, weights)


@pytest.mark.parametrize("write", [write_shards, write_old_names])
@pytest.mark.parametrize("head", ["none", "masked", "classes"])
def test_shards_and_old_names_are_read(
    head: architectures.HeadKind, write: Callable[[Path, Any], None], tmp_path: Path
) -> None:
    folder = save(tmp_path / "model", "bert", head)
    auto_class = getattr(transformers, architectures.AUTO_CLASSES[head])
    expected = compute(auto_class.from_pretrained(folder))
    write(folder, auto_class.from_pretrained(folder))
    torch.testing.assert_close(compute(auto_class.from_pretrained(folder)), expected)
    started, planned = (make(head, path=str(folder)) for make in (build_start, plan_weights))
    assert count_elements(planned) == count_elements(list_parameters(started))
    assert main(["import", str(folder), "--to", str(tmp_path / "imported")]) == 0
    imported = auto_class.from_pretrained(tmp_path / "imported")
    for model in (started, architectures.load_model(folder), imported):
        torch.testing.assert_close(compute(model), expected, rtol=0, atol=1e-4)
    if write is write_shards:
        next(folder.glob("model-00002-*")).unlink()
        assert_refused(folder, head, "model-00002-of-.* is missing; copy the whole folder again")


def test_pickles_are_refused_and_imported(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "bert", "masked")
    expected = compute(transformers.BertForMaskedLM.from_pretrained(folder))
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    assert_refused(folder, "masked", f"are a pickle; run: regauge import {folder} --to")
    assert main(["import", str(folder), "--to", str(tmp_path / "imported")]) == 0
    started = build_start("masked", path=str(tmp_path / "imported"))
    torch.testing.assert_close(compute(started), expected, rtol=0, atol=1e-4)


def test_a_cross_encoder_is_a_regression_at_step_0(tmp_path: Path) -> None:
    """A model of one label returns its logit, as transformers and CrossEncoder without sigmoid."""
    folder = save(tmp_path / "model", "bert", "classes", num_labels=1)
    expected = compute(transformers.BertForSequenceClassification.from_pretrained(folder))
    assert expected.shape == (2, 1)
    head = architectures.ClassHead(1, problem_type="regression")
    model = Model(attention="eager", path=str(folder))
    started = architectures.build_model(model, "classes", 1, 0, class_head=head)[0]
    torch.testing.assert_close(compute(started), expected, rtol=0, atol=1e-4)


PARTS: list[dict[str, Any]] = [{}, {"trainable_layers": 1}, {"lora": {"rank": 2}}]
OUTPUT_ADAPTER = {"lora": {"rank": 2, "targets": ["lm_head"]}}
HEADS = [
    *((name, head) for name in ENCODERS for head in ("none", "classes", "tokens")),
    *((name, "masked") for name in ("bert", "roberta", "camembert", "modernbert")),
    *((name, head) for name in DECODERS for head in ("causal", "classes")),
    *((name, "tokens") for name in DECODERS if name != "gemma3_text"),
]


@pytest.mark.parametrize(("name", "head"), HEADS)
def test_a_plan_counts_the_weights_of_the_model(name: str, head: architectures.HeadKind) -> None:
    fields = {**PEERS[name].sizes, **FIELDS}
    fields.pop("global_attn_every_n_layers", None)  # an old key, only read from files
    model = {"architecture": name, "config": fields}
    for part in (*PARTS, *[OUTPUT_ADAPTER] * (head == "causal")):
        with architectures.META:
            built = list_parameters(build_start(head, **model, **part))
        planned = plan_weights(head, **model, **part)
        assert sorted(planned.values()) == sorted(built.values()), part


QUANTIZED: list[dict[str, Any]] = [
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"quantization_config": {"quant_method": "awq", "bits": 4}},
    {"quantization_config": {"quant_method": "compressed-tensors"}},
    {"quantization_config": {"quant_method": "fp8"}},
    {"compression_config": {"format": "int-quantized"}},
]


@pytest.mark.parametrize("fields", QUANTIZED)
def test_quantized_weights_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    """Their stored numbers have the shapes of the weights, without the scale."""
    folder = save(tmp_path / "model", "llama", "causal")
    weights = load_file(folder / WEIGHTS)
    edit(folder, {name: value.to(torch.int8) for name, value in weights.items()}, **fields)
    assert_refused(folder, "causal", r"are quantized \(.*\); name the model before its quant")
    assert main(["import", str(folder), "--to", str(tmp_path / "imported")]) == 2


def assert_refused(folder: Path, head: architectures.HeadKind, problem: str) -> None:
    """Check that a run, a plan and the readers of a folder refuse it with the same line."""
    for read in (build_start, plan_weights):
        with pytest.raises(SettingsError, match=problem):
            read(head, path=str(folder))
    with pytest.raises(SettingsError, match=problem):
        regauge.load(folder)
    with pytest.raises(RegaugeError, match=problem):
        open_served_artifact(folder)


BLOCKS = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
FFN = {"target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True}
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 64}}
ADAPTERS: dict[str, tuple[str, architectures.HeadKind, dict[str, Any]]] = {
    "patterns": ("llama", "causal", {**BLOCKS, **PATTERNS}),
    "scaled by the root": ("llama", "causal", FFN),
    "weight decomposition": ("llama", "causal", {**BLOCKS, "use_dora": True}),
    "biases": ("bert", "masked", {"target_modules": ["query", "value"], "bias": "lora_only"}),
    "tied output layer": ("gemma2", "causal", {"target_modules": ["lm_head", "q_proj"]}),
    "tied embeddings": ("gpt2", "causal", {"target_modules": ["wte", "c_attn"]}),
    "tied decoder": ("bert", "masked", {"target_modules": ["query", "predictions.decoder"]}),
    "saved embeddings": (
        "gemma2",
        "causal",
        {**BLOCKS, "modules_to_save": ["embed_tokens"]},
    ),
    "saved output layer": ("gemma2", "causal", {**BLOCKS, "modules_to_save": ["lm_head"]}),
    "saved and tied": (
        "gemma2",
        "causal",
        {**BLOCKS, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "transposed layers": ("gpt2", "causal", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "new head": ("bert", "classes", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    "new head of a decoder": ("llama", "classes", {**BLOCKS, "task_type": "SEQ_CLS"}),
    "new head of two layers": (
        "roberta",
        "classes",
        {"target_modules": ["query"], "task_type": "SEQ_CLS"},
    ),
    "tokens": ("bert", "tokens", {"target_modules": ["query"], "task_type": "TOKEN_CLS"}),
    "encoder": ("modernbert", "none", {"target_modules": ["Wqkv", "Wi"]}),
}
"""Name -> architecture, head, and the adapter by peft."""


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_is_merged_by_an_import(case: str, tmp_path: Path) -> None:
    """The reference is peft, unmerged; nothing but an import reads the adapter's folder."""
    name, head, fields = ADAPTERS[case]
    folder, target = tmp_path / "adapter", tmp_path / "merged"
    has_new_head = head in ("classes", "tokens")
    base = save(tmp_path / "base", name, "none" if has_new_head else head)
    auto_class = getattr(transformers, architectures.AUTO_CLASSES[head])
    labels = {"num_labels": 5} if has_new_head else {}
    with record_warnings():  # of tied layers, and of calls that transformers deprecates
        options = peft.LoraConfig(r=4, lora_alpha=16, **fields)
        model = peft.get_peft_model(auto_class.from_pretrained(base, **labels), options)
        with torch.no_grad():
            for value in model.parameters():
                if value.requires_grad:
                    value.add_(torch.randn_like(value), alpha=0.2)
        expected = compute(model)
        model.save_pretrained(folder)
    assert not torch.allclose(expected, compute(auto_class.from_pretrained(base, **labels)))
    assert_refused(folder, head, "is a peft adapter, which needs its base model; run: regauge imp")
    assert main(["import", str(folder), "--to", str(target)]) == 0
    for merged in (auto_class.from_pretrained(target), architectures.load_model(target)):
        torch.testing.assert_close(compute(merged), expected, rtol=1e-4, atol=1e-4)
    assert not (target / "adapter_config.json").exists()


def test_an_adapter_next_to_a_model_is_refused(tmp_path: Path) -> None:
    """Transformers adds it to the model, and peft to the base model that it names."""
    folder = save(tmp_path, "llama", "causal")
    (folder / "adapter_config.json").write_text("{}")
    assert_refused(folder, "causal", "has a peft adapter next to a model; move one of them")
