"""Checkpoint folders: atomic commits, and the detection of damage."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from regauge.config import FORMAT
from regauge.run_folders import checkpoint_files
from regauge.run_folders.checkpoint_files import BEST, LATEST, MANIFEST, STATE, checkpoint_name
from regauge.system.files import write_json

TENSORS = "shard-00001-model-00001-of-00001.safetensors"


def save(root: Path, step: int, text: str = "weights") -> Path:
    staging = checkpoint_files.staging_folder(root, step)
    staging.mkdir(parents=True)
    (staging / TENSORS).write_text(text * 100)
    write_json(staging / STATE, {"step": step})
    return checkpoint_files.commit(
        root,
        step,
        {name: checkpoint_files.describe_file(staging / name) for name in (TENSORS, STATE)},
    )


def test_a_commit_produces_one_complete_folder(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    assert path == tmp_path / "step-00000004"
    assert sorted(item.name for item in tmp_path.iterdir()) == [LATEST, path.name]
    assert (tmp_path / LATEST).read_text() == "step-00000004\n"
    assert checkpoint_files.find_damage(path) is None
    assert checkpoint_files.read_state(path) == {"step": 4}
    assert json.loads((path / MANIFEST).read_text())["format"] == FORMAT


def test_concurrent_writes_of_one_document_are_atomic(
    tmp_path: Path,
) -> None:
    path, barrier = tmp_path / "document.json", Barrier(8, timeout=30)

    def write(number: int) -> None:
        for _ in range(20):
            barrier.wait()
            write_json(path, {"by": number})

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(write, number) for number in range(8)]:
            future.result()
    assert json.loads(path.read_text())["by"] in range(8)
    assert list(tmp_path.iterdir()) == [path]


def test_steps_are_listed_newest_first_without_other_folders(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save(tmp_path, step)
    (tmp_path / "step-notes").mkdir()
    checkpoint_files.staging_folder(tmp_path, 11).mkdir()
    assert checkpoint_files.list_steps(tmp_path) == [10, 9, 2]
    assert (tmp_path / LATEST).read_text() == "step-00000009\n"


def flip_bit(path: Path) -> None:
    data = bytearray((path / TENSORS).read_bytes())
    data[17] ^= 1
    (path / TENSORS).write_bytes(data)


def move_behind_link(path: Path) -> None:
    shutil.move(path / TENSORS, path.parent / "elsewhere")
    (path / TENSORS).symlink_to(path.parent / "elsewhere")


def rename(path: Path) -> None:
    (path / TENSORS).rename(path / "b.safetensors")


def write_list_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("[1]")


def write_deep_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("[" * 100_000)


def enlarge_state(path: Path) -> None:
    with (path / STATE).open("wb") as file:
        file.truncate(checkpoint_files.MAX_DOCUMENT_BYTES + 1)


def list_outside_file(path: Path) -> None:
    (path.parent / "elsewhere").write_text("w")
    document = json.loads((path / MANIFEST).read_text())
    document["files"]["../elsewhere"] = checkpoint_files.describe_file(path.parent / "elsewhere")
    (path / MANIFEST).write_text(json.dumps(document))


def set_format(path: Path, version: int) -> None:
    document = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**document, "format": version}))


DAMAGES = {
    "a flipped bit": (flip_bit, "has changed since it was saved"),
    "a torn file": (
        lambda path: (path / TENSORS).write_text("w"),
        "has changed since it was saved",
    ),
    "a missing file": (lambda path: (path / TENSORS).unlink(), "is missing"),
    "a renamed file": (rename, "is not in the manifest"),
    "a file too many": (
        lambda path: (path / "b.safetensors").write_text("w"),
        "is not in the manifest",
    ),
    "a state too large": (
        enlarge_state,
        f"is larger than {checkpoint_files.MAX_DOCUMENT_BYTES:,} bytes",
    ),
    "a path that leads outside": (list_outside_file, "is missing"),
    "a manifest of another form": (write_list_manifest, "cannot be read"),
    "a manifest without end": (write_deep_manifest, "cannot be read"),
    "a file behind a link": (move_behind_link, "is missing"),
    "another state": (
        lambda path: (path / STATE).write_text("{}"),
        f"{STATE} has changed since it was saved",
    ),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "a torn manifest": (lambda path: (path / MANIFEST).write_text("{"), "cannot be read"),
    "a later format": (lambda path: set_format(path, 99), "was written by a later Regauge"),
    "an earlier format": (lambda path: set_format(path, 1), "was written by an earlier Regauge"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_detected_and_named(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    damage, problem = DAMAGES[name]
    damage(path)
    assert problem in (checkpoint_files.find_damage(path) or "")
    assert checkpoint_files.list_steps(tmp_path) == [4], "a damaged checkpoint is still listed"


def test_every_file_is_hashed_by_one_process(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    flip_bit(path)
    damages = [checkpoint_files.find_damage(path, rank=rank, size=2) for rank in (0, 1)]
    assert sorted(damage is None for damage in damages) == [False, True]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
    write_json(tmp_path / BEST, {"checkpoint": checkpoint_name(2), "metric": "m", "value": 1.0})
    checkpoint_files.retain(tmp_path, 2, 6)
    assert checkpoint_files.list_steps(tmp_path) == [6, 5, 2]
    shutil.rmtree(tmp_path / checkpoint_name(2))
    assert checkpoint_files.read_best(tmp_path) is None


def test_a_newer_damaged_checkpoint_does_not_displace_the_one_just_saved(tmp_path: Path) -> None:
    for step in (12, 8, 10):
        save(tmp_path, step)
    (tmp_path / checkpoint_name(12) / TENSORS).unlink()
    checkpoint_files.retain(tmp_path, 1, 10)
    assert checkpoint_files.list_steps(tmp_path) == [12, 10]


def test_remains_of_killed_saves_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 4)
    for name in (".step-00000008.part", ".step-00000004.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / TENSORS).write_text("half")
    checkpoint_files.retain(tmp_path, 2, 4)
    assert sorted(item.name for item in tmp_path.iterdir()) == [LATEST, checkpoint_name(4)]


def test_a_second_save_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    save(tmp_path, 4, "old")
    path = save(tmp_path, 4, "new")
    assert (path / TENSORS).read_text().startswith("new")
    assert checkpoint_files.find_damage(path) is None
    assert sorted(item.name for item in tmp_path.iterdir()) == [LATEST, path.name]
