"""LoRA: every strategy trains the same adapters; they are saved separately and merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from distributed import datasets, jobs
from distributed.jobs import lines, losses, max_difference, read_checksum
from distributed.runs import FULL, LLAMA, Runs, cases, settings
from regauge.cli import main
from regauge.models import weights as folders
from regauge.models.architectures import build_model
from regauge.models.settings import Model
from regauge.system import processes
from regauge.system.errors import DataError
from regauge.training.run import attempt

peft = pytest.importorskip("peft", reason="not proved here: adapters, which need peft")

pytestmark = pytest.mark.filterwarnings(  # peft reads what transformers has renamed
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
ADAPTERS = {"rank": 4, "alpha": 16.0, "dropout": 0.1}
CHANGES: dict[str, Any] = {
    "model": {"lora": ADAPTERS},
    "optimizer": {"learning_rate": 0.02},
    "stop": {"steps": 10},
    "output": {"checkpoint": {"every_steps": 5, "keep_last": 10}},
}
SPREAD = [(2, "ddp"), (2, "fsdp"), (3, "zero1"), (4, "hsdp")]


@pytest.mark.parametrize(
    ("task", "size", "strategy"),
    cases(
        [(task, *case) for task in ("llama", "mlm") for case in SPREAD],
        [("llama", 2, "fsdp")],
    ),
)
def test_every_strategy_trains_the_same_adapters(
    runs: Runs, size: int, strategy: str, task: str, figure: Callable[[str, float], None]
) -> None:
    single_run = runs.train_once(1, task, strategy="single", **CHANGES)
    distributed_run = runs.train_once(size, task, strategy=strategy, **CHANGES)
    single_losses = losses(lines(single_run))
    assert single_losses[-1] < single_losses[0] - 0.01
    difference = max_difference(single_run, distributed_run)
    figure("equality of adapters", difference)
    assert difference < 1e-5
    assert read_checksum(single_run) == read_checksum(distributed_run)
    whole, other = jobs.weights(single_run), jobs.weights(distributed_run)
    assert whole.keys() == other.keys()
    assert not any("lora" in name or "base_layer" in name for name in whole)
    for name, value in whole.items():
        assert (value - other[name]).norm() <= 5e-3 * value.norm(), name


def test_a_checkpoint_contains_only_the_adapters(runs: Runs) -> None:
    folder = runs.train_once(2, "llama", strategy="fsdp", **CHANGES)
    names: set[str] = set()
    for file in (folder / "checkpoints" / "step-00000005").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    assert names
    assert all(".lora_" in name for name in names)
    assert any(name.startswith("optimizer.exp_avg.") for name in names)
    rest = json.loads((folder / "checkpoints" / "step-00000005" / "state.json").read_text())
    assert int(rest["frozen_checksum"], 16) > 0


@pytest.mark.parametrize(
    ("size", "strategy"), cases([(1, "single"), (2, "ddp"), (2, "fsdp")], [(2, "fsdp")])
)
def test_a_resumed_run_is_bitwise_equal(runs: Runs, size: int, strategy: str) -> None:
    whole = runs.train_once(size, "llama", strategy=strategy, **CHANGES)
    folder = runs.folder("resumed")
    for steps in (5, 10):
        changes = {**CHANGES, "strategy": strategy, "stop": {"steps": steps}}
        changes["optimizer"] = {**CHANGES["optimizer"], "schedule": {"kind": "constant"}}
        runs.job("train", size, folder, "llama", changes)
    again = runs.folder("at-once")
    runs.job("train", size, again, "llama", changes)
    assert losses(lines(folder)) == losses(lines(again)) != losses(lines(whole))
    ours, theirs = jobs.weights(folder), jobs.weights(again)
    assert all(value.equal(theirs[name]) for name, value in ours.items())


def test_a_run_can_start_from_merged_adapters(runs: Runs) -> None:
    adapted = runs.train_once(1, "llama", **CHANGES)
    start = {"path": str(adapted), "init_from": {"path": str(adapted), "step": "latest"}}
    folder = runs.folder("merged")
    runs.job("train", 1, folder, "llama", {"model": {**start, "dropout": 0.0}})
    assert (folder / "start" / "model.safetensors").is_file()
    assert not (folder / "adapter").exists()
    assert len(losses(lines(folder))) == 12


@pytest.mark.full
def test_adapters_are_resharded_between_strategies(runs: Runs) -> None:
    folder = runs.folder("moved")
    for size, strategy, steps in ((2, "fsdp", 5), (1, "single", 8), (2, "zero1", 10)):
        changes = {**CHANGES, "strategy": strategy, "stop": {"steps": steps}}
        changes["optimizer"] = {**CHANGES["optimizer"], "schedule": {"kind": "constant"}}
        runs.job("train", size, folder, "llama", changes)
    once = runs.train_once(1, "llama", **{**changes, "strategy": "single"})
    assert max_difference(once, folder) < 1e-5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    model, _ = build_model(Model(**LLAMA), "causal", datasets.VOCABULARY, seed=11)
    folders.save_model_folder(root / "base", model.config, model.named_parameters(), root)
    return root / "base"


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train adapters on saved weights; return the run, and the outputs of its unmerged model."""
    root = tmp_path_factory.mktemp("run")
    data = datasets.write_packed(root / "data")
    changes = {**CHANGES, "model": {"path": str(base), "lora": {**ADAPTERS, "dropout": 0.0}}}
    outputs = jobs.final_outputs(str(root / "run"), str(data), "llama", changes)
    return {"folder": root / "run", "data": data, "changes": changes, **outputs}


def test_a_run_writes_a_merged_model_and_the_adapters(run: dict[str, Any], base: Path) -> None:
    tokens = run["tokens"]
    plain = AutoModelForCausalLM.from_pretrained(run["folder"] / "model").eval()
    first = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, run["output"], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(first(tokens).logits, run["output"], rtol=1e-2, atol=1e-2)
        adapted = peft.PeftModel.from_pretrained(first, run["folder"] / "adapter").eval()
        torch.testing.assert_close(adapted(tokens).logits, run["output"], rtol=1e-5, atol=1e-5)
    document = json.loads((run["folder"] / "adapter" / "adapter_config.json").read_text())
    assert document["base_model_name_or_path"] == str(base)


@pytest.mark.parametrize("step", ["final", "10", "latest"])
def test_every_export_format_is_merged_except_peft(
    run: dict[str, Any], base: Path, tmp_path: Path, step: str
) -> None:
    whole = folders.read_weights(run["folder"] / "model")
    export = ["export", str(run["folder"]), f"export.step={step}"]
    assert main([*export, "--format", "hf", "--to", str(tmp_path / "hf")]) == 0
    exported = folders.read_weights(tmp_path / "hf")
    assert exported.keys() == whole.keys()
    assert all(exported[name].equal(value) for name, value in whole.items())
    assert main([*export, "--format", "peft", "--to", str(tmp_path / "adapter")]) == 0
    first = AutoModelForCausalLM.from_pretrained(base).eval()
    adapted = peft.PeftModel.from_pretrained(first, tmp_path / "adapter").eval()
    with torch.no_grad():
        output = adapted(run["tokens"]).logits
    torch.testing.assert_close(output, run["output"], rtol=1e-5, atol=1e-5)


def test_an_earlier_checkpoint_exports_another_model(run: dict[str, Any], tmp_path: Path) -> None:
    export = ["export", str(run["folder"]), "export.step=5", "--format", "hf"]
    assert main([*export, "--to", str(tmp_path / "hf")]) == 0
    exported, whole = (
        folders.read_weights(tmp_path / "hf"),
        folders.read_weights(run["folder"] / "model"),
    )
    changed = {name for name in whole if not exported[name].equal(whole[name])}
    assert changed == {name for name in whole if name.endswith("proj.weight")}


def test_a_run_without_adapters_cannot_export_them(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.train_once(1, "llama", strategy="single", stop={"steps": 2})
    assert main(["export", str(folder), "--format", "peft", "--to", str(tmp_path / "a")]) == 2
    assert "this run trained no adapters" in capsys.readouterr().err


def test_changed_frozen_weights_are_refused(run: dict[str, Any], tmp_path: Path) -> None:
    """One changed bit is enough."""
    base_folder = tmp_path / "base"
    model, _ = build_model(Model(**LLAMA), "causal", datasets.VOCABULARY, seed=11)
    folders.save_model_folder(base_folder, model.config, model.named_parameters(), tmp_path)
    changes = {**run["changes"], "model": {**run["changes"]["model"], "path": str(base_folder)}}
    first = {**changes, "stop": {"steps": 5}}
    attempt(settings(tmp_path / "run", run["data"], "llama", **first), processes.World())
    value = model.get_parameter("model.norm.weight").data
    value[3] = torch.nextafter(value[3], torch.tensor(2.0))
    folders.save_model_folder(base_folder, model.config, model.named_parameters(), tmp_path)
    with pytest.raises(
        DataError,
        match=r"the frozen weights have changed since .*; restore the weights of model\.path",
    ):
        attempt(settings(tmp_path / "run", run["data"], "llama", **changes), processes.World())


@pytest.mark.parametrize(
    ("size", "strategy", "precision"),
    cases(
        [
            (*case, precision)
            for case in ((2, "ddp"), (2, "zero1"), (2, "fsdp"), (4, "hsdp"))
            for precision in ("fp32", "bf16")
        ],
        [(2, "ddp", "bf16"), (2, "zero1", "fp32"), (2, "fsdp", "bf16")],
    ),
)
def test_frozen_weights_have_neither_masters_nor_gradients(
    runs: Runs, size: int, strategy: str, precision: str
) -> None:
    """Frozen weights have the compute dtype, and the dry run predicts the same memory."""
    changes = {**CHANGES, "strategy": strategy, "execution": {"precision": precision}}
    ranks = runs.job("measure_memory", size, runs.folder("holding"), "llama", changes)
    fullest = max((memory for memory, _ in ranks), key=lambda memory: sum(memory.values()))
    plan = ranks[0][1]
    expected = {name: round(count / 1e9, 6) for name, count in fullest.items()}
    assert {name: plan["memory_gb_per_process"][name] for name in expected} == expected
    assert plan["parameters"] > 2 * plan["trained_parameters"] > 0
    share = {"hsdp": 2, "fsdp": 2}.get(strategy, 1)
    assert fullest["gradients"] == 4 * plan["trained_parameters"] // share


@FULL
def test_adapters_train_in_half_precision(runs: Runs) -> None:
    changes = {**CHANGES, "execution": {"precision": "bf16"}}
    one, other = (
        losses(lines(runs.train_once(2, "llama", strategy=strategy, **changes)))
        for strategy in ("ddp", "fsdp")
    )
    assert one[-1] < one[0] - 0.01
    assert one == pytest.approx(other, rel=1e-3)


def test_adapters_with_a_new_head_are_refused(tmp_path: Path) -> None:
    model, _ = build_model(Model(**LLAMA), "none", datasets.VOCABULARY, seed=11)
    folders.save_model_folder(tmp_path / "body", model.config, model.named_parameters(), tmp_path)
    data = datasets.write_packed(tmp_path / "data", 8, 2)
    changes = {"model": {"path": str(tmp_path / "body"), "lora": {}}}
    with pytest.raises(Exception, match="adapters would not train it"):
        attempt(settings(tmp_path / "run", data, "llama", **changes), processes.World())
