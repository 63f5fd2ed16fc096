"""The precision of a run: preferred or measured, and equal on all processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed.runs import settings
from regauge.accelerators import MatmulRate, cpu
from regauge.accelerators.cpu import Cpu
from regauge.errors import SettingsError, TransientError
from regauge.processes import World
from regauge.training.defaults import resolve_defaults, resolve_precision
from regauge.training.run_setup import NO_SUPERVISOR
from regauge.training.settings import TrainSettings

Made = Callable[..., Cpu]
OFFERED = ("bf16", "fp32")


@pytest.fixture
def build_accelerator(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a device with these measured rates, in the order of its preferred precisions."""

    def build(*rates: float) -> Cpu:
        monkeypatch.setattr(Cpu, "precisions", lambda _: OFFERED)
        measured = dict(zip(OFFERED, map(MatmulRate, rates), strict=False))
        monkeypatch.setattr(Cpu, "matmul_rates", lambda _: measured)
        return Cpu()

    return build


def run(folder: Path, precision: str = "auto") -> TrainSettings:
    return settings(folder, folder, execution={"precision": precision, "timeout_seconds": 1})


def process(rank: int, size: int = 2) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((), "bf16"),
        ((400e9, 100e9), "bf16"),
        ((90e9, 100e9), "bf16"),
        ((1e9, 100e9), "fp32"),
    ],
)
def test_the_preferred_precision_is_used_unless_another_is_much_faster(
    tmp_path: Path, build_accelerator: Made, rates: tuple[float, ...], expected: str
) -> None:
    assert (
        resolve_precision(run(tmp_path), build_accelerator(*rates), process(0, 1), NO_SUPERVISOR)
        == expected
    )
    assert not list(tmp_path.iterdir())


def test_a_configured_precision_is_not_measured(tmp_path: Path, build_accelerator: Made) -> None:
    slow = build_accelerator(400e9, 1e9)
    assert resolve_precision(run(tmp_path, "fp32"), slow, process(0, 1), NO_SUPERVISOR) == "fp32"
    with pytest.raises(SettingsError, match=r"does not train in fp16 here.*one of: bf16, fp32"):
        resolve_precision(run(tmp_path, "fp16"), slow, process(0, 1), NO_SUPERVISOR)


def test_all_processes_use_the_precision_of_process_0(
    tmp_path: Path, build_accelerator: Made
) -> None:
    """Each process would measure different rates on a busy machine."""
    first = resolve_precision(
        run(tmp_path), build_accelerator(1e9, 100e9), process(0), NO_SUPERVISOR
    )
    other = resolve_precision(
        run(tmp_path), build_accelerator(400e9, 100e9), process(1), NO_SUPERVISOR
    )
    assert (first, other) == ("fp32", "fp32")
    later = resolve_precision(
        run(tmp_path), build_accelerator(400e9, 100e9), process(0), NO_SUPERVISOR
    )
    assert later == "fp32"
    fewer = resolve_precision(
        run(tmp_path), build_accelerator(400e9, 100e9), process(0, 3), NO_SUPERVISOR
    )
    assert fewer == "bf16"


def test_a_repeated_measurement_is_logged_and_recorded(
    tmp_path: Path,
    build_accelerator: Made,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    device = build_accelerator()
    rates = {"bf16": MatmulRate(900e9, 3), "fp32": MatmulRate(100e9)}
    monkeypatch.setattr(Cpu, "matmul_rates", lambda _: rates)
    assert resolve_precision(run(tmp_path), device, process(0), NO_SUPERVISOR) == "bf16"
    line = "precision bf16: measured GFLOP/s: bf16 900 (best of 3), fp32 100"
    assert caplog.messages == [line]
    record = json.loads((tmp_path / "probe" / "precision.json").read_text())
    assert (record["precision"], record["measurements"]) == ("bf16", {"bf16": 3})


def test_a_missing_decision_is_an_error_after_the_timeout(
    tmp_path: Path, build_accelerator: Made
) -> None:
    with pytest.raises(
        TransientError, match=r"process 1 waited 1 s for precision\.json of process 0"
    ):
        resolve_precision(run(tmp_path), build_accelerator(1e9, 2e9), process(1), NO_SUPERVISOR)


def test_a_run_measures_its_precision_and_a_plan_does_not(
    tmp_path: Path, build_accelerator: Made
) -> None:
    run_settings = run(tmp_path).model_copy(update={"accelerator": build_accelerator(1e9, 100e9)})
    assert (
        resolve_defaults(run_settings, process(0, 1), NO_SUPERVISOR).execution.precision == "fp32"
    )
    assert resolve_defaults(run_settings, process(0, 1)).execution.precision == "bf16"


@pytest.mark.parametrize(
    ("reported", "offered"),
    [
        (frozenset(), ("fp32", "bf16")),
        (frozenset({"avx512_bf16"}), ("fp32", "bf16")),
        (frozenset({"avx512_bf16", "amx_bf16"}), ("bf16", "fp32")),
        (frozenset({"asimd", "bf16"}), ("bf16", "fp32")),
    ],
)
def test_only_a_cpu_with_fast_bf16_instructions_is_measured(
    monkeypatch: pytest.MonkeyPatch, reported: frozenset[str], offered: tuple[str, ...]
) -> None:
    """A choice by measurement depends on the load of the machine."""
    monkeypatch.setattr(cpu, "instructions", lambda: reported)
    assert Cpu().precisions() == offered
    rates = Cpu().matmul_rates()
    assert tuple(rates) == (OFFERED if offered == OFFERED else ())
    assert all(rate.flops_per_second > 0 for rate in rates.values())
