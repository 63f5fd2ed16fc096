"""Runs, commands and plans read a start folder as transformers and peft do, or all refuse it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peers.architectures import PEERS
from peers.folders import build_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regauge import config
from regauge.data.dataset import assume_manifest
from regauge.models import architectures
from regauge.models.settings import Model
from regauge.models.weight_shapes import ParamSpec
from regauge.models.weights import base_weight_name
from regauge.planner.run_plans.planned_model import read_model
from regauge.planner.run_plans.run_request import PlannedRun
from regauge.system.errors import SettingsError

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
    """Write a folder with a model of transformers, without tokenizer; return it."""
    auto_class = getattr(transformers, architectures.AUTO_CLASSES[head])
    values = {**PEERS[name].sizes, **FIELDS, **fields}
    config = transformers.CONFIG_MAPPING[name](**values, num_labels=NUM_CLASSES)
    build_model(auto_class, config).save_pretrained(folder)
    return folder


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
