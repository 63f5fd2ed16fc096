"""Weights that are counted without torch are those of the modules, and all others are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.runs import BERT, TASKS, settings
from regauge.config import merge
from regauge.data.dataset import DatasetManifest
from regauge.models.io_spec import ModelHead
from regauge.models.weight_shapes import HAS_DROPOUT, ModelWeights, list_new_weights
from regauge.tasks.contrastive import Contrastive
from regauge.tasks.mlm import Mlm
from regauge.training.batch_finder.memory import measure_module
from regauge.training.batch_finder.model_size import ModelSize, _find_manifest, count_weights
from regauge.training.optimizer import build_optimizer, prime_state, state_tensors
from regauge.training.settings import Optimizer, TrainSettings
from regauge.training.state_bytes import MOMENT_AXES, count_moments

VOCABULARY = {"model": {"config": {"vocab_size": 300}}}
EAGER = {"model": {"attention": "eager"}}
CLASSES = {"kind": "classify", "text_fields": ["text"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mlm": ("mlm", EAGER),
    "next-sentence": ("next-sentence", {"model": {"attention": "chunked"}}),
    "contrastive": ("contrastive", {}),
    "classes": ("mlm", {"task": {**CLASSES, "classes": 5}}),
    "regression": ("mlm", {"task": {**CLASSES, "problem_type": "regression"}}),
    "tokens": ("mlm", {"task": {"kind": "tokens", "words": "words", "classes": 4}}),
    "clm": ("llama", {"model": {"attention": "chunked"}}),
    "sft": ("sft", {"model": {"config": {"num_key_value_heads": 1, "rms_norm_eps": 1e-6}}}),
    "dpo": ("llama", {"task": {"kind": "dpo"}}),
    "tied": ("llama", {"model": {"config": {"tie_word_embeddings": True}}}),
}
MASKED = ModelHead("masked")
UNKNOWN: dict[str, dict[str, Any]] = {
    "activation": {"config": {"hidden_act": "relu"}},
    "misspelled field": {"config": {"hiden_size": 32}},
    "heads that do not divide": {"config": {"num_attention_heads": 5}},
    "text for a size": {"config": {"hidden_size": "32"}},
    "no layers": {"config": {"num_hidden_layers": 0}},
    "dropout above 1": {"config": {"hidden_dropout_prob": 1.5}},
    "vocabulary of fewer tokens": {"config": {"vocab_size": 299}},
    "adapters": {"lora": {"rank": 2}},
    "frozen blocks": {"trainable_layers": 1},
    "other architecture": {"architecture": "roberta"},
}


def build(tmp_path: Path, task: str, changes: dict[str, Any]) -> TrainSettings:
    """Return a run whose data is not prepared."""
    tables = merge(merge({"model": TASKS[task]["model"]}, VOCABULARY), changes)
    if "task" in changes:  # in place of the fields of the other task
        tables["task"] = changes["task"]
    return settings(tmp_path / "run", tmp_path / "data", task, **tables)


def count(run: TrainSettings) -> tuple[ModelSize | None, list[DatasetManifest]]:
    """Return the size of a model without torch, and the manifests of the run."""
    manifests = [_find_manifest(config, {}) for config in run.task_configs]
    return count_weights(run, manifests), manifests


@pytest.mark.parametrize("case", CASES)
def test_counted_weights_are_those_of_the_module(case: str, tmp_path: Path) -> None:
    run = build(tmp_path, *CASES[case])
    counted, manifests = count(run)
    assert counted is not None
    built = measure_module(run, manifests)
    assert counted.weights == built.weights
    assert counted.counts == built.counts
    for name, task in built.tasks.items():
        assert counted.tasks[name].max_tokens == task.max_tokens
        assert counted.tasks[name].flops_per_token(24) == task.flops_per_token(24)


@pytest.mark.parametrize("change", UNKNOWN)
def test_a_model_that_may_be_refused_or_has_other_weights_is_built(change: str) -> None:
    assert list_bert({}) is not None
    assert list_bert(UNKNOWN[change]) is None


def list_bert(changes: dict[str, Any]) -> ModelWeights | None:
    """Return the weights of a BERT for a tokenizer of 300 tokens."""
    model = build(Path("none"), "mlm", {"model": changes}).model
    return list_new_weights(model, MASKED, 300, 0)


def test_other_invalid_models_are_refused_by_the_module() -> None:
    """A padding token outside of the vocabulary, and an architecture without dropout."""
    assert list_new_weights(build(Path("none"), "mlm", {}).model, MASKED, 300, 300) is None
    assert "llama" not in HAS_DROPOUT
    model = build(Path("none"), "llama", {"model": {"dropout": 0.1}}).model
    assert list_new_weights(model, ModelHead("causal"), 300, 0) is None


class OtherModule(Mlm):
    """A task that builds another module than its base class."""

    def build_module(self, *arguments: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("task", [OtherModule(), Contrastive(matryoshka_dims=(32, 8))])
def test_a_task_with_a_module_or_a_check_of_its_own_is_built(task: Any, tmp_path: Path) -> None:
    run = build(tmp_path, "mlm", {"model": BERT}).model_copy(update={"task": task})
    assert count(run)[0] is None


def test_several_tasks_are_built(tmp_path: Path) -> None:
    tasks = ({"kind": "mlm", "name": "words"}, {**CLASSES, "name": "classes"})
    assert count(build(tmp_path, "mlm", {"task": tasks}))[0] is None


@pytest.mark.parametrize("kind", MOMENT_AXES)
def test_optimizers_keep_the_counted_moments(kind: str) -> None:
    tables = {"kind": kind, "learning_rate": 1e-3, "betas": (0.9, 0.99)}
    for shape in ((7,), (7, 11)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        optimizer = build_optimizer(Optimizer.model_validate(tables), {"probe": weight}.items())
        prime_state(optimizer)
        moments = state_tensors(optimizer, {"probe": weight}).values()
        assert count_moments(kind, [shape]) == sum(value.numel() for value in moments)


def test_the_moments_of_every_kind_of_optimizer_are_known() -> None:
    kinds = Optimizer.model_fields["kind"].annotation
    assert set(kinds.__args__) == set(MOMENT_AXES)  # type: ignore[union-attr]
