"""One step of the loop is one step of torch on the mean loss of the global batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
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
from regauge.training.checkpointing import restore, save_checkpoint
from regauge.training.defaults import resolve_defaults
from regauge.training.optimizer import LRSchedule
from regauge.training.optimizer_step import optimizer_step
from regauge.training.run_setup import Run, set_up

RATE = 0.05


def opened(folder: Path, data: Path, task: str, **changes: Any) -> Run:
    run = settings(folder, data, task, **changes)
    world = processes.world()
    return set_up(resolve_defaults(run, world), world)


def fresh(opened_run: Run) -> TextModule:
    """Return the module that a run started from, without a strategy around it."""
    run = opened_run.context.settings
    return run.task.module(
        run.model, opened_run.context.task_at(opened_run.state.step).manifest, run.seed
    ).train()


@pytest.fixture
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def constant(opened_run: Run) -> LRSchedule:
    """Return a learning rate that stays as it is."""
    own = opened_run.context.settings.optimizer
    schedule = own.schedule.model_copy(update={"kind": "constant"})
    settings = own.model_copy(update={"learning_rate": RATE, "schedule": schedule})
    return LRSchedule(settings, 10, opened_run.context.device, lazy=False)


def batches(opened_run: Run) -> list[dict[str, torch.Tensor]]:
    found = opened_run.context.read_batches(0)
    return [{name: torch.from_numpy(value) for name, value in part.items()} for part in found]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("task", ["mlm", "clm"])
def test_a_step_is_torch_s_own_on_the_mean_loss(
    task: str, clip: float | None, tmp_path: Path
) -> None:
    data = datasets.packed(tmp_path / "data")
    optimizer = {"kind": "sgd", "betas": (0.0, 0.9), "weight_decay": 0.0, "clip_norm": clip}
    opened_run = opened(tmp_path / "run", data, task, optimizer=optimizer)
    plain = fresh(opened_run)
    own = torch.optim.SGD(plain.parameters(), lr=RATE)
    parts = batches(opened_run)
    losses = [
        opened_run.context.task_at(opened_run.state.step).task.loss(plain(part), part)
        for part in parts
    ]
    total = torch.stack([loss for loss, _ in losses]).sum()
    weight = sum(float(each) for _, each in losses)
    (total / weight).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or 1e9)
    own.step()

    opened_run.state.lr_schedule = constant(opened_run)
    totals, found = optimizer_step(*opened_run, parts)
    assert float(found) == pytest.approx(float(norm), rel=1e-5)
    assert totals.tolist() == pytest.approx([float(total.detach()), weight])
    if clip is not None:
        assert float(norm) > clip, "nothing was clipped"
    for name, value in plain.named_parameters():
        torch.testing.assert_close(
            opened_run.state.model.full_tensor(name), value.detach(), msg=name
        )


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("change", ["update", "restore"])
def test_a_save_holds_the_weights_of_its_step_however_long_copies_take(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_run = opened(tmp_path / "run", datasets.packed(tmp_path / "data"), "mlm")
    kept = opened_run.context.settings.output.checkpoint.model_copy(
        update={"writing": "background"}
    )
    background = saver.Saver(
        opened_run.context.folder / "checkpoints", kept, opened_run.context.world
    )
    opened_run = opened_run._replace(context=replace(opened_run.context, saver=background))
    opened_run.context.folder.mkdir()
    opened_run.state.lr_schedule = constant(opened_run)
    optimizers.prime_state(opened_run.state.optimizer)
    save_checkpoint(*opened_run, {})
    opened_run.context.saver.wait()
    earlier = opened_run.context.saver.newest()
    assert earlier is not None
    optimizer_step(*opened_run, batches(opened_run))
    opened_run.state.step += 1
    expected = {name: value.clone() for name, value in opened_run.state.tensors().items()}

    def late(value: torch.Tensor) -> torch.Tensor:
        monkeypatch.undo()
        time.sleep(2)
        return value.clone()

    monkeypatch.setattr(saver, "_copied", late)
    save_checkpoint(*opened_run, {})
    if change == "update":
        optimizer_step(*opened_run, batches(opened_run))
    else:
        restore(*opened_run, earlier)
    assert any(
        not value.equal(expected[name]) for name, value in opened_run.state.tensors().items()
    )
    opened_run.context.saver.wait()
    found = {name: torch.empty_like(value) for name, value in expected.items()}
    newest = opened_run.context.saver.newest()
    assert newest not in (None, earlier)
    load(newest, found)
    for name, value in expected.items():
        assert found[name].equal(value), name


@pytest.mark.usefixtures("_threads")
def test_the_contrastive_step_in_pieces_is_the_one_at_once(tmp_path: Path) -> None:
    data = datasets.pairs(tmp_path / "data")
    optimizer = {"kind": "sgd", "betas": (0.0, 0.9), "weight_decay": 0.0, "clip_norm": None}
    opened_run = opened(tmp_path / "run", data, "contrastive", optimizer=optimizer)
    plain = fresh(opened_run)
    parts = batches(opened_run)
    outputs = [plain(part)["vectors"] for part in parts]
    slots = torch.cat([part["slots"] for part in parts])
    vectors = torch.cat(outputs)[slots.argsort()]
    real = torch.cat([part["real"] for part in parts])[slots.argsort()]
    loss, weight = opened_run.context.task_at(opened_run.state.step).task.loss(
        {"vectors": vectors}, {"real": real}
    )
    own = torch.optim.SGD(plain.parameters(), lr=RATE)
    (loss / weight).backward()
    own.step()
    opened_run.state.lr_schedule = constant(opened_run)
    totals, _ = optimizer_step(*opened_run, parts)
    assert totals.tolist() == pytest.approx([float(loss.detach()), float(weight)])
    for name, value in plain.named_parameters():
        torch.testing.assert_close(
            opened_run.state.model.full_tensor(name), value.detach(), msg=name
        )
