"""Open settings are resolved; invalid combinations are refused with a remedy."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge.models import sentence_transformers
from regauge.models.sentence_transformers import DenseLayer, Pooling, SentenceEncoder, Tokenization
from regauge.system.errors import DataError, SettingsError
from regauge.system.processes import World
from regauge.training import dry_run
from regauge.training.defaults import resolve_defaults
from regauge.training.settings import TrainSettings

NOWHERE = Path("nowhere")
DENSE = DenseLayer(in_features=8, out_features=4, folder="2_Dense")


def run(**changes: Any) -> TrainSettings:
    return settings(NOWHERE, NOWHERE, "mlm", **changes)


def world(size: int) -> World:
    return World(rank=0, size=size, local_rank=0, local_size=size)


def adafactor(strategy: str) -> dict[str, Any]:
    return {"strategy": strategy, "optimizer": {"kind": "adafactor"}}


def precision(name: str) -> dict[str, Any]:
    return {"execution": {"precision": name}}


FEW = "only 4 microbatches per step"
UNSHARDED = "torch's Adafactor refuses sharded tensors"
REFUSED: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "more processes than microbatches": (8, {}, f"8 processes, but {FEW}", "microbatch_rows = 1"),
    "more processes than rows": (16, {}, f"16 processes, but {FEW}", "use at most 4 processes"),
    "hsdp on two": (2, {"strategy": "hsdp"}, "2 processes do not form", "(ddp, fsdp, zero1) or"),
    "hsdp on three": (3, {"strategy": "hsdp"}, "3 processes do not form", "(ddp, fsdp, zero1)"),
    "fsdp with adafactor": (2, adafactor("fsdp"), UNSHARDED, "(ddp, zero1)"),
    "hsdp with adafactor": (4, adafactor("hsdp"), UNSHARDED, "(ddp, zero1)"),
    "single on two": (2, {"strategy": "single"}, "it needs 1 process", "(ddp, fsdp, zero1)"),
    "fp16 on a CPU": (1, precision("fp16"), "'cpu' does not train in fp16", "execution.precision"),
    "tf32 on a CPU": (1, precision("tf32"), "'cpu' does not train in tf32", "fp32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_combinations_are_refused_with_a_remedy(name: str) -> None:
    size, changes, problem, remedy = REFUSED[name]
    with pytest.raises(SettingsError) as caught:
        resolve_defaults(run(**changes), world(size))
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    assert caught.value.exit_code == 2


def test_open_settings_are_resolved() -> None:
    open_run = run(accelerator=None, execution={"precision": "auto", "threads": None})
    for size, strategy in ((1, "single"), (2, "ddp")):
        decided = resolve_defaults(open_run.model_copy(update={"accelerator": None}), world(size))
        assert decided.accelerator is not None
        assert decided.strategy is not None
        assert decided.strategy.kind == strategy
        execution = decided.execution
        assert execution.processes == size
        assert execution.threads == max(1, len(os.sched_getaffinity(0)) // size)
        assert execution.precision in decided.accelerator.precisions()


def test_uneven_shares_are_logged_with_their_idle_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "regauge")
    resolve_defaults(run(), world(4))
    assert not caplog.records
    resolve_defaults(run(), world(3))
    assert caplog.messages == [
        "4 microbatches on 3 processes: 2 or 1 per process, 33 % of the time is idle"
    ]


def test_without_a_compiler_the_run_is_eager_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    resolved = resolve_defaults(run(execution={"compile": "blocks"}), world(1))
    assert resolved.execution.compile == "off"
    assert "torch.compile off: no C++ compiler is installed" in caplog.text


def test_a_plan_has_the_shapes_and_steps_without_an_allocation(tmp_path: Path) -> None:
    data = datasets.write_pairs(tmp_path / "pairs", 43)
    table = settings(tmp_path / "run", data, "contrastive", stop={"steps": None, "epochs": 2.0})
    answer = dry_run.plan_run(table)
    assert answer["steps"] == 12
    assert answer["batch_shapes"] == ["4 x 16", "4 x 32"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rows", "task", "problem"),
    [
        (0, "mlm", "has no training rows; prepare more text"),
        (8, "contrastive", "needs rows of layout 'fields', but the dataset has 'packed'"),
    ],
)
def test_unusable_datasets_are_refused(rows: int, task: str, problem: str, tmp_path: Path) -> None:
    data = datasets.write_packed(tmp_path / "data", rows)
    with pytest.raises(SettingsError, match=problem):
        dry_run.check_run(settings(tmp_path / "run", data, task))


@pytest.mark.parametrize(
    ("pooling", "num_warnings"),
    [
        (Pooling(dense=(DENSE,)), 1),
        (Pooling(modes=("cls",), normalize=False), 0),
        (None, 0),
    ],
)
def test_ignored_modules_and_prompts_of_a_sentence_encoder_are_logged(
    pooling: Pooling | None,
    num_warnings: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = tmp_path / "start"
    start.mkdir()
    (start / "config.json").write_text("{}")
    if pooling is not None:
        reads = Tokenization(max_length=16, prompts={"query": "find: "} if num_warnings else {})
        encoder = SentenceEncoder(tokenization=reads, pooling=pooling)
        sentence_transformers.write_description(start, encoder, DENSE.in_features)
    data = datasets.write_pairs(tmp_path / "pairs", 43)
    for weights in ("random", "pretrained"):
        model = {"path": str(start), "weights": weights, "architecture": None, "config": {}}
        dry_run.check_run(settings(tmp_path / "run", data, "contrastive", model=model))
        for part in ("dense layers after the pooling are not trained", "adds no prompts"):
            count = sum(part in message for message in caplog.messages)
            assert count == (num_warnings if weights == "pretrained" else 0)


def test_weights_with_a_different_tokenizer_are_refused(tmp_path: Path) -> None:
    data, start = datasets.write_pairs(tmp_path / "pairs", 43), tmp_path / "start"
    shutil.copytree(data / "tokenizer", start)
    (start / "config.json").write_text("{}")
    model = {"path": str(start), "architecture": None, "config": {}}
    dry_run.check_run(settings(tmp_path / "run", data, "contrastive", model=model))
    table = json.loads((start / "tokenizer.json").read_text())
    table["normalizer"] = {"type": "Lowercase"}
    (start / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match=r"another tokenizer than .*pairs was prepared with"):
        dry_run.check_run(settings(tmp_path / "run", data, "contrastive", model=model))


def test_an_indivisible_batch_is_refused_with_the_nearest_divisors() -> None:
    with pytest.raises(SettingsError, match=r"to a divisor, such as 2 or 4$"):
        run(batch={"rows": 8, "microbatch_rows": 3})
