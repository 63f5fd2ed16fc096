"""One step of the loop is one step of torch on the mean loss of the global batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import datasets
from distributed.runs import settings
from regauge import processes
from regauge.checkpoint import saver
from regauge.checkpoint.loading import load
from regauge.models.modules import TextModule
from regauge.training import optimizer as optimizers
from regauge.training.defaults import decide
from regauge.training.optimizer import Rates
from regauge.training.optimizer_step import optimizer_step
from regauge.training.session import Session
from regauge.training.session_setup import open_session

RATE = 0.05


def opened(folder: Path, data: Path, task: str, **changes: Any) -> Session:
    run = settings(folder, data, task, **changes)
    world = processes.world()
    return open_session(decide(run, world), world)


def fresh(session: Session) -> TextModule:
    """Return the module that a session started from, without a strategy around it."""
    run = session.settings
    return run.task.module(run.model, session.objective.manifest, run.seed).train()


@pytest.fixture
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def constant(session: Session) -> Rates:
    """Return a learning rate that stays as it is."""
    own = session.settings.optimizer
    schedule = own.schedule.model_copy(update={"kind": "constant"})
    settings = own.model_copy(update={"learning_rate": RATE, "schedule": schedule})
    return Rates(settings, 10, session.device, lazy=False)


def batches(session: Session) -> list[dict[str, torch.Tensor]]:
    found = session.arrays(0)
    return [{name: torch.from_numpy(value) for name, value in part.items()} for part in found]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("task", ["mlm", "clm"])
def test_a_step_is_torch_s_own_on_the_mean_loss(
    task: str, clip: float | None, tmp_path: Path
) -> None:
    data = datasets.packed(tmp_path / "data")
    optimizer = {"kind": "sgd", "betas": (0.0, 0.9), "weight_decay": 0.0, "clip_norm": clip}
    session = opened(tmp_path / "run", data, task, optimizer=optimizer)
    plain = fresh(session)
    own = torch.optim.SGD(plain.parameters(), lr=RATE)
    parts = batches(session)
    losses = [session.objective.task.loss(plain(part), part) for part in parts]
    total = torch.stack([loss for loss, _ in losses]).sum()
    weight = sum(float(each) for _, each in losses)
    (total / weight).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or 1e9)
    own.step()

    session.rates = constant(session)
    totals, found = optimizer_step(session, parts)
    assert float(found) == pytest.approx(float(norm), rel=1e-5)
    assert totals.tolist() == pytest.approx([float(total.detach()), weight])
    if clip is not None:
        assert float(norm) > clip, "nothing was clipped"
    for name, value in plain.named_parameters():
        torch.testing.assert_close(session.prepared.whole(name), value.detach(), msg=name)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("change", ["update", "restore"])
def test_a_save_holds_the_weights_of_its_step_however_long_copies_take(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(tmp_path / "run", datasets.packed(tmp_path / "data"), "mlm")
    kept = session.settings.output.checkpoint.model_copy(update={"writing": "background"})
    session.saver = saver.Saver(session.folder / "checkpoints", kept, session.world)
    session.folder.mkdir()
    session.rates = constant(session)
    optimizers.prime(session.optimizer)
    session.save({})
    session.saver.wait()
    earlier = session.saver.newest()
    assert earlier is not None
    optimizer_step(session, batches(session))
    session.step += 1
    expected = {name: value.clone() for name, value in session.values().items()}

    def late(value: torch.Tensor) -> torch.Tensor:
        monkeypatch.undo()
        time.sleep(2)
        return value.clone()

    monkeypatch.setattr(saver, "_copied", late)
    session.save({})
    if change == "update":
        optimizer_step(session, batches(session))
    else:
        session.restore(earlier)
    assert any(not value.equal(expected[name]) for name, value in session.values().items())
    session.saver.wait()
    found = {name: torch.empty_like(value) for name, value in expected.items()}
    newest = session.saver.newest()
    assert newest not in (None, earlier)
    load(newest, found)
    for name, value in expected.items():
        assert found[name].equal(value), name


@pytest.mark.usefixtures("_threads")
def test_the_contrastive_step_in_pieces_is_the_one_at_once(tmp_path: Path) -> None:
    data = datasets.pairs(tmp_path / "data")
    optimizer = {"kind": "sgd", "betas": (0.0, 0.9), "weight_decay": 0.0, "clip_norm": None}
    session = opened(tmp_path / "run", data, "contrastive", optimizer=optimizer)
    plain = fresh(session)
    parts = batches(session)
    outputs = [plain(part)["vectors"] for part in parts]
    slots = torch.cat([part["slots"] for part in parts])
    vectors = torch.cat(outputs)[slots.argsort()]
    real = torch.cat([part["real"] for part in parts])[slots.argsort()]
    loss, weight = session.objective.task.loss({"vectors": vectors}, {"real": real})
    own = torch.optim.SGD(plain.parameters(), lr=RATE)
    (loss / weight).backward()
    own.step()
    session.rates = constant(session)
    totals, _ = optimizer_step(session, parts)
    assert totals.tolist() == pytest.approx([float(loss.detach()), float(weight)])
    for name, value in plain.named_parameters():
        torch.testing.assert_close(session.prepared.whole(name), value.detach(), msg=name)
