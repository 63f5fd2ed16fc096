"""The task of each step, by weights; and the `[[task]]` tables of a run file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge import config
from regauge.config import build, dump
from regauge.system.errors import SettingsError
from regauge.training.settings import TrainSettings
from regauge.training.task_schedule import TaskSchedule

BASE: dict[str, Any] = {
    "output": {"folder": "out"},
    "data": {"path": "pairs", "workers": 3},
    "model": {"architecture": "bert"},
    "batch": {"rows": 8, "microbatch_rows": 2},
    "stop": {"steps": 3},
}
SEARCH = {"name": "search", "kind": "contrastive", "weight": 2}
WORDS = {"name": "words", "kind": "mlm", "data": {"path": "packed"}, "batch": {"rows": 4}}


def build_settings(*tasks: dict[str, Any], **more: Any) -> TrainSettings:
    return build(TrainSettings, {**BASE, **more, "task": tasks})


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=5), steps=st.integers(0, 200))
def test_steps_are_shared_evenly_by_weight(weights: list[int], steps: int) -> None:
    schedule = TaskSchedule(weights)
    step_counts = [0] * len(weights)
    for step in range(steps):
        task_step = schedule.task_at(step)
        assert task_step.step == step_counts[task_step.task], (
            "the steps of a task are counted without a gap"
        )
        step_counts[task_step.task] += 1
        for weight, count in zip(weights, step_counts, strict=True):
            assert abs(count - weight * (step + 1) / sum(weights)) < len(weights)
    for rounds in (1, 7):
        last_steps = [
            schedule.task_at(rounds * sum(weights) + position) for position in range(sum(weights))
        ]
        for task, weight in enumerate(weights):
            task_steps = [task_step.step for task_step in last_steps if task_step.task == task]
            assert task_steps == list(range(rounds * weight, (rounds + 1) * weight))


def test_a_single_task_has_every_step() -> None:
    schedule = TaskSchedule([3])
    assert [schedule.task_at(step) for step in (0, 5, 100)] == [(0, 0), (0, 5), (0, 100)]
    assert schedule.steps_per_epoch(7) == 7


def test_an_epoch_is_a_pass_of_the_first_task() -> None:
    assert TaskSchedule([2, 1]).steps_per_epoch(10) == 15
    assert TaskSchedule([1, 3]).steps_per_epoch(10) == 40


def test_a_task_inherits_data_and_batch_of_the_run() -> None:
    search, words = build_settings(SEARCH, WORDS).task_configs
    assert (search.name, search.weight, search.data.path) == ("search", 2, "pairs")
    assert (words.name, words.weight, words.data.path) == ("words", 1, "packed")
    assert words.data.workers == 3
    assert (search.batch.rows, words.batch.rows, words.batch.microbatch_rows) == (8, 4, 2)
    (alone,) = build(TrainSettings, {**BASE, "task": {"kind": "mlm"}}).task_configs
    assert (alone.name, alone.data.path, alone.batch.rows) == ("", "pairs", 8)


def test_saved_task_tables_can_be_read_again() -> None:
    settings = build_settings(SEARCH, WORDS)
    assert build(TrainSettings, dump(settings)) == settings


def test_the_command_line_names_a_task() -> None:
    tables = config.apply_overrides({**BASE, "task": (SEARCH, WORDS)}, ("task.words.weight=5",))
    assert [aim.weight for aim in build(TrainSettings, tables).task_configs] == [2, 5]
    for wrong, message in {
        "task.weight=5": "name one of them: search, words",
        "task.wrods.weight=5": "'wrods' in 'task.wrods.weight' is not a table",
    }.items():
        with pytest.raises(SettingsError, match=message):
            config.apply_overrides(tables, (wrong,))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((SEARCH, {**WORDS, "name": "search"}), "two tasks are named 'search'"),
        (({"kind": "mlm"}, SEARCH), "task 1: 'name' is missing"),
        ((SEARCH, {**WORDS, "masks": 1}), "task words: task 'mlm': unknown key 'masks'"),
        ((SEARCH, {**WORDS, "kind": "mlmm"}), "task words: no task named 'mlmm'; did you mean"),
        ((SEARCH, {**WORDS, "weight": 0}), "task words: 'weight'"),
        ((SEARCH, {**WORDS, "batch": {"rows": 3}}), "task words: .*not divisible"),
        ((SEARCH, {**WORDS, "name": "a.b"}), "task a.b: 'name'"),
        ((SEARCH, {"name": "words"}), "task words: the kind of the task is missing"),
        ((), "a run needs a task"),
    ],
)
def test_errors_of_a_task_contain_its_name(tasks: tuple[dict[str, Any], ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_settings(*tasks)


def test_adapters_need_a_single_task() -> None:
    with pytest.raises(SettingsError, match=r"leave model\.lora out"):
        build_settings(SEARCH, WORDS, model={"architecture": "bert", "lora": {"rank": 2}})
