"""What a run computes in: the first that is offered, what is measured, and the same for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distributed.runs import settings
from regauge.accelerators import cpu
from regauge.accelerators.cpu import Cpu
from regauge.errors import SettingsError, TransientError
from regauge.processes import World
from regauge.training.defaults import decide, settled
from regauge.training.session_setup import UNHEARD
from regauge.training.settings import Training

Made = Callable[..., Cpu]
OFFERED = ("bf16", "fp32")


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a processor that is measured so, in the order of what it offers."""

    def made(*rates: float) -> Cpu:
        monkeypatch.setattr(Cpu, "precisions", lambda _: OFFERED)
        monkeypatch.setattr(Cpu, "rates", lambda _: dict(zip(OFFERED, rates, strict=False)))
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
    assert settled(run(tmp_path), processor(*rates), process(0, 1), UNHEARD) == found
    assert not list(tmp_path.iterdir())


def test_what_is_set_is_taken_without_a_measurement(tmp_path: Path, processor: Made) -> None:
    slow = processor(400e9, 1e9)
    assert settled(run(tmp_path, "fp32"), slow, process(0, 1), UNHEARD) == "fp32"
    with pytest.raises(SettingsError, match=r"does not train in fp16 here.*one of: bf16, fp32"):
        settled(run(tmp_path, "fp16"), slow, process(0, 1), UNHEARD)


def test_all_processes_compute_in_what_the_first_has_found(tmp_path: Path, processor: Made) -> None:
    """Each would measure something else on a machine that does other work."""
    first = settled(run(tmp_path), processor(1e9, 100e9), process(0), UNHEARD)
    other = settled(run(tmp_path), processor(400e9, 100e9), process(1), UNHEARD)
    assert (first, other) == ("fp32", "fp32")
    later = settled(run(tmp_path), processor(400e9, 100e9), process(0), UNHEARD)
    assert later == "fp32"
    fewer = settled(run(tmp_path), processor(400e9, 100e9), process(0, 3), UNHEARD)
    assert fewer == "bf16"


def test_a_process_that_hears_of_no_decision_says_so(tmp_path: Path, processor: Made) -> None:
    with pytest.raises(TransientError, match=r"process 1 did not learn precision\.json within 1 s"):
        settled(run(tmp_path), processor(1e9, 2e9), process(1), UNHEARD)


def test_a_run_is_decided_by_what_was_measured_and_a_plan_by_what_is_offered(
    tmp_path: Path, processor: Made
) -> None:
    wanted = run(tmp_path).model_copy(update={"accelerator": processor(1e9, 100e9)})
    assert decide(wanted, process(0, 1), UNHEARD).execution.precision == "fp32"
    assert decide(wanted, process(0, 1)).execution.precision == "bf16"


def test_a_processor_without_the_instructions_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "instructions", frozenset)
    assert Cpu().rates() == {}
    monkeypatch.setattr(cpu, "instructions", lambda: frozenset({"avx512_bf16"}))
    rates = Cpu().rates()
    assert tuple(rates) == OFFERED
    assert all(rate > 0 for rate in rates.values())
