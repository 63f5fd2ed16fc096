"""Run files become strict, frozen settings; every invalid setting is one line."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    create_model,
    model_validator,
)

from regauge import config
from regauge.config import Choice, Settings, choice_of
from regauge.monitoring.trackers import Tracker
from regauge.system.errors import DataError, RegaugeError, SettingsError, first_line


class Schedule(Settings):
    """An inner table."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps of warmup."""


class Optimizer(Settings):
    """A table with a table."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Peak."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decays."""
    schedule: Schedule = Schedule()
    """The inner table."""

    @model_validator(mode="after")
    def _check_order(self) -> Optimizer:
        if self.betas[0] > self.betas[1]:
            raise ValueError("the first beta is the larger one")
        return self


def by_name(value: dict[str, Any]) -> dict[str, Any]:
    """Give a single table the name "", as `data.settings` does."""
    return value if all(isinstance(item, dict) for item in value.values()) else {"": value}


class Root(Settings):
    """The settings root of a verb."""

    optimizer: Optimizer = Optimizer()
    """A table."""
    name: str
    """A required key."""
    names: Annotated[dict[str, Schedule], BeforeValidator(by_name)] = {}
    """Tables by name, or one alone."""
    tracker: Annotated[SerializeAsAny[Tracker], choice_of("trackers")] | None = None
    """A choice."""
    rows: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """A number, or a word."""
    many: tuple[Schedule, ...] | Schedule = ()
    """A table, or several."""
    counts: dict[str, tuple[int | str, ...]] = {}
    """Lists of one type or another."""
    sizes: dict[Literal["int"], Annotated[int, Field(ge=1)]] = {}
    """A key with the name of a type."""


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


def test_dumped_settings_can_be_built_again() -> None:
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
        ({"name": 3}, "'name' must be a text, got 3", "correct name"),
        (
            {"name": "a", "optimizer": {"learning_rate": -1.0}},
            "'optimizer.learning_rate' must be greater than 0.0, got -1.0",
            "correct optimizer.learning_rate",
        ),
        (
            {"name": "a", "optimizer": {"betas": [0.5, 0.1]}},
            "'optimizer': the first beta is the larger one",
            "correct optimizer",
        ),
        ({"name": "a", "tracker": "jsonnl"}, "no tracker named 'jsonnl'", "did you mean 'jsonl'?"),
        ({"name": "a", "tracker": {"x": 1}}, "the kind of the tracker is missing", "set kind to"),
        (
            {"name": "a", "tracker": {"kind": 3}},
            "the kind of the tracker must be a name, got 3",
            "set kind to one of: console",
        ),
        (
            {"name": "a", "tracker": {"kind": {}}},
            "the kind of the tracker must be a name, got {}",
            "set kind to one of: console",
        ),
        (
            {"name": "a", "rows": 0},
            "'rows' must be at least 1, got 0",
            "correct rows",
        ),
        (
            {"name": "a", "rows": "all"},
            "'rows' must be an integer or 'auto', got 'all'",
            "correct rows",
        ),
        (
            {"name": "a", "many": [{}, {"warmup_steps": -1}]},
            "'many.1.warmup_steps' must be at least 0, got -1",
            "correct many.1.warmup_steps",
        ),
        (
            {"name": "a", "many": {"warmup": 1}},
            "unknown key 'many.warmup'",
            "did you mean 'warmup_steps'?",
        ),
        (
            {"name": "a", "counts": {"b": [1, 0.5]}},
            "'counts.b.1' must be an integer or a text, got 0.5",
            "correct counts.b.1",
        ),
        (
            {"name": "a", "sizes": {"int": 0}},
            "'sizes.int' must be at least 1, got 0",
            "correct sizes.int",
        ),
        (
            {"name": "a", "sizes": {"str": 1}},
            "'sizes.str' must be 'int', got 'str'",
            "correct sizes.str",
        ),
        (
            {"name": "a", "names": {"b": {"warmup_steps": -1}}},
            "'names.b.warmup_steps' must be at least 0, got -1",
            "correct names.b.warmup_steps",
        ),
    ],
)
def test_an_invalid_setting_is_one_line_with_a_remedy(
    tables: dict[str, Any], says: str, remedy: str
) -> None:
    error = problem(tables)
    assert error.problem == f"run.toml: {says}"
    assert error.remedy.startswith(remedy)
    assert error.exit_code == 2


def test_an_unknown_key_of_a_choice_names_the_choice() -> None:
    error = problem({"name": "a", "tracker": {"kind": "jsonl", "no_such_key": 1}})
    assert error.problem == "run.toml: tracker 'jsonl': unknown key 'no_such_key'"


def test_a_misspelled_required_key_is_an_unknown_key() -> None:
    with pytest.raises(SettingsError) as caught:
        config.parse_choice("data/sources", {"kind": "text", "flies": ("a",)})
    assert caught.value.problem == "source 'text': unknown key 'flies'"
    assert caught.value.remedy == "did you mean 'files'?"


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (list[str], ["x"], ["x"]),
        (tuple[str, ...], ["x"], ("x",)),
        (list[list[int]], [[1], [2]], [[1], [2]]),
        (dict[str, list[float]], {"a": [1, 2.5]}, {"a": [1.0, 2.5]}),
        (list[str] | None, ["x"], ["x"]),
        (Path, "a/b", Path("a/b")),
        (list[Path], ["a"], [Path("a")]),
    ],
)
def test_a_field_of_custom_settings_reads_a_list_and_a_path(
    annotation: Any, value: Any, expected: Any
) -> None:
    root = create_model("Custom", __base__=config.Settings, files=(annotation, ...))
    settings = config.build(root, {"files": value})
    assert settings.files == expected  # type: ignore[attr-defined]
    assert config.build(root, config.dump(settings)) == settings
    assert root(files=value) == settings


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (list[str], "x", "'files' is a list, got 'x'; write files = [\"x\"]"),
        (list[int], ["1"], "'files.0' must be an integer, got '1'"),
    ],
)
def test_the_items_of_a_list_are_not_converted(annotation: Any, value: Any, message: str) -> None:
    root = create_model("Custom", __base__=config.Settings, files=(annotation, ...))
    with pytest.raises(SettingsError, match=re.escape(message)):
        config.build(root, {"files": value})


def test_tables_of_other_verbs_are_ignored() -> None:
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
def test_an_override_is_toml_or_text(assignment: str, expected: dict[str, Any]) -> None:
    assert config.apply_overrides({}, (assignment,)) == expected


@pytest.mark.parametrize("assignment", ["learning_rate", "=3", "name.x=1"])
def test_an_invalid_override_is_refused(assignment: str) -> None:
    with pytest.raises(SettingsError):
        config.apply_overrides({"name": "text"}, (assignment,))


def test_an_override_does_not_change_its_input() -> None:
    tables = {"a": {"b": 1}}
    assert config.apply_overrides(tables, ("a.b=2",)) == {"a": {"b": 2}}
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


def test_a_merge_replaces_leaves_or_tables_of_another_kind() -> None:
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
        ("run.json", b"[1]", r"cannot be read: it contains \[1\], not an object"),
        ("run.json", b"[" * 10_000, "nested more than 100 levels deep"),
        ("run.toml", b"a = " + b"[" * 10_000, "cannot be read"),
        ("run.toml", b"a" + b".a" * 200 + b" = 1", "nested more than 100 levels deep"),
        (".", b"", "is a folder"),
        ("missing.toml", b"", "no run file"),
        ("missing", b"", "no file or folder"),
        ("train.csv", b"text,label", r"cannot be read: .*; name a run file \(\.toml or \.json\)"),
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


def test_the_folder_of_a_dataset_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run\.json is missing"):
        config.read_saved_run(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(SettingsError, match="is a dataset or an artifact, not a run"):
        config.read_saved_run(tmp_path)


def test_a_saved_document_has_a_format_version(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    config.save(path, {"a": 1})
    config.save(path, {"a": 2, "where": tmp_path})
    expected = {"a": 2, "format": config.FORMAT, "where": str(tmp_path)}
    assert json.loads(path.read_text()) == expected
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"format": config.FORMAT - 1}, "an earlier Regauge (format 1); make it again"),
        ({"format": config.FORMAT + 1}, "a later Regauge (format 3); install the Regauge"),
        ({"format": "2"}, "a.json has no format version; make it again"),
        ({}, "a.json has no format version; make it again"),
        ([], "a.json has no format version; make it again"),
    ],
)
def test_another_format_is_refused_with_the_remedy(document: Any, message: str) -> None:
    config.check_format({"format": config.FORMAT}, Path("a.json"), "make it again")
    with pytest.raises(DataError) as caught:
        config.check_format(document, Path("a.json"), "make it again")
    assert message in str(caught.value)


def test_a_leading_tilde_is_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.toml").write_text("a = '~/x'\nb = ['~/*.txt', '~', 'a~/b']", encoding="utf-8")
    tables = config.read("~/run.toml")
    assert tables == {"a": f"{tmp_path}/x", "b": (f"{tmp_path}/*.txt", "~", "a~/b")}
    assert config.apply_overrides({}, ("a.b=~/y",)) == {"a": {"b": f"{tmp_path}/y"}}


def test_a_choice_has_the_name_of_its_file() -> None:
    class Other(Choice):
        """A choice that is defined here."""

    assert Other.kind == "test-config"


def test_an_error_contains_its_location() -> None:
    error = RegaugeError("it broke", "fix it").add_location("stage 'a'")
    assert str(error) == "stage 'a': it broke; fix it"
    assert error.problem == "stage 'a': it broke"


def test_a_run_file_has_the_values_of_toml(tmp_path: Path) -> None:
    text = 'a = [1, [2]]\n[b]\nc = 1979-05-27\nd = "x"\n'
    (tmp_path / "run.toml").write_text(text)
    read = config.read(tmp_path / "run.toml")
    assert read["a"] == (1, (2,))
    assert read["b"] == tomllib.loads(text)["b"]


def test_the_first_line_of_an_error_is_its_message_or_its_type() -> None:
    assert first_line(ValueError("\n one\n two")) == "one"
    assert first_line(ValueError("")) == "ValueError"
