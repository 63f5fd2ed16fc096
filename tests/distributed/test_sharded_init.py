"""Sharded initialization: no process holds the whole model, and the weights are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import datasets
from distributed.jobs import max_difference, read_checksum
from distributed.runs import LLAMA, Runs, cases, strategy_table
from regauge.config import merge
from regauge.models import weights
from regauge.models.architectures import build_model
from regauge.models.settings import Model

STEPS = 10
SHORT: dict[str, Any] = {"stop": {"steps": STEPS}, "output": {"checkpoint": {"every_steps": 1000}}}
SPREAD = [(2, "fsdp"), (2, "shard-grad-op"), (3, "fsdp"), (4, "hsdp")]
LARGE = {
    "model": {
        "config": {
            "hidden_size": 512,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 2048,
        }
    }
}
"""67 million weights, 1 million in the largest."""
ROOM = 24 << 20
"""Memory of a run in addition to weights: batches, sockets, late imports."""


@pytest.mark.parametrize(
    ("task", "size", "strategy"),
    cases(
        [(task, *case) for task in ("mlm", "llama") for case in SPREAD],
        [("llama", 2, "fsdp")],
    ),
)
def test_sharded_initial_weights_equal_unsharded_ones(
    runs: Runs, size: int, strategy: str, task: str, figure: Callable[[str, float], None]
) -> None:
    unsharded = runs.train_once(1, task, strategy="single", **SHORT)
    sharded = runs.train_once(size, task, strategy=strategy_table(strategy), **SHORT)
    assert read_checksum(sharded) == read_checksum(unsharded)
    difference = max_difference(unsharded, sharded)
    figure("sharded initial weights", difference)
    assert difference < 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama in half precision, in several files, like published models."""
    root = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "MAX_FILE_BYTES", 20_000)
        settings = Model(**merge(LLAMA, {"config": {"num_attention_heads": 4}}))
        model, _ = build_model(settings, "causal", datasets.VOCABULARY, seed=11)
        half = [(name, value.to(torch.bfloat16)) for name, value in model.named_parameters()]
        weights.save_model_folder(root / "llama", model.config, half, root)
    assert len(list((root / "llama").glob("*.safetensors"))) > 3
    return root / "llama"


@pytest.mark.parametrize(
    ("size", "strategy"), cases([(2, "ddp"), *SPREAD], [(2, "ddp"), (3, "fsdp")])
)
def test_a_pretrained_folder_is_read_in_shards(
    runs: Runs, folder: Path, size: int, strategy: str, figure: Callable[[str, float], None]
) -> None:
    changes = {**SHORT, "model": {"path": str(folder)}}
    unsharded = runs.train_once(1, "llama", strategy="single", **changes)
    sharded = runs.train_once(size, "llama", strategy=strategy_table(strategy), **changes)
    assert read_checksum(sharded) == read_checksum(unsharded)
    assert read_checksum(unsharded) != read_checksum(
        runs.train_once(1, "llama", strategy="single", **SHORT)
    )
    difference = max_difference(unsharded, sharded)
    figure("sharded pretrained weights", difference)
    assert difference < 1e-6


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_set_up_needs_at_most_the_shards_and_one_weight(
    runs: Runs, strategy: str, figure: Callable[[str, float], None]
) -> None:
    """With `ddp` every process holds the whole model, which exceeds the bound."""
    changes: dict[str, Any] = {"strategy": strategy}
    job = "measure_set_up_memory"
    runs.job(job, 2, runs.folder("first"), "llama", changes)  # a process allocates some memory once
    changes |= LARGE
    ranks = runs.job(job, 2, runs.folder("opened"), "llama", changes)
    for process in ranks:
        assert process["all_weights"] > 3 * ROOM
        bound = process["all_weights"] // 2 + process["largest_weight"] + ROOM
        assert (process["growth"] < bound) == (strategy == "fsdp")
        share = process["growth"] / process["all_weights"]
        figure(f"memory at the start of {strategy}, of the whole", share)


def test_tied_weights_stay_tied_in_shards(runs: Runs) -> None:
    changes = {"strategy": "fsdp"}
    assert all(runs.job("has_tied_shards", 2, runs.folder("tied"), "mlm", changes))


@pytest.mark.parametrize(
    ("size", "strategy", "precision"),
    cases(
        [
            (*case, precision)
            for case in ((1, "single"), (2, "ddp"), (3, "zero1"), (3, "fsdp"), (4, "hsdp"))
            for precision in ("fp32", "bf16")
        ],
        [(1, "single", "bf16"), (2, "ddp", "bf16"), (3, "zero1", "bf16"), (3, "fsdp", "fp32")],
    ),
)
def test_a_dry_run_predicts_the_memory_of_a_process(
    runs: Runs, size: int, strategy: str, precision: str
) -> None:
    changes = {"strategy": strategy, "execution": {"precision": precision}}
    ranks = runs.job("measure_memory", size, runs.folder("holding"), "mlm", changes)
    held, (_, plan) = [memory for memory, _ in ranks], ranks[0]
    fullest = max(held, key=lambda memory: sum(memory.values()))
    expected = plan["memory_gb_per_process"]
    assert {name: count / 1e9 for name, count in fullest.items()} == pytest.approx(
        {name: value for name, value in expected.items() if name != "total"}, abs=1e-6
    )
    assert expected["total"] == pytest.approx(sum(fullest.values()) / 1e9, abs=1e-6)
    noun = "process" if size == 1 else "processes"
    assert plan["strategy"] == f"{strategy} on {size} {noun}, in {precision}"
    assert plan["parameters"] == plan["trained_parameters"] == 29_260
