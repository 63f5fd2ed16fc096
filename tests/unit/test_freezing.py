"""`model.trainable_layers`: which weights of each task are trained, and what the others cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distributed import datasets, jobs
from distributed.runs import BERT, TASKS, settings
from regauge.config import build, parse_choice
from regauge.data.dataset import read_manifest
from regauge.models.custom import CustomModule
from regauge.models.heads import check_trained
from regauge.models.settings import Model
from regauge.system.errors import SettingsError
from regauge.system.processes import World
from regauge.training.run import attempt
from regauge.training.task_runtime import build_module

HEADS = {
    "mlm": {"cls.predictions.bias", "cls.predictions.transform"},
    "next-sentence": {"cls.predictions.bias", "cls.predictions.transform", "cls.seq", "pooler"},
    "classify": {"classifier", "bert.pooler"},
    "contrastive": set(),
    "clm": set(),
    "llama": {"lm_head"},
}
"""Parts of the names of weights that are trained outside of the blocks."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    return {layout: write(root / layout) for layout, write in datasets.WRITERS.items()}


def build_task_module(data: dict[str, Path], task: str, layers: Any, **config: Any) -> nn.Module:
    folder = data[parse_choice("tasks", TASKS[task]["task"]).row_layout()]
    model = {"trainable_layers": layers, "config": config}
    run = settings(folder.parent / "run", folder, task, model=model)
    return build_module(run, [read_manifest(folder)])


@pytest.mark.parametrize("task", HEADS)
def test_the_last_blocks_and_the_head_are_trained(data: dict[str, Path], task: str) -> None:
    module = build_task_module(data, task, 1)
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    parts = (".layer.", ".layers.", ".h.")
    blocks = [name for name in trained if any(part in name for part in parts)]
    assert blocks
    assert all(".1." in name for name in blocks)
    others = set(trained) - set(blocks)
    assert all(any(part in name for part in HEADS[task]) for name in others), others
    assert all(any(part in name for name in others) for part in HEADS[task])


@pytest.mark.parametrize("task", ["classify", "mlm", "llama"])
def test_none_trains_the_head_alone(data: dict[str, Path], task: str) -> None:
    module = build_task_module(data, task, "none")
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    assert trained
    assert all(any(part in name for part in HEADS[task]) for name in trained), trained


@pytest.mark.parametrize("task", ["contrastive", "clm"])
def test_a_frozen_encoder_without_a_head_is_refused(data: dict[str, Path], task: str) -> None:
    with pytest.raises(SettingsError, match="no weight is trained: the task adds no head"):
        build_task_module(data, task, "none")


def test_too_many_layers_are_refused(data: dict[str, Path]) -> None:
    with pytest.raises(SettingsError, match=r"2 blocks, but model.trainable_layers = 3; set it"):
        build_task_module(data, "mlm", 3)


def test_every_weight_is_trained_by_default(data: dict[str, Path]) -> None:
    module = build_task_module(data, "mlm", "all")
    assert all(value.requires_grad for value in module.parameters())


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"trainable_layers": 1, "lora": {}}, "adapters only; remove model.trainable_layers"),
        ({"trainable_layers": -1}, "must be at least 0, got -1"),
        ({"trainable_layers": "half"}, "must be 'all' or 'none' or an integer"),
    ],
)
def test_invalid_settings_are_refused(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        build(Model, {**BERT, **table})


def test_a_custom_module_freezes_its_weights_itself() -> None:
    module = CustomModule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    check_trained(module, "all")
    with pytest.raises(SettingsError, match="has no effect on a custom module"):
        check_trained(module, 1)


@pytest.mark.parametrize("task", ["classify", "sft"])
def test_frozen_weights_keep_their_values_and_cost_no_moments(
    data: dict[str, Path], tmp_path: Path, task: str
) -> None:
    folder = data[parse_choice("tasks", TASKS[task]["task"]).row_layout()]
    first, second = tmp_path / "first", tmp_path / "second"
    attempt(settings(first, folder, task, stop={"steps": 1}), World())
    start = {"path": str(first), "trainable_layers": 1}
    attempt(settings(second, folder, task, stop={"steps": 4}, model=start), World())
    before, after = (load_file(run / "model" / "model.safetensors") for run in (first, second))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    frozen = {name for name in before if "embed" in name or ".0." in name}
    assert changed
    assert frozen
    assert not changed & frozen
    files = (second / "checkpoints").rglob("*.safetensors")
    saved = {name for file in files for name in load_file(file)}
    moments = {name for name in saved if name.startswith("optimizer.exp_avg.")}
    assert {name.removeprefix("optimizer.exp_avg.model.") for name in moments} == changed
    memory, _ = jobs.measure_memory(str(tmp_path / "third"), str(folder), task, {"model": start})
    unfrozen = {"model": {"path": str(first)}}
    whole, _ = jobs.measure_memory(str(tmp_path / "fourth"), str(folder), task, unfrozen)
    moment_bytes = 2 * sum(after[name].numel() * 4 for name in changed)
    assert memory["optimizer_state"] == pytest.approx(moment_bytes, rel=0.01)
    assert whole["optimizer_state"] > memory["optimizer_state"]
