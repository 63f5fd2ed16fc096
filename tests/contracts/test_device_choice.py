"""The accelerator of a run is printed and recorded with its reason, and so are those refused."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distributed import datasets
from distributed.runs import settings
from regauge import accelerators
from regauge.accelerators import generic, is_cpu_only_torch, list_device_plugins, offers_only_cpu
from regauge.system import choices, processes
from regauge.training.run import attempt

FITTEST, REASON = accelerators.choose()
REFUSED = {
    kind: availability.reason
    for kind, availability in accelerators.survey().items()
    if availability.fitness == 0
}


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that adds a device to torch by an entry point."""
    metadata = tmp_path / "abacus-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nabacus = abacus:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plugin")
def test_a_plugin_adds_a_device_to_a_build_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "abacus" in list_device_plugins()
    assert not offers_only_cpu()
    assert accelerators.choose_without_torch() is None, "only torch knows the device"
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert list_device_plugins() == []
    assert offers_only_cpu() == is_cpu_only_torch()


def test_without_a_plugin_the_generic_device_needs_no_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generic, "offers_only_cpu", lambda: True)
    monkeypatch.delitem(sys.modules, "torch")
    availability = generic.Generic.available()
    assert availability.fitness == 0
    assert availability.reason == generic.NO_PLUGIN
    assert "torch" not in sys.modules


def test_a_choice_prints_its_reason_and_the_refused_accelerators(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert accelerators.resolve(None) == FITTEST
    first, second = [record.getMessage() for record in caplog.records]
    assert first == f"accelerator {REASON}"
    for kind, reason in REFUSED.items():
        assert f"{kind}: {reason}" in second
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert accelerators.resolve(None, quiet=True) == FITTEST
        assert accelerators.resolve(FITTEST) == FITTEST
    assert not caplog.records


@pytest.mark.timeout(120)
def test_a_run_records_its_device_and_warns_of_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, folder = datasets.write_packed(tmp_path / "data"), tmp_path / "run"
    requested = settings(folder, data, "mlm", accelerator="cpu", stop={"steps": 1})
    attempt(requested, processes.World())
    path = folder / "environment.json"
    environment = json.loads(path.read_text())
    expected = {"kind": "cpu", "type": "cpu", "is_requested": True, "refused": REFUSED}
    assert expected.items() <= environment["device"].items()
    assert environment["device"]["reason"] == accelerators.REQUESTED
    environment["device"]["kind"] = "gaudi"
    path.write_text(json.dumps(environment))
    automatic = settings(folder, data, "mlm", stop={"steps": 2})
    automatic = automatic.model_copy(update={"accelerator": None})
    with caplog.at_level(logging.INFO):
        attempt(automatic, processes.World())
    device = json.loads(path.read_text())["device"]
    assert device["kind"] == FITTEST.kind
    assert not device["is_requested"]
    reason = REASON.removeprefix(f"{FITTEST.kind}: ")
    assert device["reason"] == reason
    message = f"this attempt runs on accelerator '{FITTEST.kind}', the previous one ran on 'gaudi'"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{message}: {reason}" in warnings
    assert FITTEST.kind in choices.names("accelerators")
