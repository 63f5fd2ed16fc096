"""The precision of a run: preferred or measured, and equal on all processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distributed.runs import settings
from regauge.accelerators import _matmul_rates, cpu
from regauge.accelerators.cpu import Cpu
from regauge.system.errors import SettingsError, TransientError
from regauge.system.processes import World
from regauge.training.defaults import check_precision, resolve_defaults, resolve_precision
from regauge.training.run_setup import NO_SUPERVISOR
from regauge.training.settings import TrainSettings

Made = Callable[..., Cpu]


@pytest.fixture
def build_accelerator(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a processor whose bf16 products are this many times as fast as fp32, if measured."""

    def build(speed: float | None) -> Cpu:
        speeds = {} if speed is None else {"bf16": speed, "fp32": 1.0}
        monkeypatch.setattr(Cpu, "precision_speeds", lambda _: speeds)
        return Cpu()

    return build


def run(folder: Path, precision: str = "auto") -> TrainSettings:
    return settings(folder, folder, execution={"precision": precision, "timeout_seconds": 1})


def process(rank: int, size: int = 2) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


@pytest.mark.parametrize(
    ("speed", "expected", "reason"),
    [
        (None, "fp32", "preferred by 'cpu'"),
        (2.13, "bf16", "matrix products 2.13 x as fast as fp32 here"),
        (1.25, "bf16", "matrix products 1.25 x as fast as fp32 here"),
        (1.24, "fp32", "matrix products in bf16 only 1.24 x as fast here"),
        (0.01, "fp32", "matrix products in bf16 only 0.01 x as fast here"),
    ],
)
def test_a_cpu_trains_in_bf16_if_it_was_measured_to_be_faster(
    tmp_path: Path,
    build_accelerator: Made,
    caplog: pytest.LogCaptureFixture,
    speed: float | None,
    expected: str,
    reason: str,
) -> None:
    caplog.set_level("INFO")
    settings = run(tmp_path).model_copy(update={"accelerator": build_accelerator(speed)})
    for reporter in (NO_SUPERVISOR, None):  # a run, and its dry run
        caplog.clear()
        resolved = resolve_defaults(settings, process(0, 1), reporter)
        assert resolved.execution.precision == expected
        assert f"precision {expected}: {reason}" in caplog.messages
    assert not list(tmp_path.iterdir())


def test_a_requested_precision_is_obeyed_with_a_warning_if_it_is_emulated(
    tmp_path: Path, build_accelerator: Made, caplog: pytest.LogCaptureFixture
) -> None:
    warning = "execution.precision: bf16 is emulated here, without a gain in speed"
    for speed, is_warned in ((None, True), (0.5, True), (2.0, False)):
        caplog.clear()
        accelerator = {"accelerator": build_accelerator(speed)}
        settings = run(tmp_path, "bf16").model_copy(update=accelerator)
        resolved = resolve_defaults(settings, process(0, 1), NO_SUPERVISOR)
        assert resolved.execution.precision == "bf16"
        assert (warning in caplog.messages) is is_warned


def test_a_configured_precision_is_not_measured(tmp_path: Path, build_accelerator: Made) -> None:
    slow = build_accelerator(4.0)
    assert resolve_precision(run(tmp_path, "fp32"), slow, process(0, 1), NO_SUPERVISOR) == "fp32"
    with pytest.raises(SettingsError, match=r"does not train in fp16 here.*one of: bf16, fp32"):
        resolve_precision(run(tmp_path, "fp16"), slow, process(0, 1), NO_SUPERVISOR)


def test_all_processes_use_the_precision_of_process_0(
    tmp_path: Path, build_accelerator: Made
) -> None:
    """The nodes of a run may have different processors."""

    def resolve(speed: float, world: World) -> str:
        return resolve_precision(run(tmp_path), build_accelerator(speed), world, NO_SUPERVISOR)

    assert resolve(0.5, process(0)) == "fp32"
    assert resolve(4.0, process(1)) == "fp32"
    assert resolve(4.0, process(0)) == "fp32"
    assert resolve(4.0, process(0, 3)) == "bf16"


def test_a_missing_decision_is_an_error_after_the_timeout(
    tmp_path: Path, build_accelerator: Made
) -> None:
    with pytest.raises(
        TransientError, match=r"process 1 waited 1 s for precision\.json of process 0"
    ):
        resolve_precision(run(tmp_path), build_accelerator(2.0), process(1), NO_SUPERVISOR)


@pytest.mark.parametrize(
    ("reported", "is_measured"),
    [
        (frozenset(), False),
        (frozenset({"avx512f", "fma"}), False),
        (frozenset({"avx512_bf16"}), True),
        (frozenset({"amx_bf16"}), True),
        (frozenset({"asimd", "bf16"}), True),
    ],
)
def test_only_a_cpu_with_bf16_instructions_is_measured(
    monkeypatch: pytest.MonkeyPatch, reported: frozenset[str], *, is_measured: bool
) -> None:
    monkeypatch.setattr(cpu, "instructions", lambda: reported)
    monkeypatch.setattr(cpu, "_find_rates", lambda: {"bf16": 5.0, "fp32": 2.0})
    assert Cpu().precision_speeds() == ({"bf16": 2.5, "fp32": 1.0} if is_measured else {})
    assert Cpu().precisions()[0] == ("bf16" if is_measured else "fp32")


def test_a_requested_precision_is_checked_without_a_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dry run would import torch for it."""
    monkeypatch.setattr(cpu, "instructions", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(cpu, "_find_rates", lambda: pytest.fail("it is measured"))
    for precision in ("fp32", "bf16"):
        assert check_precision(Cpu(), precision) == precision


def test_rates_are_measured_once_for_a_processor_and_a_version_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[dict[str, float]] = []

    def measure(floors: dict[str, float]) -> dict[str, float]:
        measured.append(floors)
        return {"bf16": 100.0 * len(measured), "fp32": 50.0}

    monkeypatch.setattr(_matmul_rates, "measure_rates", measure)
    floors: _matmul_rates.Rates = {"bf16": 10.0, "fp32": 10.0}
    first = _matmul_rates.find_rates("EPYC", frozenset({"fma"}), floors)
    assert _matmul_rates.find_rates("EPYC", frozenset({"fma"}), floors) == first
    assert len(measured) == 1
    assert _matmul_rates.find_rates("Xeon", frozenset({"fma"}), floors)["bf16"] == 200.0
    assert _matmul_rates.find_rates("EPYC", frozenset({"avx"}), floors)["bf16"] == 300.0
    for path in (tmp_path / "regauge").iterdir():
        path.write_text("{}")
    assert _matmul_rates.find_rates("EPYC", frozenset({"fma"}), floors)["bf16"] == 400.0
    implausible: _matmul_rates.Rates = {"bf16": 1e6, "fp32": 10.0}
    for expected in (500.0, 600.0):
        assert _matmul_rates.find_rates("Arm", frozenset(), implausible)["bf16"] == expected


def test_measured_rates_are_above_their_floors_and_leave_the_threads_alone() -> None:
    threads = torch.get_num_threads()
    rates = _matmul_rates.measure_rates({"bf16": 0.0, "fp32": 1e6})
    assert rates["fp32"] > 1e6
    assert rates["bf16"] > 0
    assert torch.get_num_threads() == threads
