"""The optimizer settings that depend on the initial weights are resolved once, with a reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.runs import TASKS, Runs
from regauge.config import build, dump, merge
from regauge.config.output_files import SAVED_RUN
from regauge.system.errors import SettingsError
from regauge.system.processes import World
from regauge.training import dry_run, run_record
from regauge.training.optimizer_defaults import (
    BETAS,
    LEARNING_RATE,
    WARMUP_STEPS,
    resolve_optimizer,
)
from regauge.training.run import attempt
from regauge.training.settings import Optimizer, TrainSettings

FROM_SCRATCH = {LEARNING_RATE: 5e-4, BETAS: (0.9, 0.98), WARMUP_STEPS: 0}
FROM_WEIGHTS = {LEARNING_RATE: 2e-5, BETAS: (0.9, 0.999), WARMUP_STEPS: 3}
FROM_LORA = {**FROM_WEIGHTS, LEARNING_RATE: 2e-4}
WEIGHTS = {"path": "weights"}


def build_run(folder: Path, data: Path = Path("data"), **changes: Any) -> TrainSettings:
    """Return the settings of a run that leaves its optimizer open."""
    tables: dict[str, Any] = {
        "data": {"path": str(data)},
        "task": TASKS["mlm"]["task"],
        "model": TASKS["mlm"]["model"],
        "batch": {"rows": 8, "microbatch_rows": 4},
        "stop": {"steps": 21},
        "output": {"folder": str(folder), "trackers": ()},
        "accelerator": "cpu",
        "execution": {"precision": "fp32", "threads": 1, "compile": "off"},
    }
    model = changes.pop("model", None)
    return build(TrainSettings, merge(tables | ({"model": model} if model else {}), changes))


CLASSIFY, MLM, TOKENS = {"kind": "classify"}, {"kind": "mlm"}, {"kind": "tokens"}
BOTH = [{"name": "a", **CLASSIFY}, {"name": "b", **MLM}]
ONLY_HEAD, NEW = "a head on a frozen encoder", "random weights"
OLD = "pretrained weights"


@pytest.mark.parametrize(
    ("task", "model", "expected", "reason"),
    [
        (MLM, None, FROM_SCRATCH, NEW),
        (MLM, {**WEIGHTS, "weights": "random"}, FROM_SCRATCH, NEW),
        (MLM, WEIGHTS, FROM_WEIGHTS, OLD),
        (MLM, {**WEIGHTS, "lora": {}}, FROM_LORA, "LoRA adapters"),
        (MLM, {"init_from": {"path": "run"}}, FROM_WEIGHTS, OLD),
        (CLASSIFY, {**WEIGHTS, "trainable_layers": "none"}, FROM_SCRATCH, ONLY_HEAD),
        (CLASSIFY, {**WEIGHTS, "trainable_layers": 0}, FROM_SCRATCH, ONLY_HEAD),
        (TOKENS, {**WEIGHTS, "trainable_layers": "none"}, FROM_SCRATCH, ONLY_HEAD),
        (CLASSIFY, {**WEIGHTS, "trainable_layers": 1}, FROM_WEIGHTS, OLD),
        (CLASSIFY, {**WEIGHTS, "trainable_layers": "all"}, FROM_WEIGHTS, OLD),
        (MLM, {**WEIGHTS, "trainable_layers": "none"}, FROM_WEIGHTS, OLD),
        (BOTH, {**WEIGHTS, "trainable_layers": "none"}, FROM_WEIGHTS, OLD),
    ],
)
def test_the_defaults_depend_on_the_initial_weights(
    tmp_path: Path, task: Any, model: Any, expected: dict[str, Any], reason: str
) -> None:
    """A head on a frozen encoder is trained as random weights are."""
    tables = dump(build_run(tmp_path, model=model)) | {"task": task, "optimizer": {}}
    resolved, defaults = resolve_optimizer(build(TrainSettings, tables))
    assert (defaults.values, defaults.reason) == (expected, reason)
    optimizer = resolved.optimizer
    assert optimizer.peak_learning_rate == expected[LEARNING_RATE]
    assert optimizer.moment_decay_rates == expected[BETAS]
    assert optimizer.schedule.num_warmup_steps == expected[WARMUP_STEPS]


def test_settings_of_the_run_file_are_kept(tmp_path: Path) -> None:
    table = {"learning_rate": 1e-3, "schedule": {"warmup_steps": 0}}
    resolved, defaults = resolve_optimizer(build_run(tmp_path, model=WEIGHTS, optimizer=table))
    assert resolved.optimizer.peak_learning_rate == 1e-3
    assert resolved.optimizer.schedule.num_warmup_steps == 0
    assert defaults.values == {BETAS: (0.9, 0.999)}
    assert defaults.description == "betas (0.9, 0.999) (default of pretrained weights)"
    assert resolve_optimizer(resolved)[1].values == {}


def test_the_warm_up_of_epochs_is_a_tenth_of_their_steps(tmp_path: Path) -> None:
    datasets.write_packed(tmp_path / "data")
    stop = {"steps": None, "epochs": 3.0}
    run = build_run(tmp_path / "run", tmp_path / "data", model=WEIGHTS, stop=stop)
    plan = dry_run.plan_run(run.model_copy(update={"model": build_run(tmp_path).model}))
    warmup_steps = resolve_optimizer(run)[0].optimizer.schedule.num_warmup_steps
    assert warmup_steps == -(-plan["steps"] // 10) > 1


def test_an_open_setting_is_no_number() -> None:
    for value in ("peak_learning_rate", "moment_decay_rates"):
        with pytest.raises(SettingsError, match="is not resolved"):
            getattr(Optimizer(), value)


def test_a_run_records_its_defaults_and_keeps_them_when_its_length_changes(
    tmp_path: Path, runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    data = runs.data["packed"]
    start = runs.train_once(1, "mlm")
    model = {"path": str(start / "model")}
    run = build_run(tmp_path / "run", data, model=model, stop={"steps": 11})
    with caplog.at_level(logging.INFO, "regauge"):
        attempt(run, World())
    line = "learning_rate 2e-05, betas (0.9, 0.999), warmup_steps 2 (default of pretrained weights)"
    assert f"optimizer: {line}" in caplog.text
    plan = dry_run.plan_run(run)
    assert plan["optimizer"] == line
    document = json.loads((tmp_path / "run" / SAVED_RUN).read_text())
    assert document["optimizer"]["learning_rate"] == 2e-5
    assert document["optimizer"]["schedule"]["warmup_steps"] == 2
    assert document["run"]["defaults"]["values"][WARMUP_STEPS] == 2
    longer = build_run(tmp_path / "run", data, model=model, stop={"steps": 31})
    assert resolve_optimizer(longer)[1].values[WARMUP_STEPS] == 2
    assert attempt(longer, World())["steps"] == 31
    changed = merge({"optimizer": {"betas": (0.9, 0.99)}}, {"model": model})
    with pytest.raises(SettingsError, match=r"optimizer\.betas"):
        dry_run.check_run(build_run(tmp_path / "run", data, **changed))


def test_a_value_that_the_first_attempt_set_is_no_default(tmp_path: Path) -> None:
    first = build_run(tmp_path / "run", optimizer={"learning_rate": 1e-3})
    resolved, defaults = resolve_optimizer(first)
    run_record.write_records(
        tmp_path / "run", resolved, "f", "id", "w", decisions={"defaults": defaults.document}
    )
    current, _ = resolve_optimizer(build_run(tmp_path / "run"))
    with pytest.raises(SettingsError, match=r"learning_rate is 0\.001, not 0\.0005"):
        run_record.check_same_run(tmp_path / "run", current, "f")


def test_a_continued_run_takes_the_values_of_the_earlier_one(tmp_path: Path, runs: Runs) -> None:
    origin = {"path": str(runs.train_once(1, "mlm"))}
    cases: dict[tuple[str, str], tuple[float, tuple[float, float], int]] = {
        ("restart", "reset"): (2e-5, (0.9, 0.999), 3),
        ("restart", "keep"): (2e-5, (0.9, 0.98), 3),
        ("continue", "reset"): (0.003, (0.9, 0.999), 3),
        ("continue", "keep"): (0.003, (0.9, 0.98), 3),
    }
    for (schedule, optimizer), expected in cases.items():
        model = {"init_from": {**origin, "schedule": schedule, "optimizer": optimizer}}
        table = resolve_optimizer(build_run(tmp_path, model=model))[0].optimizer
        values = (
            table.peak_learning_rate,
            table.moment_decay_rates,
            table.schedule.num_warmup_steps,
        )
        assert values == expected
