"""Accelerators whose devices are not available, tested against stand-ins that record all calls.

The tests check the vendor's documented names, flags and order. They do not prove that a run works
on the device, and no result enters the support table.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from regauge import accelerators, config
from regauge.accelerators import Accelerator, cuda, gaudi, neuron, neuron_native, tpu
from regauge.system import processes
from regauge.system.errors import PreflightError, SettingsError
from regauge.training.defaults import resolve_defaults
from regauge.training.settings import TrainSettings

Calls = list[tuple[str, dict[str, str]]]
"""Names of called functions, with the environment at that moment."""
FLAGS = "--auto-cast none --model-type transformer --optlevel 1"


class StandIn(ModuleType):
    """A stand-in for a module that records every call of its functions."""

    def __init__(self, name: str, calls: Calls, results: dict[str, Any]) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []
        self._calls, self._results = calls, results

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def record_call(*_: Any, **__: Any) -> Any:
            self._calls.append((f"{self.__name__}.{name}", dict(os.environ)))
            return self._results.get(name)

        return record_call


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without variables of the vendors, and undo the changes of an accelerator."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in list(os.environ):
        if name.startswith(("NEURON", "PT_HPU_", "PJRT_", "NCCL_", "TORCH_TPU_", "HF_DEACT")):
            del os.environ[name]
    monkeypatch.setattr(torch, "set_num_threads", lambda count: count)


@pytest.fixture
def install_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    """Return a function that installs stand-ins of modules and returns their recorded calls."""

    def install(*names: str, **results: Any) -> Calls:
        calls: Calls = []
        for name in names:
            double = StandIn(name, calls, results)
            monkeypatch.setitem(sys.modules, name, double)
            parent, _, last = name.rpartition(".")
            if parent in sys.modules:
                monkeypatch.setattr(sys.modules[parent], last, double, raising=False)
        return calls

    return install


def parse(kind: str, **table: Any) -> Any:
    return config.parse_choice("accelerators", {"kind": kind, **table})


def mark(accelerator: Accelerator, calls: Calls) -> list[str]:
    """Return the calls at the end of two microbatches and of their step."""
    before = len(calls)
    accelerator.end_microbatch()
    accelerator.end_microbatch()
    accelerator.end_step()
    return [name for name, _ in calls[before:]]


def test_the_neuron_compiler_is_configured_before_its_client_starts(
    install_modules: Callable[..., Calls],
) -> None:
    calls = install_modules("torch_xla", device=torch.device("cpu"))
    accelerator = parse("neuron", target="trn1", auto_cast="all", cache="s3://graphs/bert")
    accelerator.claim(0, 1)
    name, environment = calls[0]
    assert name == "torch_xla.device"
    assert environment["PJRT_DEVICE"] == "NEURON"
    assert environment["NEURON_CC_FLAGS"] == (
        "--target trn1 --auto-cast all --auto-cast-type bf16 --model-type transformer --optlevel 1"
    )
    assert environment["NEURON_COMPILE_CACHE_URL"] == "s3://graphs/bert"
    assert environment["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "0"
    assert mark(accelerator, calls) == ["torch_xla.sync"] * 3
    assert accelerator.flags()[-1] == "1"


def test_neuron_always_passes_auto_cast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(neuron, "PRODUCT", tmp_path / "none")
    assert " ".join(neuron.Neuron().flags()) == FLAGS
    (tmp_path / "name").write_text("trn1.32xlarge\n")
    monkeypatch.setattr(neuron, "PRODUCT", tmp_path / "name")
    assert " ".join(neuron.Neuron().flags()) == f"--target trn1 {FLAGS}"
    assert neuron.Neuron().chip_peak("bf16").flops_per_second == {"bf16": 95e12}
    assert neuron.Neuron(target="trn2").chip_peak("bf16").flops_per_second == {}


def test_a_foreign_value_is_refused(install_modules: Callable[..., Calls]) -> None:
    install_modules("torch_xla", device=torch.device("cpu"))
    os.environ["NEURON_CC_FLAGS"] = "--optlevel 3"
    with pytest.raises(
        SettingsError, match="NEURON_CC_FLAGS=--optlevel 3 in the environment contradicts"
    ):
        neuron.Neuron().claim(0, 1)


@pytest.mark.parametrize(("mode", "marks"), [("eager", 0), ("lazy", 3)])
def test_gaudi_marks_steps_only_in_lazy_mode(
    mode: str, marks: int, install_modules: Callable[..., Calls], tmp_path: Path
) -> None:
    names = ("", ".torch", ".torch.core", ".torch.hpu", ".torch.distributed")
    root = "habana_frameworks"
    calls = install_modules(*(root + name for name in names), f"{root}.torch.distributed.hccl")
    accelerator = parse("gaudi", mode=mode, recipe_cache=str(tmp_path))
    assert accelerator.claim(0, 1) == torch.device("hpu")
    assert os.environ["PT_HPU_LAZY_MODE"] == ("1" if marks else "0")
    assert os.environ["PT_HPU_RECIPE_CACHE_CONFIG"] == f"{tmp_path},false,1024"
    assert accelerator.distributed_backend() == "hccl"
    assert mark(accelerator, calls) == ["habana_frameworks.torch.core.mark_step"] * marks
    assert accelerator.is_lazy == bool(marks)
    assert (accelerator.compile_obstacle() is None) == (mode == "eager")
    assert accelerator.compile_backend() == "hpu_backend"


@pytest.mark.parametrize(
    ("table", "wrapped"),
    [({"mode": "lazy"}, 1), ({"mode": "lazy", "hpu_graphs": False}, 0), ({"mode": "eager"}, 0)],
)
def test_gaudi_replays_saved_models_in_lazy_mode(
    table: dict[str, str], wrapped: int, install_modules: Callable[..., Calls]
) -> None:
    root = "habana_frameworks"
    calls = install_modules(root, f"{root}.torch", f"{root}.torch.hpu")
    parse("gaudi", **table).prepare_for_inference(torch.nn.Identity())
    assert [name for name, _ in calls] == [f"{root}.torch.hpu.wrap_in_hpu_graph"] * wrapped


def test_nccl_is_configured_before_a_gpu_is_claimed_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = parse("cuda", nccl={"SOCKET_IFNAME": "eth0", "NTHREADS": 512}, cuda_graphs=True)
    values: list[str | None] = []
    set_device = lambda _: values.append(os.environ.get("NCCL_NTHREADS"))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    assert accelerator.claim(0, 1) == torch.device("cuda", 0)
    assert values == ["512"]
    assert "NCCL: SOCKET_IFNAME=eth0 NTHREADS=512" in caplog.text
    assert accelerator.compile_options() == {"triton.cudagraphs": True}
    assert parse("cuda").compile_options() == {}
    os.environ["NCCL_SOCKET_IFNAME"] = "eth1"
    with pytest.raises(
        SettingsError, match="NCCL_SOCKET_IFNAME=eth1 in the environment contradicts"
    ):
        accelerator.claim(0, 1)
    with pytest.raises(SettingsError, match="write NCCL_DEBUG as DEBUG"):
        parse("cuda", nccl={"NCCL_DEBUG": "INFO"})


def test_a_device_in_use_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_: int) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nMore")

    monkeypatch.setattr(torch.cuda, "set_device", busy)
    with pytest.raises(PreflightError) as caught:
        accelerators.claim_device(parse("cuda"), 3, 1)
    assert "\n" not in str(caught.value)
    assert "device 3 of 'cuda' cannot be claimed: CUDA error" in str(caught.value)
    assert "check for other processes with `regauge doctor`" in str(caught.value)


def test_gaudi_peaks_depend_on_the_device_name(install_modules: Callable[..., Calls]) -> None:
    root = "habana_frameworks"
    install_modules(root, f"{root}.torch", f"{root}.torch.hpu", get_device_name="GAUDI2")
    assert gaudi.Gaudi().chip_peak("bf16").flops_per_second == {"bf16": 432e12}
    assert gaudi.Gaudi().chip_peak("fp32").source == "unknown"


def test_an_sdk_without_its_device_is_unavailable_with_a_reason(
    install_modules: Callable[..., Calls], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_modules("torch_neuronx", "torch_xla", "habana_frameworks")
    monkeypatch.setattr(neuron, "version", lambda name: f"{name} 2.9")
    monkeypatch.setattr(neuron, "torch_xla_obstacle", lambda: None)
    for module in (neuron, gaudi):
        monkeypatch.setattr(module, "DEVICE", tmp_path / "none")
    assert "the Neuron driver shows no device" in neuron.Neuron.available().reason
    assert "the Gaudi driver shows no device" in gaudi.Gaudi.available().reason
    assert "torch.accelerator offers" in neuron_native.NeuronNative.available().reason
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    assert "neuron-native" in neuron.Neuron.available().reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "fsdp"}, "torch's fully_shard does not record"),
        ({"optimizer": {"kind": "sgd"}}, "needs the learning rate as a number"),
        (
            {"execution": {"activation_checkpointing": "full"}},
            "would undo activation checkpointing",
        ),
    ],
)
def test_a_lazy_device_refuses_unsupported_settings(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {
        "output": {"folder": "out"},
        "data": {"path": "data"},
        "task": "mlm",
        "model": {"architecture": "bert"},
        "batch": {"rows": 8, "microbatch_rows": 2},
        "stop": {"steps": 1},
        "accelerator": {"kind": "gaudi", "mode": "lazy"},
    }
    monkeypatch.setattr("regauge.accelerators.check_available", lambda _: None)
    run = config.build(TrainSettings, config.merge(table, change))
    with pytest.raises(SettingsError, match=message):
        resolve_defaults(run, processes.World())


def test_an_fp32_run_refuses_the_casts_of_the_neuron_compiler() -> None:
    with pytest.raises(SettingsError, match=r"auto_cast = 'all' casts fp32 operations to bf16"):
        parse("neuron", auto_cast="all").set_precision("fp32")
    parse("neuron", auto_cast="all").set_precision("bf16")
    accelerator = parse("neuron")
    accelerator.set_precision("fp32")
    assert accelerator.fp32_settings()["auto_cast"] == "none"


def test_neuron_native_keeps_shapes_static_and_fp32_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: index)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    accelerator = neuron_native.NeuronNative()
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True):
        accelerator.claim(0, 1)
        assert torch._dynamo.config.automatic_dynamic_shapes is False
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "1"
    assert not accelerator.has_dynamic_shapes
    accelerator.set_precision("fp32")
    assert accelerator.fp32_settings()["NEURON_CC_FLAGS"] == "--auto-cast none"
    assert accelerator.fp32_settings()["float32_matmul_precision"] == "highest"


def test_cuda_computes_fp32_without_tf32() -> None:
    modules = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = [module.fp32_precision for module in modules]
    try:
        cuda.Cuda().set_precision("tf32")
        assert set(cuda.Cuda().fp32_settings().values()) == {"tf32"}
        cuda.Cuda().set_precision("fp32")
        assert set(cuda.Cuda().fp32_settings().values()) == {"ieee"}
    finally:
        for module, value in zip(modules, before, strict=True):
            module.fp32_precision = value


def test_torch_tpu_without_a_chip_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert tpu.Tpu.available().reason == "torch_tpu is not installed"
    package = tmp_path / "torch_tpu"
    package.mkdir()
    (package / "__init__.py").write_text("")
    metadata = tmp_path / "torch_tpu-0.2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-tpu\nVersion: 0.2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    availability = tpu.Tpu.available()
    assert availability.fitness == 0
    assert availability.reason == "torch_tpu 0.2.0 is installed, but no TPU is on the PCI bus"
    monkeypatch.setattr(tpu, "count_tpu_chips", lambda: 4)
    assert "torch.accelerator offers" in tpu.Tpu.available().reason
    assert tpu.Tpu().num_devices() == 4


def test_a_tpu_process_compiles_with_the_backend_and_the_cache_of_the_vendor(
    tmp_path: Path,
) -> None:
    accelerator = parse("tpu", cache="gs://bucket/programs")
    with pytest.raises(RuntimeError, match="tpu"):  # torch knows no such device here
        accelerator.claim(3, 1)
    assert os.environ["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"] == "gs://bucket/programs"
    accelerator.set_graph_cache(tmp_path)
    assert os.environ["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"] == "gs://bucket/programs"
    assert accelerator.compile_backend() == "tpu"
    assert accelerator.precisions() == ("bf16", "fp32")
    assert not accelerator.has_dynamic_shapes


def test_the_variables_of_the_tpu_launcher_reach_the_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = tpu.LAUNCH_CODE.replace(
        "import torch\n",
        "class torch: pass\n"
        "torch.tpu = torch.distributed = torch\n"
        "torch.set_tpu_launch_env = lambda nproc_per_node: os.environ.update(\n"
        "    TORCH_TPU_TOPOLOGY=f'{nproc_per_node}x1')\n",
    )
    monkeypatch.setattr(tpu, "LAUNCH_CODE", launcher)
    assert tpu.Tpu().launch_variables(1) == {}
    assert tpu.Tpu().launch_variables(4) == {"TORCH_TPU_TOPOLOGY": "4x1"}
    monkeypatch.setattr(tpu, "LAUNCH_CODE", "raise SystemExit('no chips here')")
    with pytest.raises(PreflightError, match=r"cannot prepare 4 processes: no chips here"):
        tpu.Tpu().launch_variables(4)
