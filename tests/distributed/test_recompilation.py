"""A compiled run has the graphs of its declared shapes, and no other, from its first step on.

In a process of its own: the compiler starts threads and sets environment variables.
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
    Cpu().obstacle_to_compiling() is not None,
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
"""Graphs of what gives logits their gradients: one for all lengths."""


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.packed(tmp_path_factory.mktemp("data") / "packed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.pairs(tmp_path_factory.mktemp("data") / "pairs")


def compiled(
    alone: World,
    folder: Path,
    data: Path,
    odd_step: int,
    *,
    budget: int = 0,
    steps: int = STEPS,
) -> Any:
    execution = {"compile": "blocks", "recompile_budget": budget}
    changes = {**CHANGES, "execution": execution, "stop": {"steps": steps}}
    return alone.run("compiled", str(folder), str(data), changes, odd_step)[0]


def test_nothing_is_compiled_after_the_warm_up(alone: World, data: Path, tmp_path: Path) -> None:
    found = compiled(alone, tmp_path, data, NEVER)
    assert (found["code"], found["problem"]) == (0, "")
    assert len(found["counts"]) == STEPS + 1
    assert len(found["shapes"]) == 2, "a ladder of one length proves little"
    assert set(found["counts"]) == {4}, "two lengths, in training and in evaluation"
    assert found["planned"] == 4


@FULL
def test_nor_is_it_after_a_resume(alone: World, data: Path, tmp_path: Path) -> None:
    """A resumed run is not evaluated before its first step."""
    compiled(alone, tmp_path, data, NEVER, steps=8)
    found = compiled(alone, tmp_path, data, NEVER, steps=12)
    assert (found["code"], found["problem"]) == (0, "")
    assert len(found["counts"]) == 4 + 1
    assert set(found["counts"]) == {4}


def test_an_undeclared_shape_ends_the_run_and_is_named(
    alone: World, data: Path, tmp_path: Path
) -> None:
    found = compiled(alone, tmp_path, data, 3)
    assert found["code"] == 66
    length = found["shapes"][-1][1]
    assert f"in step 4 with shapes [(4, {length})]" in found["problem"]
    assert found["counts"][-1] > found["counts"][0]


@FULL
def test_a_budget_lets_it_go_on(alone: World, data: Path, tmp_path: Path) -> None:
    found = compiled(alone, tmp_path, data, 3, budget=1)
    assert (found["code"], found["problem"]) == (0, "")
    assert set(found["counts"]) == {4, 5}


@pytest.mark.parametrize(
    ("trial", "kind"), [pytest.param("pays", "blocks", marks=FULL), ("does not", "no")]
)
def test_what_is_left_open_is_tried_once_and_all_processes_decide_alike(
    pair: World, packed: Path, tmp_path: Path, trial: str, kind: str
) -> None:
    changes = {"execution": {"compile": "auto"}, "strategy": "ddp", "stop": {"steps": 2}}
    found = pair.run("train_undecided", str(tmp_path), str(packed), changes, trial)
    one_shape = HEAD + (2 if kind == "blocks" else 1)
    assert found == [(kind, one_shape)] * 2, "in training and evaluation; else the one tried"
    assert json.loads((tmp_path / "run.json").read_text())["execution"]["compile"] == kind
    changes["stop"] = {"steps": 3}
    again = pair.run("train_undecided", str(tmp_path), str(packed), changes, "over")
    assert [decided for decided, _ in again] == [kind] * 2


def test_a_compiled_run_has_the_losses_of_an_eager_one(
    alone: World, data: Path, tmp_path: Path
) -> None:
    found = []
    for kind in ("no", "blocks"):
        changes = {
            "execution": {"compile": kind},
            "task": {"kind": "contrastive", "shapes": 1},
            "model": {"config": {"num_hidden_layers": 1}},
            "stop": {"steps": 6},
        }
        arguments = (str(tmp_path / kind), str(data), "contrastive", changes)
        found.append(losses(alone.run("train_compiled", *arguments)[0]))
    assert len(found[0]) == 6
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize(
    "vector_bits", [pytest.param(None, id="vectors"), pytest.param(1, id="scalars", marks=FULL)]
)
def test_compiled_and_eager_dropout_have_the_same_bits(
    alone: World, vector_bits: int | None
) -> None:
    """Scalar code is what a processor without wide vectors runs, and the tail of a loop."""
    assert alone.run("dropout_compiled", vector_bits) == [True]
