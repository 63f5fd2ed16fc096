"""What a run computes in: the first that is offered, what is measured, and the same for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed.runs import settings
from regauge.accelerators import Rate, cpu
from regauge.accelerators.cpu import Cpu
from regauge.errors import SettingsError, TransientError
from regauge.processes import World
from regauge.training.defaults import resolve_defaults, resolve_precision
from regauge.training.run_setup import NO_SUPERVISOR
from regauge.training.settings import Training

Made = Callable[..., Cpu]
OFFERED = ("bf16", "fp32")


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a processor that is measured so, in the order of what it offers."""

    def made(*rates: float) -> Cpu:
        monkeypatch.setattr(Cpu, "precisions", lambda _: OFFERED)
        measured = dict(zip(OFFERED, map(Rate, rates), strict=False))
        monkeypatch.setattr(Cpu, "rates", lambda _: measured)
        return Cpu()

    return made


def run(folder: Path, precision: str = "auto") -> Training:
    return settings(folder, folder, execution={"precision": precision, "timeout_seconds": 1})


def process(rank: int, size: int = 2) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ((), "bf16"),
        ((400e9, 100e9), "bf16"),
        ((90e9, 100e9), "bf16"),
        ((1e9, 100e9), "fp32"),
    ],
)
def test_the_first_that_is_offered_is_taken_unless_another_is_measured_much_faster(
    tmp_path: Path, processor: Made, rates: tuple[float, ...], found: str
) -> None:
    assert (
        resolve_precision(run(tmp_path), processor(*rates), process(0, 1), NO_SUPERVISOR) == found
    )
    assert not list(tmp_path.iterdir())


def test_what_is_set_is_taken_without_a_measurement(tmp_path: Path, processor: Made) -> None:
    slow = processor(400e9, 1e9)
    assert resolve_precision(run(tmp_path, "fp32"), slow, process(0, 1), NO_SUPERVISOR) == "fp32"
    with pytest.raises(SettingsError, match=r"does not train in fp16 here.*one of: bf16, fp32"):
        resolve_precision(run(tmp_path, "fp16"), slow, process(0, 1), NO_SUPERVISOR)


def test_all_processes_compute_in_what_the_first_has_found(tmp_path: Path, processor: Made) -> None:
    """Each would measure something else on a machine that does other work."""
    first = resolve_precision(run(tmp_path), processor(1e9, 100e9), process(0), NO_SUPERVISOR)
    other = resolve_precision(run(tmp_path), processor(400e9, 100e9), process(1), NO_SUPERVISOR)
    assert (first, other) == ("fp32", "fp32")
    later = resolve_precision(run(tmp_path), processor(400e9, 100e9), process(0), NO_SUPERVISOR)
    assert later == "fp32"
    fewer = resolve_precision(run(tmp_path), processor(400e9, 100e9), process(0, 3), NO_SUPERVISOR)
    assert fewer == "bf16"


def test_a_repeated_measurement_is_logged_and_recorded(
    tmp_path: Path,
    processor: Made,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    device = processor()
    rates = {"bf16": Rate(900e9, 3), "fp32": Rate(100e9)}
    monkeypatch.setattr(Cpu, "rates", lambda _: rates)
    assert resolve_precision(run(tmp_path), device, process(0), NO_SUPERVISOR) == "bf16"
    line = "precision bf16: GFLOP/s measured here: bf16 900 (best of 3), fp32 100"
    assert caplog.messages == [line]
    record = json.loads((tmp_path / "probe" / "precision.json").read_text())
    assert (record["precision"], record["measurements"]) == ("bf16", {"bf16": 3})


def test_a_process_that_hears_of_no_decision_says_so(tmp_path: Path, processor: Made) -> None:
    with pytest.raises(TransientError, match=r"process 1 did not learn precision\.json within 1 s"):
        resolve_precision(run(tmp_path), processor(1e9, 2e9), process(1), NO_SUPERVISOR)


def test_a_run_is_decided_by_what_was_measured_and_a_plan_by_what_is_offered(
    tmp_path: Path, processor: Made
) -> None:
    wanted = run(tmp_path).model_copy(update={"accelerator": processor(1e9, 100e9)})
    assert resolve_defaults(wanted, process(0, 1), NO_SUPERVISOR).execution.precision == "fp32"
    assert resolve_defaults(wanted, process(0, 1)).execution.precision == "bf16"


def test_a_processor_without_the_instructions_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "instructions", frozenset)
    assert Cpu().rates() == {}
    monkeypatch.setattr(cpu, "instructions", lambda: frozenset({"avx512_bf16"}))
    rates = Cpu().rates()
    assert tuple(rates) == OFFERED
    assert all(rate.flops_per_second > 0 for rate in rates.values())
