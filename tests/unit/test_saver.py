"""Saves in the background, and the search for the newest whole checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from regauge.run_folders import checkpoint_files
from regauge.run_folders.checkpoint_files import checkpoint_name
from regauge.system.errors import NoCheckpointError, TransientError
from regauge.system.processes import World
from regauge.training.checkpoint import saver as saver_module
from regauge.training.checkpoint import tensors
from regauge.training.checkpoint.loading import find_newest, load_checkpoint
from regauge.training.checkpoint.saver import Saver
from regauge.training.checkpoint.settings import Checkpoint

ALONE = World()


def build_tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((3, 4), value), "optimizer.m.a": torch.full((4,), -value)}


def build_saver(root: Path, **settings: object) -> Saver:
    return Saver(root, Checkpoint.model_validate({"keep_last": 3, **settings}), ALONE)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_checkpoint_has_the_saved_values(tmp_path: Path, *, async_save: bool) -> None:
    saver = build_saver(tmp_path, async_save=async_save)
    trained = build_tensors(1.5)
    saver.save(4, trained, {"step": 4}, {})
    saver.wait_for_copies()
    for value in trained.values():
        value.zero_()  # training continues
    saver.wait()
    path = find_newest(tmp_path, ALONE)
    assert path == tmp_path / checkpoint_name(4)
    filled = build_tensors(0.0)
    assert load_checkpoint(path, filled) == {"step": 4}
    for name, value in build_tensors(1.5).items():
        assert filled[name].equal(value)


def test_tensors_may_change_only_after_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, has_begun, may_copy = build_saver(tmp_path), Event(), Event()

    def copy_slowly(value: torch.Tensor) -> torch.Tensor:
        has_begun.set()
        assert may_copy.wait(60)
        return value.clone()

    monkeypatch.setattr(saver_module, "_copy_to_host", copy_slowly)
    saver.wait_for_copies()
    trained = build_tensors(1.5)
    saver.save(4, trained, {"step": 4}, {})
    assert has_begun.wait(60)
    with ThreadPoolExecutor(1) as pool:
        copies = pool.submit(saver.wait_for_copies)
        assert not wait([copies], 0.2).done
        may_copy.set()
        copies.result(60)
    for value in trained.values():
        value.zero_()
    saver.wait()
    filled = build_tensors(0.0)
    load_checkpoint(tmp_path / checkpoint_name(4), filled)
    assert filled["model.a"].equal(build_tensors(1.5)["model.a"])


def test_a_failed_copy_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = build_saver(tmp_path)

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(saver_module, "_copy_to_host", fail)
    saver.save(4, build_tensors(1.5), {"step": 4}, {})
    saver.wait_for_copies()
    with pytest.raises(RuntimeError, match="not enough memory"):
        saver.check_save(wait=True)
    assert checkpoint_files.list_steps(tmp_path) == []


def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = build_saver(tmp_path)
    for step in (2, 4, 6):
        saver.save(step, build_tensors(step), {"step": step}, {})
    saver.wait()
    next((tmp_path / checkpoint_name(6)).glob("*.safetensors")).write_bytes(b"torn")
    (tmp_path / checkpoint_name(4) / checkpoint_files.MANIFEST).unlink()
    assert find_newest(tmp_path, ALONE) == tmp_path / checkpoint_name(2)
    first, second = [record.getMessage() for record in caplog.records][:2]
    assert first.startswith("skipping a damaged checkpoint: ")
    assert checkpoint_name(6) in first
    assert checkpoint_name(4) in second


def test_a_run_with_only_damaged_checkpoints_does_not_start_from_scratch(tmp_path: Path) -> None:
    assert find_newest(tmp_path, ALONE) is None
    saver = build_saver(tmp_path)
    for step in (2, 4):
        saver.save(step, build_tensors(step), {"step": step}, {})
    saver.wait()
    for step in (2, 4):
        (tmp_path / checkpoint_name(step) / checkpoint_files.MANIFEST).unlink()
    with pytest.raises(NoCheckpointError, match="restore one from a copy") as caught:
        find_newest(tmp_path, ALONE)
    assert caught.value.exit_code == 65


def test_a_failed_save_is_logged_and_a_failed_last_save_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = build_saver(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint_files, "commit", raise_no_space)
        saver.save(2, build_tensors(2), {})
        with pytest.raises(OSError, match="No space left"):
            saver.wait()
    assert "the checkpoint of step 2 was not saved; training continues" in caplog.text
    assert find_newest(tmp_path, ALONE) is None
    saver.save(6, build_tensors(6), {"step": 6}, {})
    saver.wait()
    assert find_newest(tmp_path, ALONE) == tmp_path / checkpoint_name(6)


def test_the_third_consecutive_failed_save_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = build_saver(tmp_path, async_save=False)
    monkeypatch.setattr(checkpoint_files, "commit", raise_no_space)
    for step in (2, 4):
        saver.save(step, build_tensors(step), {})
    with pytest.raises(OSError, match="No space left"):
        saver.save(6, build_tensors(6), {})


def raise_no_space(*_: object) -> Path:
    raise OSError(28, "No space left on device")


def test_a_failed_write_names_the_folder_and_a_remedy(tmp_path: Path) -> None:
    saver = build_saver(tmp_path / "root", async_save=False)
    (tmp_path / "root").write_text("a file")
    saver.save(2, build_tensors(2), {})
    with pytest.raises(OSError, match="root"):
        saver.wait()
    with pytest.raises(TransientError, match=r"could not be written to .*free space on that disk"):
        tensors.save_tensors(Path("/proc/nowhere"), build_tensors(1), None)


def test_scalars_and_pickles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"scalars do not belong .*'step'"):
        tensors.save_tensors(tmp_path, {"step": torch.tensor(3.0), "a": torch.ones(2)}, None)
    (tmp_path / "a.safetensors").write_bytes(b"PK\x03\x04 a zip archive of pickles")
    problem = tensors.find_bad_header(tmp_path) or ""
    assert "a.safetensors is not a valid safetensors file" in problem


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    saver = build_saver(tmp_path, keep_last=1)
    for step, loss in ((1, 3.0), (2, 2.0), (3, None), (4, None)):
        best = {"metric": "heldout/loss", "value": loss} if loss else None
        saver.save(step, build_tensors(step), {}, best)
    saver.wait()
    assert checkpoint_files.list_steps(tmp_path) == [4, 2]
    document = json.loads((tmp_path / checkpoint_files.BEST).read_text())
    assert document["checkpoint"] == checkpoint_name(2)
    assert (document["metric"], document["value"]) == ("heldout/loss", 2.0)
    (file,) = (tmp_path / document["checkpoint"]).glob("*.safetensors")
    assert load_file(file)["model.a"][0, 0] == 2


BEST_VALUE = {"metric": "heldout/loss", "value": 2.0}


def save_steps(saver: Saver, steps: Iterable[int], best: int | None = None) -> None:
    for step in steps:
        value = BEST_VALUE if step == best else None
        saver.save(step, build_tensors(step), {"step": step}, value)
    saver.wait()


@pytest.fixture
def store() -> Iterator[str]:
    """Return the address of an empty object store."""
    yield "memory://best/run"
    fsspec.filesystem("memory").store.clear()


def list_stored_files(step: int) -> list[str]:
    """Return the paths of the files of a checkpoint in the object store."""
    paths = fsspec.filesystem("memory").store
    return sorted(path for path in paths if checkpoint_name(step) in path)


def test_the_best_checkpoint_is_downloaded_and_kept_on_another_machine(
    tmp_path: Path, store: str
) -> None:
    save_steps(build_saver(tmp_path / "a", keep_last=1, remote=store), range(1, 5), best=2)
    saver = build_saver(tmp_path / "b", keep_last=1, remote=store)
    assert saver.find_newest() == tmp_path / "b" / checkpoint_name(4)
    assert checkpoint_files.read_best(tmp_path / "b") is None
    saver.fetch_best(2, BEST_VALUE)
    best = checkpoint_files.read_best(tmp_path / "b")
    assert best == {"checkpoint": checkpoint_name(2), **BEST_VALUE}
    save_steps(saver, (5, 6, 7))
    assert checkpoint_files.list_steps(tmp_path / "b") == [7, 2]
    assert list_stored_files(2)
    assert not list_stored_files(4)
    path = saver.find_step(2)
    assert path is not None
    filled = build_tensors(0.0)
    load_checkpoint(path, filled)
    assert filled["model.a"].equal(build_tensors(2)["model.a"])


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("remote", [None, "memory://best/run"])
def test_a_best_checkpoint_on_this_machine_is_recorded_and_not_replaced(
    tmp_path: Path, remote: str | None
) -> None:
    saver = build_saver(tmp_path, keep_last=1, remote=remote)
    save_steps(saver, (1, 2, 3), best=2)
    (tmp_path / checkpoint_files.BEST).write_text("{")
    for file in list_stored_files(2):
        fsspec.filesystem("memory").pipe_file(file, b"another run")
    saver.fetch_best(2, BEST_VALUE)
    save_steps(saver, (4, 5))
    assert checkpoint_files.list_steps(tmp_path) == [5, 2]
    assert saver.find_step(2) is not None


def test_an_evicted_best_checkpoint_is_not_recorded(tmp_path: Path, store: str) -> None:
    for remote in (None, store):
        saver = build_saver(tmp_path / str(bool(remote)), keep_last=1, remote=remote)
        save_steps(saver, (1, 2, 3))
        saver.fetch_best(1, BEST_VALUE)
        assert not (tmp_path / str(bool(remote)) / checkpoint_files.BEST).exists()
        assert saver.find_step(1) is None


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_best_checkpoint_that_the_store_has_damaged_is_not_whole(
    tmp_path: Path, store: str, damage: str
) -> None:
    save_steps(build_saver(tmp_path / "a", keep_last=1, remote=store), (1, 2, 3), best=2)
    files = fsspec.filesystem("memory")
    weights = next(path for path in list_stored_files(2) if path.endswith(".safetensors"))
    if damage == "missing":
        files.rm_file(weights)
    else:
        files.pipe_file(weights, files.cat_file(weights)[:-4])
    saver = build_saver(tmp_path / "b", keep_last=1, remote=store)
    assert saver.find_newest() == tmp_path / "b" / checkpoint_name(3)
    saver.fetch_best(2, BEST_VALUE)
    assert saver.find_step(2) is None


def test_a_newest_checkpoint_that_lost_a_file_in_the_store_is_skipped(
    tmp_path: Path, store: str
) -> None:
    save_steps(build_saver(tmp_path / "a", remote=store), (1, 2))
    weights = next(path for path in list_stored_files(2) if path.endswith(".safetensors"))
    fsspec.filesystem("memory").rm_file(weights)
    saver = build_saver(tmp_path / "b", remote=store)
    assert saver.find_newest() == tmp_path / "b" / checkpoint_name(1)
