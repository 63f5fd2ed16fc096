"""`regauge explain` documents names from the settings classes."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, SerializeAsAny

from regauge.commands import _reference, explain
from regauge.commands._reference import build_page
from regauge.config import Settings, choice_of
from regauge.monitoring.trackers import Tracker
from regauge.system import choices
from regauge.system.errors import SettingsError


class Inner(Settings):
    """An inner table."""

    steps: int = Field(default=3, ge=1)
    """Steps to go."""


class Table(Settings):
    """Every type there is."""

    text: str
    """A text."""
    share: float = Field(default=0.5, gt=0, le=1)
    """A share."""
    mode: Literal["a", "b"] = "a"
    """A word."""
    limit: int | None = Field(default=None, ge=1)
    """A limit."""
    some: tuple[str, ...] = ()
    """A list."""
    pair: tuple[float, float] = (0.1, 0.2)
    """A pair."""
    extra: dict[str, Any] = {}
    """A table of anything."""
    inner: Inner = Inner()
    """The inner one."""
    tracker: Annotated[SerializeAsAny[Tracker], choice_of("trackers")] | None = None
    """A choice."""
    trackers: tuple[Annotated[SerializeAsAny[Tracker], choice_of("trackers")], ...] = ()
    """Many choices."""


ROWS = {key.path: key.format_row() for key in _reference.list_keys(Table)}


@pytest.mark.parametrize(
    ("path", "kind", "default"),
    [
        ("text", "text", "required"),
        ("share", "number > 0 and <= 1", "0.5"),
        ("mode", '"a" or "b"', '"a"'),
        ("limit", "integer >= 1", "unset"),
        ("some", "list of text", "[]"),
        ("pair", "[number, number]", "[0.1, 0.2]"),
        ("extra", "table", "{}"),
        ("inner.steps", "integer >= 1", "3"),
        ("tracker", "choice of trackers", "unset"),
        ("trackers", "list of choices of trackers", "[]"),
    ],
)
def test_a_key_has_a_type_and_a_default(path: str, kind: str, default: str) -> None:
    assert ROWS[path]["type"] == kind
    assert ROWS[path]["default"] == default
    assert ROWS[path]["description"]


def test_nested_tables_are_replaced_by_their_keys() -> None:
    expected = {*Table.model_fields, "inner.steps"} - {"inner"}
    assert set(ROWS) == expected


def explain_word(word: str) -> list[dict[str, Any]]:
    return list(explain.main(word, json=True)["matches"])


def test_a_key_of_a_pipeline_is_explained() -> None:
    document = explain_word("pipeline.output.folder")[0]
    assert document["type"] == "text"
    assert document["description"].startswith("Folder with one subfolder per stage")
    assert document["read_by"] == "pipeline"


def test_a_table_shows_its_keys() -> None:
    document = explain_word("stage")[0]
    assert [row["key"] for row in document["keys"]] == ["verb", "name"]


def test_a_verb_shows_its_tables() -> None:
    document = explain_word("pipeline")[0]
    assert document["description"] == choices.summary("verbs", "pipeline")
    tables = {row["table"] for row in document["tables"]}
    assert tables == {"monitoring", "output", "registry", "repeat", "stage"}


def test_a_folder_lists_its_choices() -> None:
    assert "trackers" in _reference.list_folders()
    names = [row["choice"] for row in explain_word("trackers")[0]["choices"]]
    assert tuple(names) == choices.names("trackers")


def test_a_choice_is_explained() -> None:
    assert explain_word("trackers/jsonl")[0]["description"] == choices.summary("trackers", "jsonl")


@pytest.mark.parametrize("code", [0, 1, 2, 64, 65, 66, 67, 68, 69, 75, 76, 129, 130, 131, 143])
def test_an_exit_code_is_explained(code: int) -> None:
    assert explain_word(str(code))[0]["description"].endswith(".")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stge", "nothing is named 'stge'; did you mean 'stage'?"),
        ("pipeline.stge", "nothing is named 'pipeline.stge'"),
        ("99", "no exit code 99; known: 0, 1, 2"),
        ("trackers/jsonnl", "did you mean 'jsonl'?"),
        ("trakers/jsonl", "did you mean 'trackers'?"),
    ],
)
def test_an_unknown_name_is_refused(word: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        explain.main(word)
    assert message in str(caught.value)


def test_without_a_name_every_table_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    overview = explain.main()["matches"][0]
    listed = {row["table"] for row in overview["tables"]}
    assert listed == {
        name for root in _reference.settings_roots().values() for name in root.model_fields
    }
    assert "stage" in capsys.readouterr().out


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    answer = explain.main("stage", json=True)
    assert json.loads(capsys.readouterr().out) == answer


def test_the_reference_page_has_every_key() -> None:
    page = build_page()
    for root in _reference.settings_roots().values():
        for key in _reference.list_keys(root):
            if not key.table:
                assert f"`{key.path}`" in page, key.path
    for folder in _reference.list_folders():
        for name in choices.names(folder):
            assert f"### {folder}/{name}\n" in page
