"""A training step equals a step of torch on the mean loss of the global batch."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from distributed import datasets
from distributed.runs import settings
from regauge.models.modules import TextModule
from regauge.system import processes
from regauge.training import optimizer as optimizers
from regauge.training.checkpoint import saver
from regauge.training.checkpoint.loading import load_checkpoint
from regauge.training.checkpointing import restore, save_checkpoint
from regauge.training.defaults import resolve_defaults
from regauge.training.optimizer import LRSchedule, optimizer_step
from regauge.training.run_setup import Run, set_up

RATE = 0.05


def set_up_run(folder: Path, data: Path, task: str, **changes: Any) -> Run:
    run = settings(folder, data, task, **changes)
    world = processes.detect_world()
    return set_up(resolve_defaults(run, world), world)


def build_unsharded_module(opened_run: Run) -> TextModule:
    """Return the initial module of a run, without a strategy."""
    run, manifest = opened_run.context.settings, opened_run.context.tasks[0].manifest
    return run.task.build_module(run.model, manifest, run.seed).train()


def constant_schedule(opened_run: Run) -> LRSchedule:
    """Return a schedule with a constant learning rate."""
    options = opened_run.context.settings.optimizer
    schedule = options.schedule.model_copy(update={"kind": "constant"})
    settings = options.model_copy(update={"learning_rate": RATE, "schedule": schedule})
    return LRSchedule(settings, 10, opened_run.context.device, lazy=False)


def read_batches(opened_run: Run) -> list[dict[str, torch.Tensor]]:
    arrays = opened_run.context.read_batches(0)
    return [{name: torch.from_numpy(value) for name, value in batch.items()} for batch in arrays]


def check_weights(opened_run: Run, plain: TextModule) -> None:
    """Check that a run has the weights of a module."""
    for name, value in plain.named_parameters():
        weight = opened_run.state.model.full_tensor(name)
        torch.testing.assert_close(weight, value.detach(), msg=name)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("task", ["mlm", "clm"])
def test_a_step_equals_a_torch_step_on_the_mean_loss(
    task: str, clip: float | None, tmp_path: Path
) -> None:
    data = datasets.write_packed(tmp_path / "data")
    optimizer = {"kind": "sgd", "betas": (0.0, 0.9), "weight_decay": 0.0, "max_grad_norm": clip}
    opened_run = set_up_run(tmp_path / "run", data, task, optimizer=optimizer)
    plain = build_unsharded_module(opened_run)
    sgd = torch.optim.SGD(plain.parameters(), lr=RATE)
    batches = read_batches(opened_run)
    losses = [opened_run.context.tasks[0].task.loss(plain(batch), batch) for batch in batches]
    total = torch.stack([loss for loss, _ in losses]).sum()
    weight = sum(float(row_weight) for _, row_weight in losses)
    (total / weight).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or 1e9)
    sgd.step()

    opened_run.state.lr_schedule = constant_schedule(opened_run)
    totals, step_norm = optimizer_step(*opened_run, batches)
    assert float(step_norm) == pytest.approx(float(norm), rel=1e-5)
    assert totals.tolist() == pytest.approx([float(total.detach()), weight])
    if clip is not None:
        assert float(norm) > clip, "nothing was clipped"
    check_weights(opened_run, plain)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("change", ["update", "restore"])
def test_a_slow_background_save_holds_the_weights_of_its_step(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = {"checkpoint": {"async_save": True}}
    data = datasets.write_packed(tmp_path / "data")
    opened_run = set_up_run(tmp_path / "run", data, "mlm", output=output)
    context, state = opened_run
    context.folder.mkdir()
    state.lr_schedule = constant_schedule(opened_run)
    optimizers.prime_state(state.optimizer)
    save_checkpoint(context, state, {})
    context.saver.wait()
    earlier = context.saver.find_newest()
    assert earlier is not None
    optimizer_step(context, state, read_batches(opened_run))
    state.step += 1
    expected = {name: value.clone() for name, value in state.tensors().items()}
    is_waiting = Event()
    wait_for_copies = context.saver.wait_for_copies

    def report_and_wait() -> None:
        is_waiting.set()
        wait_for_copies()

    def copy_late(value: torch.Tensor) -> torch.Tensor:
        assert is_waiting.wait(60), "nothing waits for the copies"
        return value.clone()

    monkeypatch.setattr(context.saver, "wait_for_copies", report_and_wait)
    monkeypatch.setattr(saver, "_copy_to_host", copy_late)
    save_checkpoint(context, state, {})
    if change == "update":
        optimizer_step(context, state, read_batches(opened_run))
    else:
        restore(context, state, earlier)
    assert any(not value.equal(expected[name]) for name, value in state.tensors().items())
    context.saver.wait()
    loaded = {name: torch.empty_like(value) for name, value in expected.items()}
    newest = context.saver.find_newest()
    assert newest not in (None, earlier)
    load_checkpoint(newest, loaded)
    for name, value in expected.items():
        assert loaded[name].equal(value), name


@pytest.mark.usefixtures("restored_threads")
def test_a_contrastive_step_in_microbatches_equals_one_batch(tmp_path: Path) -> None:
    data = datasets.write_pairs(tmp_path / "data")
    optimizer = {"kind": "sgd", "betas": (0.0, 0.9), "weight_decay": 0.0, "max_grad_norm": None}
    opened_run = set_up_run(tmp_path / "run", data, "contrastive", optimizer=optimizer)
    plain = build_unsharded_module(opened_run)
    batches = read_batches(opened_run)
    outputs = [plain(batch)["vectors"] for batch in batches]
    slots = torch.cat([batch["slots"] for batch in batches])
    vectors = torch.cat(outputs)[slots.argsort()]
    targets = {
        name: torch.cat([batch[name] for batch in batches])[slots.argsort()]
        for name in ("real", "text_hashes")
    }
    loss, weight = opened_run.context.tasks[0].task.loss({"vectors": vectors}, targets)
    sgd = torch.optim.SGD(plain.parameters(), lr=RATE)
    (loss / weight).backward()
    sgd.step()
    opened_run.state.lr_schedule = constant_schedule(opened_run)
    totals, _ = optimizer_step(*opened_run, batches)
    assert totals.tolist() == pytest.approx([float(loss.detach()), float(weight)])
    check_weights(opened_run, plain)
