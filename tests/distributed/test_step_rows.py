"""Which rows a step sees does not depend on who computes them.

The rows are those of the batches that a step's gradients were really computed from, on every rank.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.jobs import Step, lines
from distributed.runs import Runs, cases
from regauge.data.row_order import PADDING

ROWS = 43
BATCH = 8
STEPS_PER_EPOCH = 6  # the last of them holds three rows
BASE: dict[str, Any] = {
    "stop": {"steps": 2 * STEPS_PER_EPOCH},
    "model": {"config": {"num_hidden_layers": 1}},
    "output": {"checkpoint": {"every_steps": 1000}},
}
TWO_EPOCHS = {"steps": None, "epochs": 2.0}


@pytest.fixture(scope="module")
def many(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return runs over datasets of which no batch size is a divisor."""
    root = tmp_path_factory.mktemp("many")
    data = {
        "packed": datasets.packed(root / "packed", ROWS),
        "pairs": datasets.pairs(root / "pairs", ROWS),
    }
    return Runs(tmp_path_factory.mktemp("orders"), data, runs.world)


def seen(
    runs: Runs, size: int, task: str = "mlm", folder: Path | None = None, **changes: Any
) -> dict[int, Counter[tuple[int, int]]]:
    """Return the texts (row, part) of every step, over all ranks, each as often as it came."""
    folder = folder or runs.folder(f"{size}-{task}")
    ranks: list[list[Step]] = runs.job("watched", size, folder, task, {**BASE, **changes})
    assert len(ranks) == size
    assert len({tuple(len(texts) for _, texts in steps) for steps in ranks}) == 1, "ranks differ"
    found: dict[int, Counter[tuple[int, int]]] = {}
    for steps in ranks:
        for step, microbatches in steps:
            texts = [text for texts in microbatches for text in texts if text[0] != PADDING]
            found.setdefault(step, Counter()).update(texts)
    return found


@pytest.fixture(scope="module")
def expected(many: Runs) -> dict[str, dict[int, Counter[tuple[int, int]]]]:
    return {task: seen(many, 1, task) for task in ("mlm", "contrastive")}


def test_each_row_comes_once_in_an_epoch(
    expected: dict[str, dict[int, Counter[tuple[int, int]]]],
) -> None:
    for task, parts in (("mlm", 1), ("contrastive", 2)):
        steps = expected[task]
        assert sorted(steps) == list(range(2 * STEPS_PER_EPOCH))
        once = {(row, part): 1 for row in range(ROWS) for part in range(parts)}
        epochs = [
            sum((steps[epoch * STEPS_PER_EPOCH + at] for at in range(STEPS_PER_EPOCH)), Counter())
            for epoch in (0, 1)
        ]
        assert epochs == [once, once]
        assert steps[STEPS_PER_EPOCH - 1].total() == (ROWS % BATCH) * parts
        assert steps[0] != steps[STEPS_PER_EPOCH], "the second epoch repeats the order of the first"


@pytest.mark.parametrize(
    ("size", "workers"),
    cases(
        [(1, 1), (1, 3), (2, 0), (2, 1), (2, 3), (3, 0), (3, 3), (4, 0), (4, 1)],
        [(1, 3), (2, 1), (3, 3), (4, 0)],
    ),
)
def test_size_and_workers_do_not_enter(
    many: Runs, expected: dict[str, dict[int, Counter[tuple[int, int]]]], size: int, workers: int
) -> None:
    found = seen(many, size, data={"workers": workers, "prefetch_steps": 1 + workers})
    assert found == expected["mlm"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_pairs_that_are_sorted_by_length_are_the_same_texts(
    many: Runs, expected: dict[str, dict[int, Counter[tuple[int, int]]]], size: int
) -> None:
    assert seen(many, size, "contrastive", data={"workers": 1}) == expected["contrastive"]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 4)])
def test_a_resume_at_another_size_goes_on_with_the_same_rows(
    many: Runs,
    expected: dict[str, dict[int, Counter[tuple[int, int]]]],
    before: int,
    after: int,
) -> None:
    folder, half = many.folder(f"{before}-then-{after}"), STEPS_PER_EPOCH + 1
    first = seen(many, before, folder=folder, stop={"steps": half})
    second = seen(many, after, folder=folder, data={"workers": 1})
    assert sorted(first) == list(range(half))
    assert sorted(second) == list(range(half, 2 * STEPS_PER_EPOCH))
    assert first | second == expected["mlm"]


def test_three_sizes_in_one_epoch_see_every_row_once(
    many: Runs, expected: dict[str, dict[int, Counter[tuple[int, int]]]]
) -> None:
    """Stopped at a third and at two thirds of the first epoch, on two, one and three processes."""
    folder = many.folder("three-sizes")
    found: dict[int, Counter[tuple[int, int]]] = {}
    for size, steps in ((2, 2), (1, 4), (3, 2 * STEPS_PER_EPOCH)):
        found |= seen(many, size, folder=folder, stop={"steps": steps})
    assert found == expected["mlm"]


def test_two_processes_of_eight_rows_become_one_of_eight(many: Runs) -> None:
    """Two of a trainer's processes with 8 rows each take as many steps as one with 8 rows."""
    batch = {"batch": {"rows": 16, "microbatch_rows": 8}, "stop": TWO_EPOCHS}
    two = seen(many, 2, **batch)
    one = seen(many, 1, **batch)
    assert len(two) == len(one) == 2 * -(-ROWS // 16)
    assert two == one


@pytest.mark.parametrize("task", ["mlm", "contrastive"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_dataset_smaller_than_one_batch(runs: Runs, size: int, task: str, tmp_path: Path) -> None:
    data = {
        "packed": datasets.packed(tmp_path / "a", 3),
        "pairs": datasets.pairs(tmp_path / "b", 3),
    }
    (tmp_path / "runs").mkdir()
    few = Runs(tmp_path / "runs", data, runs.world)
    folder = few.folder("few")
    parts = 2 if task == "contrastive" else 1
    found = seen(few, size, task, folder=folder, stop=TWO_EPOCHS)
    once = {(row, part): 1 for row in range(3) for part in range(parts)}
    assert found == {0: once, 1: once}
    measured = [line for line in lines(folder) if "train/loss" in line]
    assert [line["train/epoch"] for line in measured] == [1.0, 2.0]


@pytest.mark.parametrize("size", [1, 3])
def test_without_held_out_rows_the_run_is_trained_and_not_evaluated(
    runs: Runs, size: int, tmp_path: Path
) -> None:
    data = {"packed": datasets.packed(tmp_path / "a", 8, heldout=0)}
    (tmp_path / "runs").mkdir()
    none = Runs(tmp_path / "runs", data, runs.world)
    found = lines(none.trained(size, "mlm", evaluation={"every_steps": 2}, stop={"steps": 4}))
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert all("train/loss" in line for line in found)
