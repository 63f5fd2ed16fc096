"""Reading JSON documents and JSON lines that may be damaged, and opening files in place."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge import config
from regauge.system import files, jsonl, log
from regauge.system.errors import DataError, SettingsError, describe_error
from regauge.system.json_files import (
    CHECKSUM,
    MAX_DEPTH,
    DocumentShape,
    find_json,
    format_compact,
    parse_object,
    read_json,
    write_sealed,
)

REMEDY = "restore it"
ODD: dict[str, Any] = {
    "loss": math.nan,
    "nested": [{"ratio": math.inf, "low": -math.inf}, 1.5],
    "none": None,
    "text": "NaN",
}
"""A document with numbers that JSON lacks."""


class Shape(DocumentShape):
    """A name and counts."""

    name: str
    counts: dict[str, int] = {}


def parse_strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def write_line(path: Path, document: dict[str, Any]) -> None:
    jsonl.append_line(path, document)


WRITERS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "document": files.write_json,
    "sealed": write_sealed,
    "with format": config.save,
    "line": write_line,
}


@pytest.mark.parametrize("name", WRITERS)
def test_numbers_that_json_lacks_are_null_with_their_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / "document"
    WRITERS[name](path, ODD)
    stored = parse_strictly(path.read_text())
    assert (stored["loss"], stored["loss_text"]) == (None, "NaN")
    assert stored["nested"][0] == {
        "ratio": None, "ratio_text": "Infinity", "low": None, "low_text": "-Infinity"
    }  # fmt: skip
    document = parse_object(path.read_bytes())
    assert math.isnan(document["loss"])
    assert document["nested"] == ODD["nested"]
    assert {key for key in document if key != "format"} == set(ODD)


def test_an_answer_is_json_even_with_numbers_that_json_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.print_json({"rows": [ODD]})
    (row,) = parse_strictly(capsys.readouterr().out)["rows"]
    assert (row["loss"], row["loss_text"]) == (None, "NaN")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text().filter(CHECKSUM.__ne__), VALUES))
def test_a_document_is_read_as_it_was_written(document: dict[str, object]) -> None:
    assert repr(parse_object(json.dumps(document))) == repr(json.loads(json.dumps(document)))


@given(st.binary() | st.text().map(str.encode) | VALUES.map(lambda it: json.dumps(it).encode()))
def test_any_bytes_are_an_object_or_damage(content: bytes) -> None:
    try:
        document = parse_object(content)
    except ValueError:
        document = {}
    assert isinstance(document, dict)


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff", "invalid start byte"),
        (b"null", "it contains null, not an object"),
        (b"[]", "it contains [], not an object"),
        (f'{{"{CHECKSUM}": null}}'.encode(), f"its {CHECKSUM} differs"),
        (b"[" * 100_000, f"nested more than {MAX_DEPTH} levels deep"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, f"nested more than {MAX_DEPTH} levels deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_damage_is_one_line_with_the_file_and_the_remedy(
    tmp_path: Path, content: bytes, damage: str
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_json(path, REMEDY)
    assert caught.value.problem.startswith(f"{path} cannot be read: ")
    assert damage in caught.value.problem
    assert caught.value.remedy == REMEDY


def test_the_permitted_depth_is_read() -> None:
    deep = '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH
    assert parse_object(deep)
    with pytest.raises(ValueError, match="levels deep"):
        parse_object('{"a":' + deep + "}")


@pytest.mark.parametrize(
    ("document", "damage"),
    [
        ({}, "'name' is missing"),
        ({"name": 1}, "'name' must be a text, got 1"),
        ({"name": "a", "counts": {"b": "c"}}, "'counts.b' must be an integer, got 'c'"),
    ],
)
def test_another_shape_is_refused_with_its_key(
    tmp_path: Path, document: dict[str, object], damage: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    message = re.escape(f"{path} is damaged: {damage}")
    with pytest.raises(DataError, match=message):
        read_json(path, REMEDY, Shape)


def test_keys_without_a_reader_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"name": "a", "more": [1]}')
    assert read_json(path, REMEDY, Shape) == {"name": "a", "more": [1]}


@pytest.mark.parametrize("name", ["run.json", "missing/run.json", "file/run.json", "link"])
def test_a_missing_file_is_no_damage(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nothing")
    assert find_json(tmp_path / name, REMEDY) is None
    with pytest.raises(DataError, match="is missing; restore it"):
        read_json(tmp_path / name, REMEDY)


def make_special(path: Path, kind: str) -> None:
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("a folder", "it is a folder, not a file"),
        ("a pipe", "it is a pipe, not a file"),
        ("a loop", "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str, damage: str) -> None:
    make_special(tmp_path / "run.json", kind)
    with pytest.raises(DataError, match=f"run.json cannot be read: {damage}; restore it"):
        find_json(tmp_path / "run.json", REMEDY)
    with pytest.raises(DataError, match=f"run.json cannot be read: {damage}; move it away"):
        jsonl.read_lines(tmp_path / "run.json")


def test_damaged_lines_are_skipped_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, warnings = tmp_path / "metrics.jsonl", list[str]()
    lines = [b'{"step": 1}', b"null", b"[]", b"[" * 100_000, b"\xff", b"", b'{"step": 2', b"{}"]
    path.write_bytes(b"\n".join(lines))
    assert jsonl.read_lines(path, warnings=warnings) == [{"step": 1}, {}]
    assert caplog.messages == [f"{path}: 5 damaged or truncated lines ignored"]
    assert warnings == ["metrics.jsonl: 5 damaged or truncated lines ignored"]


def test_lines_of_another_shape_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    for document in ({"attempt": 1, "step": 4}, {"attempt": 1, "step": "4"}, {"step": 1}):
        jsonl.append_line(path, document)
    assert jsonl.read_lines(path, jsonl.StepLine) == [{"attempt": 1, "step": 4}]
    assert jsonl.read_last_line(path, jsonl.StepLine) == {"attempt": 1, "step": 4}
    assert caplog.messages == [f"{path}: 2 damaged or truncated lines ignored"] * 2


def test_whole_lines_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert jsonl.read_lines(tmp_path / "missing") == []
    assert jsonl.read_last_line(tmp_path / "missing") is None
    jsonl.append_line(tmp_path / "a.jsonl", {"a": 1})
    assert jsonl.read_last_line(tmp_path / "a.jsonl") == {"a": 1}
    assert not caplog.messages


OPENS = {
    "append": lambda path: jsonl.append_line(path, {"a": 1}),
    "lock": lambda path: files.hold_lock(path).__enter__(),
    "open": lambda path: os.close(files.open_in_place(path, os.O_WRONLY | os.O_CREAT)),
}


@pytest.mark.parametrize("name", OPENS)
def test_a_link_is_not_followed(tmp_path: Path, name: str) -> None:
    outside, path = tmp_path / "outside", tmp_path / files.LOCK
    outside.write_text("of another user\n")
    path.symlink_to(outside)
    with pytest.raises(SettingsError, match="is a link, not a file; remove it"):
        OPENS[name](path)
    assert outside.read_text() == "of another user\n"
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(SettingsError, match="is a link, not a file; remove it"):
        OPENS[name](path)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("kind", ["a folder", "a pipe"])
@pytest.mark.parametrize("name", OPENS)
def test_what_is_no_file_is_not_opened(tmp_path: Path, name: str, kind: str) -> None:
    make_special(tmp_path / files.LOCK, kind)
    with pytest.raises(SettingsError, match=f"is {kind}, not a file; remove it"):
        OPENS[name](tmp_path / files.LOCK)


def test_a_linked_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    jsonl.append_line(tmp_path / "out" / "metrics.jsonl", {"a": 1})
    assert jsonl.read_lines(tmp_path / "disk" / "metrics.jsonl") == [{"a": 1}]


def test_a_path_of_another_kind_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "LATEST" / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="Is a directory") as caught:
        files.write_atomic(tmp_path / "LATEST", "step-1")
    line, code = describe_error(caught.value)
    assert (line, code) == (
        f"{tmp_path / 'LATEST'} cannot be used: Is a directory; remove it, or name another path",
        2,
    )


def test_a_looping_link_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "out")
    with (
        pytest.raises((SettingsError, OSError, RuntimeError)) as caught,
        files.stage_output(tmp_path / "out"),
    ):
        pass
    line, code = describe_error(caught.value)
    assert code == 2
    assert "--traceback" not in line


@pytest.mark.parametrize("target", ["outside", "nothing"])
def test_a_folder_that_is_overwritten_has_no_links(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "model"
    files.check_own_folder(folder)
    (folder / "document_encoder").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    files.check_own_folder(folder)
    (tmp_path / "outside").write_text("of another user")
    (folder / "document_encoder" / "config.json").symlink_to(tmp_path / target)
    with pytest.raises(SettingsError, match=r"document_encoder/config\.json is a link, not a file"):
        files.check_own_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(SettingsError, match="link is a link, not a file"):
        files.check_own_folder(tmp_path / "link")


@pytest.mark.parametrize("kind", ["a pipe", "a loop"])
def test_a_folder_that_is_copied_has_only_files(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.check_files(tmp_path, REMEDY)
    make_special(tmp_path / "config.json", kind)
    message = "is a pipe, not a file" if kind == "a pipe" else "is missing"
    with pytest.raises(DataError, match=f"config.json {message}; restore it"):
        files.check_files(tmp_path, REMEDY)


def test_a_list_of_numbers_is_one_line() -> None:
    document = {
        "lengths": {"train": [0, 12, -3], "heldout": []},
        "ranges": [[0.5, 1e-7], [2.0, 3.0]],
        "names": ["a", "[\n 1,\n 2\n]"],
        "flags": [True, None],
    }
    text = format_compact(document)
    assert json.loads(text) == document
    assert '"train": [0, 12, -3],' in text
    assert "[0.5, 1e-07]," in text
    assert '"a",\n' in text, "other lists have one line for each entry"
