"""A model that is spread never lies whole in one process, and begins with the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import datasets
from distributed.jobs import lines, losses
from distributed.runs import Runs, cases, named
from regauge.models import weights as folders
from regauge.models.architectures import build
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
"""For what a session is made of beside weights: batches, sockets, what is imported late."""


def digest(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["run"]["weights"])


def apart(ours: Path, theirs: Path) -> float:
    """Return the largest relative difference of the losses of two runs."""
    pairs = zip(losses(lines(ours)), losses(lines(theirs)), strict=True)
    return max(abs(a - b) / a for a, b in pairs)


@pytest.mark.parametrize(
    ("task", "size", "strategy"),
    cases(
        [(task, *case) for task in ("mlm", "llama") for case in SPREAD],
        [("mlm", 4, "hsdp"), ("llama", 2, "fsdp")],
    ),
)
def test_a_spread_model_begins_as_a_whole_one(
    runs: Runs, size: int, strategy: str, task: str, figure: Callable[[str, float], None]
) -> None:
    alone = runs.trained(1, task, strategy="single", **SHORT)
    spread = runs.trained(size, task, strategy=named(strategy), **SHORT)
    assert digest(spread) == digest(alone)
    found = apart(alone, spread)
    figure("first weights spread", found)
    assert found < 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama in several files, in half precision, as they are published."""
    root = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "LARGEST_FILE", 20_000)
        settings = Model(
            architecture="llama",
            config={
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 64,
                "max_position_embeddings": 32,
            },
        )
        model, _ = build(settings, "causal", datasets.VOCABULARY, seed=11)
        half = [(name, value.to(torch.bfloat16)) for name, value in model.named_parameters()]
        folders.save(root / "llama", model.config, half, root)
    assert len(list((root / "llama").glob("*.safetensors"))) > 3
    return root / "llama"


@pytest.mark.parametrize(
    ("size", "strategy"), cases([(2, "ddp"), *SPREAD], [(2, "ddp"), (3, "fsdp")])
)
def test_a_published_folder_is_read_in_shards(
    runs: Runs, folder: Path, size: int, strategy: str, figure: Callable[[str, float], None]
) -> None:
    own = {**SHORT, "model": {"path": str(folder)}}
    alone = runs.trained(1, "llama", strategy="single", **own)
    spread = runs.trained(size, "llama", strategy=named(strategy), **own)
    assert digest(spread) == digest(alone)
    assert digest(alone) != digest(runs.trained(1, "llama", strategy="single", **SHORT))
    found = apart(alone, spread)
    figure("published weights spread", found)
    assert found < 1e-6


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_no_process_holds_more_than_its_share_and_one_weight(
    runs: Runs, strategy: str, figure: Callable[[str, float], None]
) -> None:
    """The strategy that repeats the model shows that a whole one would break the bound."""
    changes: dict[str, Any] = {"strategy": strategy}
    runs.job("opened", 2, runs.folder("first"), "llama", changes)  # what comes once in a process
    changes |= LARGE
    found = runs.job("opened", 2, runs.folder("opened"), "llama", changes)
    for process in found:
        assert process["whole"] > 3 * ROOM
        bound = process["whole"] // 2 + process["largest"] + ROOM
        assert (process["most"] < bound) == (strategy == "fsdp")
        figure(
            f"memory at the start of {strategy}, of the whole", process["most"] / process["whole"]
        )


def test_a_tie_holds_in_shards(runs: Runs) -> None:
    assert runs.job("tied", 2, runs.folder("tied"), "mlm", {"strategy": "fsdp"}) == [True, True]


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
def test_a_dry_run_says_what_the_fullest_process_will_hold(
    runs: Runs, size: int, strategy: str, precision: str
) -> None:
    changes = {"strategy": strategy, "execution": {"precision": precision}}
    found = runs.job("holding", size, runs.folder("holding"), "mlm", changes)
    held, (_, told) = [each for each, _ in found], found[0]
    fullest = max(held, key=lambda each: sum(each.values()))
    expected = told["gigabytes_per_process"]
    assert {name: count / 1e9 for name, count in fullest.items()} == pytest.approx(
        {name: value for name, value in expected.items() if name != "all"}, abs=1e-6
    )
    assert expected["all"] == pytest.approx(sum(fullest.values()) / 1e9, abs=1e-6)
    assert told["strategy"] == f"{strategy} over {size} processes, in {precision}"
    assert told["parameters"] == told["trained_parameters"] == 29_260
