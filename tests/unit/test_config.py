"""Settings: strict text in, frozen tables out, one line for every mistake."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator

from regauge import config
from regauge.config import Choice, Settings, chosen
from regauge.errors import RegaugeError, SettingsError, plain
from regauge.trackers import Tracker


class Schedule(Settings):
    """An inner table."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps of rising."""


class Optimizer(Settings):
    """A table with a table."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Peak."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decays."""
    schedule: Schedule = Schedule()
    """The inner table."""

    @model_validator(mode="after")
    def _ordered(self) -> Optimizer:
        if self.betas[0] > self.betas[1]:
            raise ValueError("the first beta is the larger one")
        return self


def by_name(value: dict[str, Any]) -> dict[str, Any]:
    """Give a table that stands alone the name "", as `data.settings` does."""
    return value if all(isinstance(item, dict) for item in value.values()) else {"": value}


class Root(Settings):
    """What a verb reads."""

    optimizer: Optimizer = Optimizer()
    """A table."""
    name: str
    """A required key."""
    names: Annotated[dict[str, Schedule], BeforeValidator(by_name)] = {}
    """Tables by name, or one alone."""
    tracker: Annotated[SerializeAsAny[Tracker], chosen("trackers")] | None = None
    """A choice."""
    rows: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """A number, or a word."""
    many: tuple[Schedule, ...] | Schedule = ()
    """A table, or several."""
    counts: dict[str, tuple[int | str, ...]] = {}
    """Lists of one type or another."""
    sizes: dict[Literal["int"], Annotated[int, Field(ge=1)]] = {}
    """A key that is called as a type is."""


def problem(tables: dict[str, Any], *, known: tuple[str, ...] = ()) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        config.build(Root, tables, known, "run.toml")
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_run_file_becomes_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "a"\n[optimizer]\nbetas = [0.1, 0.2]\nlearning_rate = 1.0\n')
    root = config.build(Root, config.read(path))
    assert root.name == "a"
    assert root.optimizer.betas == (0.1, 0.2)
    assert root.optimizer.schedule.warmup_steps == 0


def test_settings_are_frozen() -> None:
    root = config.build(Root, {"name": "a"})
    with pytest.raises(ValidationError):
        root.name = "b"  # type: ignore[misc]


def test_what_was_dumped_builds_the_same() -> None:
    tables = {"name": "a", "tracker": "jsonl", "optimizer": {"schedule": {"warmup_steps": 3}}}
    root = config.build(Root, tables)
    dumped = json.loads(json.dumps(config.dump(root)))
    assert dumped["tracker"]["kind"] == "jsonl"
    assert config.build(Root, dumped) == root


@pytest.mark.parametrize(
    ("tables", "says", "remedy"),
    [
        ({"nam": "a"}, "unknown key 'nam'", "did you mean 'name'?"),
        (
            {"name": "a", "zzz": 1},
            "unknown key 'zzz'",
            "known: counts, many, name, names, optimizer",
        ),
        ({}, "'name' is missing", "set name"),
        (
            {"optimizer": {"learning_rat": 1.0}},
            "unknown key 'optimizer.learning_rat'",
            "did you mean 'learning_rate'?",
        ),
        (
            {"name": "a", "names": {"b": {"warmup": 1}}},
            "unknown key 'names.b.warmup'",
            "did you mean 'warmup_steps'?",
        ),
        (
            {"name": "a", "names": {"warmup": 1}},
            "unknown key 'names.warmup'",
            "did you mean 'warmup_steps'?",
        ),
        (
            {"name": "a", "optimizer": {"learning_rat": 1.0}},
            "unknown key 'optimizer.learning_rat'",
            "did you mean 'learning_rate'?",
        ),
        (
            {"name": "a", "optimizer": {"schedule": {"warmup": 1}}},
            "unknown key 'optimizer.schedule.warmup'",
            "did you mean 'warmup_steps'?",
        ),
        (
            {"name": "a", "optimizer": {"betas": "0.5"}},
            "'optimizer.betas' is a list, got '0.5'",
            'write optimizer.betas = ["0.5"]',
        ),
        ({"name": 3}, "'name': Input should be a valid string, got 3", "correct name"),
        (
            {"name": "a", "optimizer": {"learning_rate": -1.0}},
            "'optimizer.learning_rate': Input should be greater than 0, got -1.0",
            "correct optimizer.learning_rate",
        ),
        (
            {"name": "a", "optimizer": {"betas": [0.5, 0.1]}},
            "'optimizer': the first beta is the larger one",
            "correct optimizer",
        ),
        ({"name": "a", "tracker": "jsonnl"}, "no trackers named 'jsonnl'", "did you mean 'jsonl'?"),
        ({"name": "a", "tracker": {"x": 1}}, "a choice of 'trackers' has no kind", "set kind to"),
        (
            {"name": "a", "tracker": {"kind": 3}},
            "the kind of 'trackers' is a name, got 3",
            "set kind to one of: console",
        ),
        (
            {"name": "a", "tracker": {"kind": {}}},
            "the kind of 'trackers' is a name, got {}",
            "set kind to one of: console",
        ),
        (
            {"name": "a", "rows": 0},
            "'rows': Input should be greater than or equal to 1, got 0",
            "correct rows",
        ),
        (
            {"name": "a", "rows": "all"},
            "'rows': Input should be a valid integer or 'auto', got 'all'",
            "correct rows",
        ),
        (
            {"name": "a", "many": [{}, {"warmup_steps": -1}]},
            "'many.1.warmup_steps': Input should be greater than or equal to 0, got -1",
            "correct many.1.warmup_steps",
        ),
        (
            {"name": "a", "many": {"warmup": 1}},
            "unknown key 'many.warmup'",
            "did you mean 'warmup_steps'?",
        ),
        (
            {"name": "a", "counts": {"b": [1, 0.5]}},
            "'counts.b.1': Input should be a valid integer or a valid string, got 0.5",
            "correct counts.b.1",
        ),
        (
            {"name": "a", "sizes": {"int": 0}},
            "'sizes.int': Input should be greater than or equal to 1, got 0",
            "correct sizes.int",
        ),
        (
            {"name": "a", "sizes": {"str": 1}},
            "'sizes.str': Input should be 'int', got 'str'",
            "correct sizes.str",
        ),
        (
            {"name": "a", "names": {"b": {"warmup_steps": -1}}},
            "'names.b.warmup_steps': Input should be greater than or equal to 0, got -1",
            "correct names.b.warmup_steps",
        ),
    ],
)
def test_a_mistake_is_one_line_with_the_way_out(
    tables: dict[str, Any], says: str, remedy: str
) -> None:
    error = problem(tables)
    assert error.problem == f"run.toml: {says}"
    assert error.remedy.startswith(remedy)
    assert error.exit_code == 2


def test_a_wrong_key_of_a_choice_names_the_choice() -> None:
    error = problem({"name": "a", "tracker": {"kind": "jsonl", "no_such_key": 1}})
    assert error.problem == "run.toml: trackers 'jsonl': unknown key 'no_such_key'"


def test_a_misspelt_key_that_is_required_is_answered() -> None:
    with pytest.raises(SettingsError) as caught:
        config.choose("data/sources", {"kind": "text", "flies": ("a",)})
    assert caught.value.problem == "data/sources 'text': unknown key 'flies'"
    assert caught.value.remedy == "did you mean 'files'?"


def test_tables_of_other_verbs_are_passed_over_by_name() -> None:
    assert config.build(Root, {"name": "a", "serve": {"port": 1}}, ("serve",)).name == "a"
    assert problem({"name": "a", "sreve": {}}, known=("serve",)).remedy == "did you mean 'serve'?"


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a.b=1", {"a": {"b": 1}}),
        ("a.b=1e-3", {"a": {"b": 1e-3}}),
        ("a=[1, 2]", {"a": (1, 2)}),
        ("a=true", {"a": True}),
        ("a=out/x", {"a": "out/x"}),
        ("a=@text", {"a": "@text"}),
        ("a=x=y", {"a": "x=y"}),
        ('a="1"', {"a": "1"}),
        ("a=", {"a": ""}),
    ],
)
def test_an_assignment_is_toml_or_else_text(assignment: str, expected: dict[str, Any]) -> None:
    assert config.override({}, (assignment,)) == expected


@pytest.mark.parametrize("assignment", ["learning_rate", "=3", "name.x=1"])
def test_what_cannot_be_assigned_is_refused(assignment: str) -> None:
    with pytest.raises(SettingsError):
        config.override({"name": "text"}, (assignment,))


def test_an_override_leaves_the_tables_alone() -> None:
    tables = {"a": {"b": 1}}
    assert config.override(tables, ("a.b=2",)) == {"a": {"b": 2}}
    assert tables == {"a": {"b": 1}}


@given(
    st.recursive(
        st.integers() | st.booleans() | st.text(),
        lambda inner: st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
        max_leaves=8,
    )
)
def test_merging_nothing_changes_nothing(value: Any) -> None:
    tables = {"a": value}
    assert config.merge(tables, {}) == tables
    assert config.merge({}, tables) == tables
    assert config.merge(tables, tables) == tables


def test_a_merge_goes_by_leaves_unless_the_kind_changes() -> None:
    below = {"task": {"kind": "mlm", "share": 1}, "data": {"path": "a", "workers": 2}}
    assert config.merge(below, {"data": {"path": "b"}})["data"] == {"path": "b", "workers": 2}
    assert config.merge(below, {"task": {"kind": "mlm"}})["task"] == below["task"]
    assert config.merge(below, {"task": {"kind": "clm"}})["task"] == {"kind": "clm"}
    assert config.merge(below, {"task": "clm"})["task"] == "clm"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.toml", b"a = ", "cannot be read"),
        ("run.toml", b"\xff\xfe", "cannot be read"),
        ("run.json", b"{", "cannot be read"),
        ("run.json", b"[1]", "holds no tables"),
        (".", b"", "is a folder"),
        ("missing.toml", b"", "no run file"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, text: bytes, says: str
) -> None:
    if text:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(SettingsError, match=says) as caught:
        config.read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_saved_document_is_whole_and_has_a_format(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    config.save(path, {"a": 1})
    config.save(path, {"a": 2, "where": tmp_path})
    expected = {"a": 2, "format": config.FORMAT, "where": str(tmp_path)}
    assert json.loads(path.read_text()) == expected
    assert list(tmp_path.iterdir()) == [path]


def test_a_choice_outside_of_a_private_file_has_its_name() -> None:
    class Other(Choice):
        """A choice that is defined here."""

    assert Other.kind == "test-config"


def test_an_error_says_where() -> None:
    error = RegaugeError("it broke", "mend it").within("stage 'a'")
    assert str(error) == "stage 'a': it broke; mend it"
    assert error.problem == "stage 'a': it broke"


def test_the_values_of_a_run_file_are_the_ones_of_toml(tmp_path: Path) -> None:
    text = 'a = [1, [2]]\n[b]\nc = 1979-05-27\nd = "x"\n'
    (tmp_path / "run.toml").write_text(text)
    read = config.read(tmp_path / "run.toml")
    assert read["a"] == (1, (2,))
    assert read["b"] == tomllib.loads(text)["b"]


def test_an_error_is_told_by_its_first_line_or_its_kind() -> None:
    assert plain(ValueError("\n one\n two")) == "one"
    assert plain(ValueError("")) == "ValueError"
