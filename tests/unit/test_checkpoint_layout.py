"""Checkpoint folders: whole or not there, and what is damaged is found."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from regauge.checkpoint import layout
from regauge.checkpoint.layout import BEST, LATEST, MANIFEST, STATE, name_of
from regauge.files import write_json

TENSORS = "shard-00001-model-00001-of-00001.safetensors"


def saved(root: Path, step: int, text: str = "weights") -> Path:
    part = layout.part_of(root, step)
    part.mkdir(parents=True)
    (part / TENSORS).write_text(text * 100)
    write_json(part / STATE, {"step": step})
    return layout.commit(
        root, step, {name: layout.digest(part / name) for name in (TENSORS, STATE)}
    )


def test_a_commit_leaves_one_whole_folder(tmp_path: Path) -> None:
    path = saved(tmp_path, 4)
    assert path == tmp_path / "step-00000004"
    assert sorted(item.name for item in tmp_path.iterdir()) == [LATEST, path.name]
    assert (tmp_path / LATEST).read_text() == "step-00000004\n"
    assert layout.damage(path) is None
    assert layout.read_state(path) == {"step": 4}
    assert json.loads((path / MANIFEST).read_text())["format"] == 1


def test_processes_that_write_one_document_at_once_are_not_in_each_others_way(
    tmp_path: Path,
) -> None:
    path, together = tmp_path / "found.json", Barrier(8, timeout=30)

    def write(number: int) -> None:
        for _ in range(20):
            together.wait()
            write_json(path, {"by": number})

    with ThreadPoolExecutor(8) as pool:
        for ended in [pool.submit(write, number) for number in range(8)]:
            ended.result()
    assert json.loads(path.read_text())["by"] in range(8)
    assert list(tmp_path.iterdir()) == [path]


def test_steps_are_told_newest_first_and_strangers_are_not(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        saved(tmp_path, step)
    (tmp_path / "step-notes").mkdir()
    layout.part_of(tmp_path, 11).mkdir()
    assert layout.steps(tmp_path) == [10, 9, 2]
    assert (tmp_path / LATEST).read_text() == "step-00000009\n"


def flip(path: Path) -> None:
    data = bytearray((path / TENSORS).read_bytes())
    data[17] ^= 1
    (path / TENSORS).write_bytes(data)


def link(path: Path) -> None:
    shutil.move(path / TENSORS, path.parent / "elsewhere")
    (path / TENSORS).symlink_to(path.parent / "elsewhere")


def rename(path: Path) -> None:
    (path / TENSORS).rename(path / "b.safetensors")


def lists(path: Path) -> None:
    (path / MANIFEST).write_text("[1]")


def deep(path: Path) -> None:
    (path / MANIFEST).write_text("[" * 100_000)


def huge(path: Path) -> None:
    with (path / STATE).open("wb") as file:
        file.truncate(layout.DOCUMENT_BYTES + 1)


def outside(path: Path) -> None:
    (path.parent / "elsewhere").write_text("w")
    document = json.loads((path / MANIFEST).read_text())
    document["files"]["../elsewhere"] = layout.digest(path.parent / "elsewhere")
    (path / MANIFEST).write_text(json.dumps(document))


def later(path: Path) -> None:
    document = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**document, "format": 2}))


DAMAGES = {
    "a flipped bit": (flip, "is not what it was when it was saved"),
    "a torn file": (lambda path: (path / TENSORS).write_text("w"), "is not what it was"),
    "a missing file": (lambda path: (path / TENSORS).unlink(), "is missing"),
    "a renamed file": (
        lambda path: (path / TENSORS).rename(path / "b.safetensors"),
        "in no manifest",
    ),
    "a file too many": (lambda path: (path / "b.safetensors").write_text("w"), "in no manifest"),
    "a state too large": (huge, "larger than any"),
    "a path that leads outside": (outside, "is missing"),
    "a manifest of another form": (
        lambda path: (path / MANIFEST).write_text("[1]"),
        "cannot be read",
    ),
    "a manifest without end": (
        lambda path: (path / MANIFEST).write_text("[" * 100_000),
        "cannot be read",
    ),
    "a file behind a link": (link, "is missing"),
    "another state": (lambda path: (path / STATE).write_text("{}"), f"{STATE} is not what it was"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "a torn manifest": (lambda path: (path / MANIFEST).write_text("{"), "cannot be read"),
    "a later format": (later, "a later Regauge"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, 4)
    hurt, words = DAMAGES[name]
    hurt(path)
    assert words in (layout.damage(path) or "")
    assert layout.steps(tmp_path) == [4], "a damaged checkpoint is not one that never was"


def test_every_file_is_hashed_by_one_of_the_processes(tmp_path: Path) -> None:
    path = saved(tmp_path, 4)
    flip(path)
    found = [layout.damage(path, rank=rank, size=2) for rank in (0, 1)]
    assert sorted(text is None for text in found) == [False, True]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        saved(tmp_path, step)
    write_json(tmp_path / BEST, {"name": name_of(2), "metric": "m", "value": 1.0})
    layout.retain(tmp_path, 2, 6)
    assert layout.steps(tmp_path) == [6, 5, 2]
    shutil.rmtree(tmp_path / name_of(2))
    assert layout.best(tmp_path) is None


def test_a_damaged_newer_one_does_not_push_out_the_one_just_written(tmp_path: Path) -> None:
    for step in (12, 8, 10):
        saved(tmp_path, step)
    (tmp_path / name_of(12) / TENSORS).unlink()
    layout.retain(tmp_path, 1, 10)
    assert layout.steps(tmp_path) == [12, 10]


def test_what_was_never_finished_is_removed(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    for name in (".step-00000008.part", ".step-00000004.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / TENSORS).write_text("half")
    layout.retain(tmp_path, 2, 4)
    assert sorted(item.name for item in tmp_path.iterdir()) == [LATEST, name_of(4)]


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    saved(tmp_path, 4, "old")
    path = saved(tmp_path, 4, "new")
    assert (path / TENSORS).read_text().startswith("new")
    assert layout.damage(path) is None
    assert sorted(item.name for item in tmp_path.iterdir()) == [LATEST, path.name]
