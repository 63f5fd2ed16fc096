"""Small shapes of a rehearsal, and the comparison of its two runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from architecture.tree import ROOT
from regauge import config
from regauge.commands import table_names
from regauge.jobs.rehearsal import compute_max_difference
from regauge.jobs.small_run import shrink_tables
from regauge.training.settings import TrainSettings

RUN_FILES = ("llama2-7b", "llama2-13b", "llama2-70b", "travel")
OUTPUT = Path("/rehearsal/output")


@pytest.mark.parametrize("name", RUN_FILES)
def test_the_small_run_of_an_example_is_valid(name: str) -> None:
    path = ROOT / "runs" / f"{name}.toml"
    tables = config.read(path)
    small = shrink_tables(tables, OUTPUT)
    settings = config.build(TrainSettings, small, table_names(), str(path))
    assert settings.output.folder == str(OUTPUT)
    assert settings.stop.steps == 40
    assert [config_.batch.rows for config_ in settings.task_configs] == [8] * len(
        settings.task_configs
    )
    assert settings.execution.precision == "fp32"
    assert settings.accelerator is not None
    assert settings.accelerator.kind == "cpu"
    assert config.dump(settings)["task"] == config.dump(
        config.build(TrainSettings, tables, table_names(), str(path))
    )["task"] or isinstance(settings.task, tuple)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {
                "hidden_size": 4096,
                "num_hidden_layers": 80,
                "vocab_size": 32000,
                "hidden_act": "silu",
            },
            {
                "hidden_size": 64,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "vocab_size": 32000,
                "hidden_act": "silu",
            },
        ),
        (
            {"hidden_size": 32, "num_attention_heads": 4, "head_dim": None},
            {"hidden_size": 32, "num_attention_heads": 2, "head_dim": None},
        ),
        ({"n_embd": 768, "n_layer": 12}, {"n_embd": 64, "n_head": 2, "n_layer": 2}),
        ({}, {}),
    ],
)
def test_sizes_of_a_model_only_fall(sizes: dict[str, Any], expected: dict[str, Any]) -> None:
    model = {"architecture": "x", "config": sizes}
    assert shrink_tables({"model": model}, OUTPUT)["model"]["config"] == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, 1), (2, 2), (16, 2), ("4", 2), ("1:4", "1:2"), ("2:4", 2), ("1:1", 1)],
)
def test_a_rehearsal_has_at_most_two_nodes(count: int | str, expected: int | str) -> None:
    tables = {"execution": {"nodes": {"count": count, "endpoint": "a:1"}}}
    assert shrink_tables(tables, OUTPUT)["execution"]["nodes"]["count"] == expected


def test_what_costs_or_leaves_the_machine_is_removed() -> None:
    tables: config.Tables = {
        "output": {"folder": "out", "trackers": ["wandb"], "checkpoint": {"remote": "s3://a"}},
        "execution": {
            "supervision": {"spot_notices": "ec2"},
        },
        "stop": {"epochs": 3.0, "usd": 100.0, "patience": 2},
        "evaluation": {"samples": {"prompts": 100}},
        "strategy": {"kind": "hsdp", "shards": 8},
        "profile": True,
        "launch": {"name": "a"},
    }
    small = shrink_tables(tables, OUTPUT)
    text = str(small)
    for word in ("wandb", "s3://", "ec2", "usd", "samples", "hsdp", "profile", "launch"):
        assert word not in text
    assert "fsdp" in str(shrink_tables({"strategy": "fsdp"}, OUTPUT))


def write_model(folder: Path, **tensors: Any) -> Path:
    folder.mkdir()
    arrays = {name: np.array(values, np.float32) for name, values in tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("tensors", "difference"),
    [
        ({"a": [1, -2], "b": [0, 0]}, 0.0),
        ({"a": [1, -2.5], "b": [0, 0]}, 0.25),
        ({"a": [1, -2]}, math.inf),
        ({"a": [1, -2, 3], "b": [0, 0]}, math.inf),
    ],
)
def test_the_difference_of_weights_is_relative(
    tmp_path: Path, tensors: dict[str, Any], difference: float
) -> None:
    first = write_model(tmp_path / "first", a=[1, -2], b=[0, 0])
    assert compute_max_difference(first, write_model(tmp_path / "second", **tensors)) == difference


def test_a_model_without_weights_differs(tmp_path: Path) -> None:
    first = write_model(tmp_path / "first", a=[1])
    assert compute_max_difference(tmp_path / "none", first) == math.inf
    assert compute_max_difference(tmp_path / "none", tmp_path / "none") == math.inf
