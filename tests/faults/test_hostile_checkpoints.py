"""Checkpoints that a stranger made to do harm, or of another model: row 37 of the fault matrix.

Each has a manifest with the right hashes: who can write a folder can write those, too.
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
from faults.test_checkpoint_faults import stopped_at_18
from regauge.checkpoint import layout
from regauge.checkpoint.loading import load, newest
from regauge.checkpoint.saver import Saver
from regauge.checkpoint.settings import Checkpoint
from regauge.errors import NoCheckpointError
from regauge.files import write_json
from regauge.processes import World

MOST_MEMORY_BYTES = 200 << 20


class Payload:
    """What a pickle would run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def shard(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def pickled(path: Path) -> None:
    shard(path).write_bytes(pickle.dumps(Payload(path.parent.parent / "executed")))


def pickled_as_torch_does(path: Path) -> None:
    torch.save(Payload(path.parent.parent / "executed"), shard(path))


def of_a_long_header(path: Path) -> None:
    """Say that the header has four gigabytes, in a file that seems to hold them."""
    with shard(path).open("wb") as file:
        file.write((4 << 30).to_bytes(8, "little") + b'{"a":')
        file.truncate(5 << 30)


def of_offsets_outside(path: Path) -> None:
    header = b'{"model.a":{"dtype":"F32","shape":[1024],"data_offsets":[0,4096]}}'
    shard(path).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def of_a_huge_state(path: Path) -> None:
    with (path / layout.STATE).open("wb") as file:
        file.truncate(8 << 30)


def of_a_deep_state(path: Path) -> None:
    (path / layout.STATE).write_text("[" * 1_000_000)


def with_a_path_outside(path: Path) -> None:
    (path.parent / "outside.safetensors").write_bytes(shard(path).read_bytes())
    shard(path).unlink()
    (path / layout.MANIFEST).write_text("")
    manifest(path, ["../outside.safetensors", layout.STATE])


def with_a_link(path: Path) -> None:
    outside = path.parent.parent / "outside.safetensors"
    shard(path).rename(outside)
    (path / outside.name).symlink_to(outside)


def behind_a_link(path: Path) -> None:
    outside = path.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


HOSTILE = (
    pickled,
    pickled_as_torch_does,
    of_a_long_header,
    of_offsets_outside,
    of_a_huge_state,
    with_a_path_outside,
    with_a_link,
    behind_a_link,
)


def manifest(path: Path, names: list[str]) -> None:
    """Write a manifest with the hashes that the files have now; of large ones the size alone."""
    files = {
        name: {"sha256": "0" * 64, "bytes": (path / name).stat().st_size}
        if (path / name).stat().st_size > layout.DOCUMENT_BYTES
        else layout.digest(path / name)
        for name in names
    }
    write_json(path / layout.MANIFEST, {"format": 1, "step": 4, "files": files})


def values() -> dict[str, torch.Tensor]:
    return {"model.a": torch.ones(32, 32), "model.b": torch.zeros(32)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    root = tmp_path / "run" / "checkpoints"
    saver = Saver(root, Checkpoint(writing="blocking"), World())
    saver.save(4, values(), {"step": 4}, {})
    saver.wait()
    return root / layout.name_of(4)


@pytest.mark.parametrize("harm", HOSTILE, ids=lambda harm: harm.__name__)
def test_a_hostile_checkpoint_is_refused_and_does_nothing(
    saved: Path, harm: Callable[[Path], None]
) -> None:
    harm(saved)
    if harm is not with_a_path_outside:
        names = sorted(one.name for one in saved.iterdir() if one.name != layout.MANIFEST)
        manifest(saved, names)
    before = tree(saved.parent.parent)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with pytest.raises(NoCheckpointError, match=r"can be loaded: .*/checkpoints/"):
        newest(saved.parent, World())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory
    assert grown < MOST_MEMORY_BYTES
    assert tree(saved.parent.parent) == before
    assert not (saved.parent.parent / "executed").exists()


def test_the_one_that_harm_was_not_done_to_is_loaded(saved: Path) -> None:
    path = newest(saved.parent, World())
    assert path == saved
    found = {name: torch.full_like(value, 7.0) for name, value in values().items()}
    assert load(path, found) == {"step": 4}
    assert all(torch.equal(found[name], value) for name, value in values().items())


@pytest.mark.parametrize(
    "others", [{"model.c": torch.ones(2)}, {"model.a": torch.ones(3, 3)}], ids=["name", "shape"]
)
def test_a_checkpoint_of_another_model_is_refused_in_one_line(
    saved: Path, others: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(NoCheckpointError, match="does not fit this run: ") as found:
        load(saved, others)
    assert "\n" not in str(found.value)
    assert found.value.exit_code == 65


@FULL
def test_a_run_over_a_hostile_checkpoint_goes_on_from_the_one_before(jobs: Jobs) -> None:
    def harm(root: Path) -> None:
        path = root / layout.name_of(18)
        known = json.loads((path / layout.MANIFEST).read_text())["files"]
        for file in path.glob("*.safetensors"):
            file.write_bytes(pickle.dumps(Payload(root.parent / "executed")))
        manifest(path, sorted(known))

    job = jobs.survives(stopped_at_18(jobs, harm))
    assert "holds no tensors" in job.told
    assert not (job.folder / "executed").exists()


@FULL
def test_a_run_over_another_model_s_checkpoint_ends_with_code_65(jobs: Jobs) -> None:
    def replace(root: Path) -> None:
        other = jobs.runs.trained(2, "mlm", model={"config": {"num_hidden_layers": 1}})
        steps = sorted((other / "checkpoints").glob("step-*"))
        for path in root.glob("step-*"):
            shutil.rmtree(path)
            shutil.copytree(steps[-1], path)

    job = stopped_at_18(jobs, replace).start().wait()
    assert job.code == 65, job.said
    assert "does not fit this run" in job.said.splitlines()[-1]


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))
