"""Saving beside training, and finding the newest checkpoint that can be loaded."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

from regauge.checkpoint import layout, tensors
from regauge.checkpoint import saver as saving
from regauge.checkpoint.loading import load, newest
from regauge.checkpoint.saver import Saver
from regauge.checkpoint.settings import Checkpoint
from regauge.errors import NoCheckpointError, TransientError
from regauge.processes import World

ALONE = World()


def values(number: float) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((3, 4), number), "optimizer.m.a": torch.full((4,), -number)}


def saver(root: Path, **settings: object) -> Saver:
    return Saver(root, Checkpoint.model_validate({"keep": 3, **settings}), ALONE)


@pytest.mark.parametrize("writing", ["background", "blocking"])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, writing: str) -> None:
    own = saver(tmp_path, writing=writing)
    given = values(1.5)
    own.save(4, given, {"step": 4}, {})
    own.settle()
    for value in given.values():
        value.zero_()  # training goes on
    own.wait()
    path = newest(tmp_path, ALONE)
    assert path == tmp_path / layout.name_of(4)
    filled = values(0.0)
    assert load(path, filled) == {"step": 4}
    for name, value in values(1.5).items():
        assert filled[name].equal(value)


def test_tensors_may_change_when_all_are_copied_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, begun, let = saver(tmp_path), Event(), Event()

    def slowly(value: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert let.wait(60)
        return value.clone()

    monkeypatch.setattr(saving, "_copied", slowly)
    own.settle()
    given = values(1.5)
    own.save(4, given, {"step": 4}, {})
    assert begun.wait(60)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(own.settle)
        assert not wait([settled], 0.2).done
        let.set()
        settled.result(60)
    for value in given.values():
        value.zero_()
    own.wait()
    filled = values(0.0)
    load(tmp_path / layout.name_of(4), filled)
    assert filled["model.a"].equal(values(1.5)["model.a"])


def test_a_copy_that_fails_is_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = saver(tmp_path)

    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(saving, "_copied", full)
    own.save(4, values(1.5), {"step": 4}, {})
    own.settle()
    with pytest.raises(RuntimeError, match="not enough memory"):
        own.look(wait=True)
    assert layout.steps(tmp_path) == []


def test_a_damaged_checkpoint_is_passed_over_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("regauge"), "propagate", True)
    own = saver(tmp_path)
    for step in (2, 4, 6):
        own.save(step, values(step), {"step": step}, {})
    own.wait()
    next((tmp_path / layout.name_of(6)).glob("*.safetensors")).write_bytes(b"torn")
    (tmp_path / layout.name_of(4) / layout.MANIFEST).unlink()
    assert newest(tmp_path, ALONE) == tmp_path / layout.name_of(2)
    told = [record.getMessage() for record in caplog.records]
    assert [layout.name_of(6) in told[0], layout.name_of(4) in told[1]] == [True, True]


def test_when_all_are_damaged_the_run_does_not_start_again_from_nothing(tmp_path: Path) -> None:
    assert newest(tmp_path, ALONE) is None
    own = saver(tmp_path)
    for step in (2, 4):
        own.save(step, values(step), {"step": step}, {})
    own.wait()
    for step in (2, 4):
        (tmp_path / layout.name_of(step) / layout.MANIFEST).unlink()
    with pytest.raises(NoCheckpointError, match="restore one from a copy") as caught:
        newest(tmp_path, ALONE)
    assert caught.value.exit_code == 65


def test_a_failed_save_is_said_and_the_last_one_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = saver(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(layout, "commit", no_room)
        own.save(2, values(2), {}, {})
        with pytest.raises(OSError, match="No space left"):
            own.wait()
    assert "the checkpoint of step 2 was not saved, and training goes on" in caplog.text
    assert newest(tmp_path, ALONE) is None
    own.save(6, values(6), {"step": 6}, {})
    own.wait()
    assert newest(tmp_path, ALONE) == tmp_path / layout.name_of(6)


def test_the_third_lost_save_in_a_row_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = saver(tmp_path, writing="blocking")
    monkeypatch.setattr(layout, "commit", no_room)
    for step in (2, 4):
        own.save(step, values(step), {}, {})
    with pytest.raises(OSError, match="No space left"):
        own.save(6, values(6), {}, {})


def no_room(*_: object) -> Path:
    raise OSError(28, "No space left on device")


def test_a_failed_write_says_where_and_what_to_do(tmp_path: Path) -> None:
    own = saver(tmp_path / "root", writing="blocking")
    (tmp_path / "root").write_text("a file")
    own.save(2, values(2), {}, {})
    with pytest.raises(OSError, match="root"):
        own.wait()
    with pytest.raises(TransientError, match=r"could not be written to .*make room on that disk"):
        tensors.write(Path("/proc/nowhere"), values(1), None)


def test_no_scalar_and_no_pickle_passes(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"scalars do not belong .*'step'"):
        tensors.write(tmp_path, {"step": torch.tensor(3.0), "a": torch.ones(2)}, None)
    (tmp_path / "a.safetensors").write_bytes(b"PK\x03\x04 a zip archive of pickles")
    assert "a.safetensors holds no tensors" in (tensors.damage(tmp_path) or "")


def test_a_metric_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    own = saver(tmp_path, keep=1, best="heldout/loss", best_is="lowest")
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, 2.0)):
        own.save(step, values(step), {}, {"heldout/loss": loss})
    own.save(5, values(5), {}, {})
    own.wait()
    assert layout.steps(tmp_path) == [5, 2]
    best = json.loads((tmp_path / layout.BEST).read_text())
    assert (best["name"], best["value"]) == (layout.name_of(2), 2.0)
    assert load_file(next((tmp_path / best["name"]).glob("*.safetensors")))["model.a"][0, 0] == 2
