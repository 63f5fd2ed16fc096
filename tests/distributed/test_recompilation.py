"""From its first step on, a compiled run has only the graphs of its declared shapes.

The runs are in separate processes: the compiler starts threads and sets environment variables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.jobs import losses
from distributed.runs import FULL
from distributed.world import World
from regauge.accelerators.cpu import Cpu

pytestmark = pytest.mark.skipif(
    Cpu().compile_obstacle() is not None,
    reason="not proved here: torch.compile needs a C++ compiler",
)
STEPS = 30
CHANGES: dict[str, Any] = {
    "model": {"config": {"num_hidden_layers": 1, "max_position_embeddings": 64}},
    "evaluation": {"every_steps": 10, "microbatch_rows": 5},
    "output": {"checkpoint": {"every_steps": 1000}},
}
NEVER = -1
HEAD = 1
"""Graphs of the loss on logits: one for all lengths."""


def _open_world(size: int) -> Iterator[World]:
    world = World(size)
    yield world
    world.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    yield from _open_world(1)


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    yield from _open_world(2)


@pytest.fixture(scope="module")
def packed_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_packed(tmp_path_factory.mktemp("data") / "packed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_pairs(tmp_path_factory.mktemp("data") / "pairs")


def count_run_graphs(
    alone: World, folder: Path, data: Path, odd_step: int, *, budget: int = 0, steps: int = STEPS
) -> Any:
    execution = {"compile": "blocks", "recompile_budget": budget}
    changes = {**CHANGES, "execution": execution, "stop": {"steps": steps}}
    return alone.run("count_graphs", str(folder), str(data), changes, odd_step)[0]


@pytest.mark.full
def test_nothing_is_compiled_after_the_warm_up(alone: World, data: Path, tmp_path: Path) -> None:
    answer = count_run_graphs(alone, tmp_path, data, NEVER)
    assert (answer["code"], answer["problem"]) == (0, "")
    assert len(answer["counts"]) == STEPS + 1
    assert len(answer["shapes"]) == 2, "one length proves little"
    assert set(answer["counts"]) == {4}, "two lengths, in training and in evaluation"
    assert answer["planned"] == 4


@FULL
def test_nothing_is_compiled_after_a_resume(alone: World, data: Path, tmp_path: Path) -> None:
    """A resumed run is not evaluated before its first step."""
    count_run_graphs(alone, tmp_path, data, NEVER, steps=8)
    answer = count_run_graphs(alone, tmp_path, data, NEVER, steps=12)
    assert (answer["code"], answer["problem"]) == (0, "")
    assert len(answer["counts"]) == 4 + 1
    assert set(answer["counts"]) == {4}


@pytest.mark.full
def test_an_undeclared_shape_ends_the_run_with_an_error(
    alone: World, data: Path, tmp_path: Path
) -> None:
    answer = count_run_graphs(alone, tmp_path, data, 3)
    assert answer["code"] == 66
    length = answer["shapes"][-1][1]
    assert f"in step 4 with shapes [(4, {length})]" in answer["problem"]
    assert answer["counts"][-1] > answer["counts"][0]


@FULL
def test_a_budget_allows_recompilation(alone: World, data: Path, tmp_path: Path) -> None:
    answer = count_run_graphs(alone, tmp_path, data, 3, budget=1)
    assert (answer["code"], answer["problem"]) == (0, "")
    assert set(answer["counts"]) == {4, 5}


@pytest.mark.parametrize(("trial", "kind"), [("pays", "blocks"), ("does not", "off")])
@FULL
def test_auto_compile_is_decided_once_for_all_processes(
    pair: World, packed_dataset: Path, tmp_path: Path, trial: str, kind: str
) -> None:
    changes = {"execution": {"compile": "auto"}, "strategy": "ddp", "stop": {"steps": 2}}
    decisions = pair.run("train_undecided", str(tmp_path), str(packed_dataset), changes, trial)
    one_shape = HEAD + (2 if kind == "blocks" else 1)
    assert decisions == [(kind, one_shape)] * 2, "in training and evaluation; else the one tried"
    assert json.loads((tmp_path / "run.json").read_text())["execution"]["compile"] == kind
    changes["stop"] = {"steps": 3}
    again = pair.run("train_undecided", str(tmp_path), str(packed_dataset), changes, "over")
    assert [decided for decided, _ in again] == [kind] * 2


@pytest.mark.full
def test_a_compiled_run_has_the_losses_of_an_eager_one(
    alone: World, data: Path, tmp_path: Path
) -> None:
    run_losses = []
    for kind in ("off", "blocks"):
        changes = {
            "execution": {"compile": kind},
            "task": {"kind": "contrastive", "max_buckets": 1},
            "model": {"config": {"num_hidden_layers": 1}},
            "stop": {"steps": 6},
        }
        arguments = (str(tmp_path / kind), str(data), "contrastive", changes)
        run_losses.append(losses(alone.run("train_compiled", *arguments)[0]))
    assert len(run_losses[0]) == 6
    assert run_losses[1] == pytest.approx(run_losses[0], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "vector_bits", [pytest.param(None, id="vectors"), pytest.param(1, id="scalars", marks=FULL)]
)
def test_compiled_and_eager_dropout_have_the_same_bits(
    alone: World, vector_bits: int | None
) -> None:
    """CPUs without wide vectors run scalar code; so does the tail of a vectorized loop."""
    assert alone.run("dropout_compiled", vector_bits) == [True]
