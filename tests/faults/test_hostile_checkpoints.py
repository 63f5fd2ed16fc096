"""Hostile checkpoints, and checkpoints of another model: row 37 of the fault matrix.

Each has a manifest with the right hashes, because an attacker can write those as well.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from faults.conftest import FULL, Jobs
from faults.test_checkpoint_faults import stop_at_18
from regauge.config import FORMAT
from regauge.run_folders import checkpoint_files
from regauge.system.errors import NoCheckpointError
from regauge.system.files import write_json
from regauge.system.processes import World
from regauge.training.checkpoint.loading import find_newest, load_checkpoint
from regauge.training.checkpoint.saver import Saver
from regauge.training.checkpoint.settings import Checkpoint

MAX_MEMORY_BYTES = 200 << 20


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def find_shard(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def write_pickle(path: Path) -> None:
    find_shard(path).write_bytes(pickle.dumps(Payload(path.parent.parent / "executed")))


def write_torch_file(path: Path) -> None:
    torch.save(Payload(path.parent.parent / "executed"), find_shard(path))


def write_long_header(path: Path) -> None:
    """Declare a header of 4 GiB, in a sparse file of 5 GiB."""
    with find_shard(path).open("wb") as file:
        file.write((4 << 30).to_bytes(8, "little") + b'{"a":')
        file.truncate(5 << 30)


def write_outside_offsets(path: Path) -> None:
    header = b'{"model.a":{"dtype":"F32","shape":[1024],"data_offsets":[0,4096]}}'
    find_shard(path).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def write_huge_state(path: Path) -> None:
    with (path / checkpoint_files.STATE).open("wb") as file:
        file.truncate(8 << 30)


def write_deep_state(path: Path) -> None:
    (path / checkpoint_files.STATE).write_text("[" * 1_000_000)


def list_outside_path(path: Path) -> None:
    (path.parent / "outside.safetensors").write_bytes(find_shard(path).read_bytes())
    find_shard(path).unlink()
    (path / checkpoint_files.MANIFEST).write_text("")
    write_manifest(path, ["../outside.safetensors", checkpoint_files.STATE])


def link_shard(path: Path) -> None:
    outside = path.parent.parent / "outside.safetensors"
    find_shard(path).rename(outside)
    (path / outside.name).symlink_to(outside)


def link_folder(path: Path) -> None:
    outside = path.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


HOSTILE = (
    write_pickle,
    write_torch_file,
    write_long_header,
    write_outside_offsets,
    write_huge_state,
    list_outside_path,
    link_shard,
    link_folder,
)


def write_manifest(path: Path, names: list[str]) -> None:
    """Write a manifest with the current hashes of the files; large files have a wrong hash."""
    files = {
        name: {"sha256": "0" * 64, "bytes": (path / name).stat().st_size}
        if (path / name).stat().st_size > checkpoint_files.MAX_DOCUMENT_BYTES
        else checkpoint_files.describe_file(path / name)
        for name in names
    }
    write_json(path / checkpoint_files.MANIFEST, {"format": FORMAT, "step": 4, "files": files})


def build_tensors() -> dict[str, torch.Tensor]:
    return {"model.a": torch.ones(32, 32), "model.b": torch.zeros(32)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    root = tmp_path / "run" / "checkpoints"
    saver = Saver(root, Checkpoint(async_save=False), World())
    saver.save(4, build_tensors(), {"step": 4}, {})
    saver.wait()
    return root / checkpoint_files.checkpoint_name(4)


@pytest.mark.parametrize("harm", HOSTILE, ids=lambda harm: harm.__name__)
def test_a_hostile_checkpoint_is_refused_without_any_effect(
    checkpoint: Path, harm: Callable[[Path], None]
) -> None:
    harm(checkpoint)
    if harm is not list_outside_path:
        names = sorted(
            file.name for file in checkpoint.iterdir() if file.name != checkpoint_files.MANIFEST
        )
        write_manifest(checkpoint, names)
    before = list_tree(checkpoint.parent.parent)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with pytest.raises(NoCheckpointError, match=r"can be loaded: .*/checkpoints/"):
        find_newest(checkpoint.parent, World())
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory
    assert growth < MAX_MEMORY_BYTES
    assert list_tree(checkpoint.parent.parent) == before
    assert not (checkpoint.parent.parent / "executed").exists()


def test_an_unharmed_checkpoint_is_loaded(checkpoint: Path) -> None:
    path = find_newest(checkpoint.parent, World())
    assert path == checkpoint
    tensors = {name: torch.full_like(value, 7.0) for name, value in build_tensors().items()}
    assert load_checkpoint(path, tensors) == {"step": 4}
    assert all(torch.equal(tensors[name], value) for name, value in build_tensors().items())


@pytest.mark.parametrize(
    "others", [{"model.c": torch.ones(2)}, {"model.a": torch.ones(3, 3)}], ids=["name", "shape"]
)
def test_a_checkpoint_of_another_model_is_refused_in_one_line(
    checkpoint: Path, others: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(NoCheckpointError, match="does not fit this run: ") as refused:
        load_checkpoint(checkpoint, others)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 65


@FULL
def test_a_run_with_a_hostile_checkpoint_resumes_from_the_previous_one(jobs: Jobs) -> None:
    def harm(root: Path) -> None:
        path = root / checkpoint_files.checkpoint_name(18)
        names = json.loads((path / checkpoint_files.MANIFEST).read_text())["files"]
        for file in path.glob("*.safetensors"):
            file.write_bytes(pickle.dumps(Payload(root.parent / "executed")))
        write_manifest(path, sorted(names))

    job = jobs.assert_survives(stop_at_18(jobs, harm))
    assert "is not a valid safetensors file" in job.stderr_line
    assert not (job.folder / "executed").exists()


@FULL
def test_a_run_with_another_model_s_checkpoint_ends_with_code_65(jobs: Jobs) -> None:
    def replace(root: Path) -> None:
        other = jobs.runs.train_once(2, "mlm", model={"config": {"num_hidden_layers": 1}})
        steps = sorted((other / "checkpoints").glob("step-*"))
        for path in root.glob("step-*"):
            shutil.rmtree(path)
            shutil.copytree(steps[-1], path)

    job = stop_at_18(jobs, replace).start().wait()
    assert job.code == 65, job.stderr
    assert "does not fit this run" in job.stderr.splitlines()[-1]


def list_tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))
