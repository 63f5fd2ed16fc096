"""Training in fp8: emulated on the CPU, with the checkpoints, resumes and strategies of bf16."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from distributed.jobs import lines, losses
from distributed.runs import Runs, cases, settings, strategy_table
from distributed.test_equality import LONG
from distributed.test_resume import check_resume
from regauge.accelerators.cpu import Cpu
from regauge.accelerators.cuda import Cuda
from regauge.config import dump, merge
from regauge.models.precision import apply_precision
from regauge.run_folders.checkpoint_files import checkpoint_name
from regauge.system.errors import SettingsError
from regauge.system.processes import World
from regauge.training.defaults import check_precision, resolve_execution

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed: fp8 is not proved here; `make test-next` has it",
)
BF16 = merge(LONG, {"execution": {"precision": "bf16"}})
FP8: dict[str, Any] = {**LONG, "job": "train_in_fp8"}
TOLERANCE = 5e-3
"""The factors of products have 4 bits, and a loss is a mean of many values."""


def tensor_specs(folder: Path, step: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a checkpoint."""
    specs = {}
    for path in (folder / "checkpoints" / checkpoint_name(step)).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                specs[name] = part.get_dtype(), tuple(part.get_shape())
    return specs


@needs_torchao
@pytest.mark.parametrize(
    ("size", "strategy", "task"),
    cases(
        [
            (2, "ddp", "llama"),
            (2, "fsdp", "llama"),
            (3, "zero1", "mlm"),
            (4, "hsdp", "mlm"),
            (2, "fsdp", "contrastive"),
        ],
        [(2, "ddp", "llama"), (2, "fsdp", "llama")],
    ),
)
def test_a_model_trains_in_fp8_with_every_strategy(
    runs: Runs, size: int, strategy: str, task: str
) -> None:
    alone = losses(lines(runs.train_once(1, task, **FP8)))
    folder = runs.train_once(size, task, strategy=strategy_table(strategy), **FP8)
    run_losses = losses(lines(folder))
    assert run_losses == pytest.approx(alone, rel=TOLERANCE)
    expected = losses(lines(runs.train_once(1, task, **BF16)))
    assert run_losses == pytest.approx(expected, rel=TOLERANCE)
    assert run_losses != expected, "this is bf16"
    assert run_losses[-1] < run_losses[0]


@needs_torchao
def test_a_checkpoint_has_the_tensors_of_a_bf16_run(runs: Runs) -> None:
    expected = tensor_specs(runs.train_once(1, "llama", **BF16), 20)
    assert tensor_specs(runs.train_once(1, "llama", **FP8), 20) == expected
    assert {dtype for dtype, _ in expected.values()} == {"F32"}


@needs_torchao
@pytest.mark.parametrize(("size", "strategy"), [(1, "single"), (2, "fsdp")])
def test_a_resume_in_fp8_is_exact(runs: Runs, size: int, strategy: str) -> None:
    whole, _ = check_resume(runs, size, "llama", strategy=strategy_table(strategy), **FP8)
    assert json.loads((whole / "run.json").read_text())["execution"]["precision"] == "fp8"


class Block(nn.Module):
    """A block with two layers that fit and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        self.odd = nn.Linear(32, 24)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.odd(self.deep(self.wide(inputs)))


class Model(nn.Module):
    """An embedding and a head around two blocks."""

    compute_dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList([Block(), Block()])


@needs_torchao
def test_layers_that_fit_are_converted_and_keep_their_weights() -> None:
    model = Model()
    before = dict(model.named_parameters())
    remark = apply_precision(model, model.blocks, "fp8", emulates_fp8=True)
    assert remark == "4 linear layers in fp8; in bf16: odd"
    assert model.compute_dtype == torch.bfloat16
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    converted = [name for name, layer in model.named_modules() if "Float8" in type(layer).__name__]
    assert converted == [f"blocks.{index}.{name}" for index in (0, 1) for name in ("wide", "deep")]
    config = model.get_submodule("blocks.0.wide").config
    assert config.pad_inner_dim, "a GPU refuses products over a number of rows that is no multiple"


@needs_torchao
def test_products_are_rounded_to_fp8() -> None:
    torch.manual_seed(0)
    block = Block().bfloat16()
    inputs = torch.randn(5, 32).bfloat16()  # 5 rows: the gradient's product is padded
    exact = block.wide(inputs).detach()
    apply_precision(Model(), [block], "fp8", emulates_fp8=True)
    rounded = block.wide(inputs)
    error = float((rounded.detach() - exact).abs().max() / exact.abs().max())
    assert 2**-9 < error < 2**-3
    rounded.sum().backward()
    assert block.wide.weight.grad is not None
    assert block.wide.weight.grad.isfinite().all()


def test_another_dtype_replaces_fp8() -> None:
    model = Model()
    assert apply_precision(model, model.blocks, "fp8", torch.float64) is None
    assert model.compute_dtype == torch.float64
    assert type(model.blocks[0].wide) is nn.Linear


@needs_torchao
@pytest.mark.parametrize("sizes", [(24, 40), ()])
def test_a_model_without_layers_that_fit_is_refused(sizes: tuple[int, ...]) -> None:
    blocks = [nn.Sequential(nn.Linear(*sizes))] if sizes else []
    shown = "24 x 40" if sizes else "there is none"
    with pytest.raises(SettingsError, match=f"can compute in fp8: {shown}"):
        apply_precision(Model(), blocks, "fp8", emulates_fp8=True)


def test_the_cpu_is_refused_with_the_reason(runs: Runs, tmp_path: Path) -> None:
    fp8 = {"execution": {"precision": "fp8"}}
    run = dump(settings(tmp_path / "out", runs.data["packed"], "llama", **fp8))
    (tmp_path / "run.json").write_text(json.dumps(run))
    command = [sys.executable, "-m", "regauge", "train", str(tmp_path / "run.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "fp8" in line]
    assert "'cpu' does not train in fp8 here: fp8 needs an NVIDIA GPU of compute" in line
    assert 'set execution.precision = "bf16"' in line


def test_older_gpus_and_a_missing_torchao_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: "torchao")
    for capability, is_refused in (((8, 0), True), ((8, 9), True), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda value=capability: value)
        if is_refused:
            with pytest.raises(SettingsError, match=rf"Hopper\); this GPU has 8\.{capability[1]}"):
                check_precision(Cuda(), "fp8")
        else:
            assert check_precision(Cuda(), "fp8") == "fp8"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"needs torchao.*pip install 'regauge\[fp8\]'"):
        check_precision(Cuda(), "fp8")


def test_a_torchao_that_does_not_fit_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(
        SettingsError, match=r"torchao cannot be imported: import of torchao\.float8"
    ):
        apply_precision(Model(), Model().blocks, "fp8", emulates_fp8=True)


def test_an_evaluation_in_fp8_is_refused(tmp_path: Path) -> None:
    execution = settings(tmp_path, tmp_path, execution={"precision": "fp8"}).execution
    with pytest.raises(SettingsError, match="'fp8' is only for training"):
        resolve_execution(Cpu(), execution, World())
