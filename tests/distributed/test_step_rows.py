"""The rows of a step do not depend on the processes that compute them.

Every rank records the rows of the batches from which it computed gradients.
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
Texts = dict[int, Counter[tuple[int, int]]]
"""The texts (row, part) of every step, with their counts."""
TWO_EPOCHS = {"steps": None, "epochs": 2.0}


@pytest.fixture(scope="module")
def many(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return runs over datasets whose numbers of rows no batch size divides."""
    root = tmp_path_factory.mktemp("many")
    data = {
        "packed": datasets.write_packed(root / "packed", ROWS),
        "pairs": datasets.write_pairs(root / "pairs", ROWS),
    }
    return Runs(tmp_path_factory.mktemp("orders"), data, runs.world)


def rows_by_step(
    runs: Runs, size: int, task: str = "mlm", folder: Path | None = None, **changes: Any
) -> Texts:
    """Return the texts of every step over all ranks."""
    folder = folder or runs.folder(f"{size}-{task}")
    changes = {**BASE, **changes}
    ranks: list[list[Step]] = runs.job("train_recording_rows", size, folder, task, changes)
    assert len(ranks) == size
    assert len({tuple(len(texts) for _, texts in steps) for steps in ranks}) == 1, "ranks differ"
    rows: Texts = {}
    for steps in ranks:
        for step, microbatches in steps:
            texts = [text for texts in microbatches for text in texts if text[0] != PADDING]
            rows.setdefault(step, Counter()).update(texts)
    return rows


@pytest.fixture(scope="module")
def expected_rows(many: Runs) -> dict[str, Texts]:
    return {task: rows_by_step(many, 1, task) for task in ("mlm", "contrastive")}


def test_each_row_occurs_once_in_an_epoch(expected_rows: dict[str, Texts]) -> None:
    for task, parts in (("mlm", 1), ("contrastive", 2)):
        steps = expected_rows[task]
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
def test_rows_do_not_depend_on_world_size_and_workers(
    many: Runs, expected_rows: dict[str, Texts], size: int, workers: int
) -> None:
    rows = rows_by_step(many, size, data={"workers": workers, "prefetch_steps": 1 + workers})
    assert rows == expected_rows["mlm"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_buckets_do_not_change_the_texts_of_a_step(
    many: Runs, expected_rows: dict[str, Texts], size: int
) -> None:
    rows = rows_by_step(many, size, "contrastive", data={"workers": 1})
    assert rows == expected_rows["contrastive"]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 4)])
def test_a_resume_with_another_world_size_continues_with_the_same_rows(
    many: Runs, expected_rows: dict[str, Texts], before: int, after: int
) -> None:
    folder, half = many.folder(f"{before}-then-{after}"), STEPS_PER_EPOCH + 1
    first = rows_by_step(many, before, folder=folder, stop={"steps": half})
    second = rows_by_step(many, after, folder=folder, data={"workers": 1})
    assert sorted(first) == list(range(half))
    assert sorted(second) == list(range(half, 2 * STEPS_PER_EPOCH))
    assert first | second == expected_rows["mlm"]


def test_every_row_occurs_once_across_three_world_sizes(
    many: Runs, expected_rows: dict[str, Texts]
) -> None:
    """Stop at a third and two thirds of the first epoch, with two, one and three processes."""
    folder = many.folder("three-sizes")
    rows: Texts = {}
    for size, steps in ((2, 2), (1, 4), (3, 2 * STEPS_PER_EPOCH)):
        rows |= rows_by_step(many, size, folder=folder, stop={"steps": steps})
    assert rows == expected_rows["mlm"]


def test_two_processes_of_eight_rows_become_one_of_eight(many: Runs) -> None:
    """A global batch of 8 rows needs as many steps on two processes as on one."""
    batch = {"batch": {"rows": 16, "microbatch_rows": 8}, "stop": TWO_EPOCHS}
    two = rows_by_step(many, 2, **batch)
    one = rows_by_step(many, 1, **batch)
    assert len(two) == len(one) == 2 * -(-ROWS // 16)
    assert two == one


@pytest.mark.parametrize("task", ["mlm", "contrastive"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_dataset_smaller_than_one_batch(runs: Runs, size: int, task: str, tmp_path: Path) -> None:
    data = {
        "packed": datasets.write_packed(tmp_path / "a", 3),
        "pairs": datasets.write_pairs(tmp_path / "b", 3),
    }
    (tmp_path / "runs").mkdir()
    few = Runs(tmp_path / "runs", data, runs.world)
    folder = few.folder("few")
    parts = 2 if task == "contrastive" else 1
    rows = rows_by_step(few, size, task, folder=folder, stop=TWO_EPOCHS)
    once = {(row, part): 1 for row in range(3) for part in range(parts)}
    assert rows == {0: once, 1: once}
    measured = [line for line in lines(folder) if "train/loss" in line]
    assert [line["train/epoch"] for line in measured] == [1.0, 2.0]


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_without_held_out_rows_is_not_evaluated(
    runs: Runs, size: int, tmp_path: Path
) -> None:
    data = {"packed": datasets.write_packed(tmp_path / "a", 8, heldout=0)}
    (tmp_path / "runs").mkdir()
    none = Runs(tmp_path / "runs", data, runs.world)
    run_lines = lines(
        none.train_once(size, "mlm", evaluation={"every_steps": 2}, stop={"steps": 4})
    )
    assert [line["step"] for line in run_lines] == [1, 2, 3, 4]
    assert all("train/loss" in line for line in run_lines)
