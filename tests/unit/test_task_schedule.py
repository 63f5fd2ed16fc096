"""Whose step it is: by weights, a function of the step; and how a run file says several tasks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge import config
from regauge.config import build, dump
from regauge.errors import SettingsError
from regauge.training.settings import Training
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


def asked(*tasks: dict[str, Any], **more: Any) -> Training:
    return build(Training, {**BASE, **more, "task": tasks})


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=5), steps=st.integers(0, 200))
def test_a_task_has_its_share_of_every_stretch_of_steps(weights: list[int], steps: int) -> None:
    turns = TaskSchedule(weights)
    given_to = [0] * len(weights)
    for step in range(steps):
        turn = turns.task_at(step)
        assert turn.step == given_to[turn.task], "its own steps are counted without a gap"
        given_to[turn.task] += 1
        for weight, count in zip(weights, given_to, strict=True):
            assert abs(count - weight * (step + 1) / sum(weights)) < len(weights)
    for rounds in (1, 7):
        ends = [turns.task_at(rounds * sum(weights) + place) for place in range(sum(weights))]
        for task, weight in enumerate(weights):
            own = [turn.step for turn in ends if turn.task == task]
            assert own == list(range(rounds * weight, (rounds + 1) * weight))


def test_one_task_has_every_step() -> None:
    turns = TaskSchedule([3])
    assert [turns.task_at(step) for step in (0, 5, 100)] == [(0, 0), (0, 5), (0, 100)]
    assert turns.steps_per_epoch(7) == 7


def test_an_epoch_is_that_of_the_first_task() -> None:
    assert TaskSchedule([2, 1]).steps_per_epoch(10) == 15
    assert TaskSchedule([1, 3]).steps_per_epoch(10) == 40


def test_a_task_has_the_rows_and_the_batch_of_the_run_but_where_it_says_others() -> None:
    search, words = asked(SEARCH, WORDS).task_configs
    assert (search.name, search.weight, search.data.path) == ("search", 2, "pairs")
    assert (words.name, words.weight, words.data.path) == ("words", 1, "packed")
    assert words.data.workers == 3
    assert (search.batch.rows, words.batch.rows, words.batch.microbatch_rows) == (8, 4, 2)
    (alone,) = build(Training, {**BASE, "task": {"kind": "mlm"}}).task_configs
    assert (alone.name, alone.data.path, alone.batch.rows) == ("", "pairs", 8)


def test_what_a_run_saves_of_its_tasks_it_takes_back() -> None:
    settings = asked(SEARCH, WORDS)
    assert build(Training, dump(settings)) == settings


def test_the_command_line_names_a_task() -> None:
    tables = config.override({**BASE, "task": (SEARCH, WORDS)}, ("task.words.weight=5",))
    assert [aim.weight for aim in build(Training, tables).task_configs] == [2, 5]
    for wrong, said in {
        "task.weight=5": "name one of them: search, words",
        "task.wrods.weight=5": "'wrods' in 'task.wrods.weight' is no table",
    }.items():
        with pytest.raises(SettingsError, match=said):
            config.override(tables, (wrong,))


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ((SEARCH, {**WORDS, "name": "search"}), "two tasks are named 'search'"),
        (({"kind": "mlm"}, SEARCH), "task 1: 'name' is missing"),
        ((SEARCH, {**WORDS, "masks": 1}), "task words: tasks 'mlm': unknown key 'masks'"),
        ((SEARCH, {**WORDS, "kind": "mlmm"}), "task words: no tasks named 'mlmm'; did you mean"),
        ((SEARCH, {**WORDS, "weight": 0}), "task words: 'weight'"),
        ((SEARCH, {**WORDS, "batch": {"rows": 3}}), "task words: .*not divisible"),
        ((SEARCH, {**WORDS, "name": "a.b"}), "task a.b: 'name'"),
        ((SEARCH, {"name": "words"}), "task words: a choice of 'tasks' has no kind"),
        ((), "a run has a task"),
    ],
)
def test_what_is_wrong_with_a_task_is_said_with_its_name(
    tasks: tuple[dict[str, Any], ...], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        asked(*tasks)


def test_adapters_are_for_one_task() -> None:
    with pytest.raises(SettingsError, match=r"leave model\.lora out"):
        asked(SEARCH, WORDS, model={"architecture": "bert", "lora": {"rank": 2}})
