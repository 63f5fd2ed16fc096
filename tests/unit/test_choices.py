"""A folder is a registry: each file is a choice with the name of the file."""

from __future__ import annotations

import pytest

from regauge.system import choices
from regauge.system.errors import SettingsError

FOLDERS = {
    **{name: name for name in ("accelerators", "tasks", "data/sources", "data/layouts")},
    **choices.LOCATIONS,
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_choice_names_are_the_file_names(folder: str) -> None:
    stems = {path.stem for path in (choices.PACKAGE / FOLDERS[folder]).glob("*.py")}
    expected = {stem.rstrip("_").replace("_", "-") for stem in stems if not stem.startswith("_")}
    assert set(choices.names(folder)) == expected
    assert list(choices.names(folder)) == sorted(expected)
    assert expected


def test_a_choice_name_is_resolved_to_its_module() -> None:
    assert choices.module_name("data/sources", "python-docs") == "regauge.data.sources.python_docs"
    assert choices.module_name("tasks", "clm") == "regauge.tasks.clm"


def test_a_choice_is_the_class_of_its_file() -> None:
    choice = choices.load("trackers", "jsonl")
    assert choice.__module__ == "regauge.monitoring.trackers.jsonl"
    assert choice.kind == "jsonl"


def test_an_unknown_name_is_refused_with_the_closest_name() -> None:
    with pytest.raises(SettingsError) as caught:
        choices.load("trackers", "jsonlines")
    assert str(caught.value) == "no tracker named 'jsonlines'; did you mean 'jsonl'?"


def test_a_summary_is_read_without_importing() -> None:
    assert choices.summary("verbs", "pipeline").startswith("Run several verbs")


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("lern", "did you mean 'learn'?"),
        ("TE", "did you mean 'teach'?"),
        ("zzz", "known: learn, teach"),
    ],
)
def test_the_closest_name_is_suggested(word: str, remedy: str) -> None:
    assert choices.did_you_mean(word, ("teach", "learn")) == remedy


def test_names_that_begin_with_the_word_are_closer_than_similar_ones() -> None:
    chips = (
        "GH200",
        "H100-SXM-80GB",
        "H100-PCIe-80GB",
        "T4",
        "TPUv4",
        "TPUv5e",
        "TPUv5p",
        "TPUv6e",
    )
    assert (
        choices.did_you_mean("h100", chips) == "did you mean 'H100-SXM-80GB' or 'H100-PCIe-80GB'?"
    )
    assert choices.did_you_mean("tpuv", chips) == "did you mean 'TPUv4'?", "the closest of four"
    assert choices.did_you_mean("nam", ("names", "name")) == "did you mean 'name'?"
