"""Reference values of DPO: computed once from the weights of step 0, and equal on any world."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from distributed.jobs import lines, losses, weights
from distributed.runs import Runs, cases, evaluation, strategy_table
from distributed.runs import settings as build_settings
from distributed.test_equality import LONG
from distributed.test_resume import SAVED, assert_same, interrupt_run
from regauge.data.dataset import read_manifest
from regauge.evaluation.offline import evaluate_models
from regauge.models.modules import AnswerLikelihoodModel
from regauge.system.errors import SettingsError
from regauge.system.processes import World
from regauge.tasks.dpo import Dpo
from regauge.training import references
from regauge.training.references import REFERENCES
from regauge.training.run import attempt

SHORT: dict[str, Any] = {"stop": {"steps": 2}}


def read_values(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / REFERENCES)


@pytest.mark.parametrize(
    ("size", "strategy"),
    cases([(2, "fsdp"), (2, "zero1"), (3, "ddp"), (4, "hsdp")], [(2, "fsdp")]),
)
def test_values_are_bitwise_equal_on_every_world(runs: Runs, size: int, strategy: str) -> None:
    alone = read_values(runs.train_once(1, "dpo", **LONG))
    changes = {"strategy": strategy_table(strategy), **LONG}
    values = read_values(runs.train_once(size, "dpo", **changes))
    assert alone.keys() == values.keys() == {"train", "heldout"}
    for name, expected in alone.items():
        assert expected.isfinite().all()
        assert values[name].equal(expected), name


def test_the_start_has_no_reward_and_training_raises_the_margin(runs: Runs) -> None:
    run_lines = lines(runs.train_once(1, "dpo", **LONG))
    first, *_, last = [line for line in run_lines if "heldout/loss" in line]
    assert first["heldout/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["heldout/reward_margin"] == first["heldout/chosen_reward"] == 0
    assert first["heldout/accuracy"] == 0
    assert last["heldout/reward_margin"] > 0.05
    assert last["heldout/accuracy"] >= 0.9
    assert last["heldout/loss"] < first["heldout/loss"]
    margin = last["heldout/chosen_reward"] - last["heldout/rejected_reward"]
    assert last["heldout/reward_margin"] == pytest.approx(margin, abs=1e-5)


def test_only_rows_that_the_steps_use_are_computed(runs: Runs) -> None:
    whole = read_values(runs.train_once(1, "dpo", **LONG))
    part = read_values(runs.train_once(1, "dpo", **SHORT))
    is_needed = part["train"].isfinite().all(1)
    assert 16 <= int(is_needed.sum()) <= 24 < len(is_needed)
    torch.testing.assert_close(part["train"][is_needed], whole["train"][is_needed])
    assert part["heldout"].isfinite().all()


def test_policy_and_reference_have_the_same_few_shapes(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lazy device compiles a graph for each shape, so their number must not grow with batches."""
    shapes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    forward = AnswerLikelihoodModel.forward

    def record_shape(self: AnswerLikelihoodModel, batch: dict[str, torch.Tensor]) -> Any:
        shapes[self.training].append(tuple(batch["tokens"].shape))
        return forward(self, batch)

    monkeypatch.setattr(AnswerLikelihoodModel, "forward", record_shape)
    data = runs.data["preferences"]
    settings = build_settings(tmp_path, data, "dpo", stop={"steps": 12})
    attempt(settings, World())
    task, manifest = settings.task, read_manifest(data)
    assert isinstance(task, Dpo)
    lengths = task.bucket_lengths(manifest)
    assert len(lengths) == task.max_buckets == 2
    rows = 2 * settings.batch.microbatch
    assert set(shapes[True]) == set(shapes[False]) == {(rows, length) for length in lengths}
    assert min(len(shapes[True]), len(shapes[False])) > 20


def count_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every computation of values appends its number of rows."""
    counts: list[int] = []
    compute = references.compute_references

    def count_and_compute(rows: Any, module: Any) -> torch.Tensor:
        counts.append(len(rows.row_numbers))
        return compute(rows, module)

    monkeypatch.setattr(references, "compute_references", count_and_compute)
    return counts


def test_a_resumed_run_reads_the_values(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runs.train_once(1, "dpo", **LONG)
    resumed = interrupt_run(runs, whole)
    shifted = {name: values - 0.25 for name, values in read_values(whole).items()}
    with safe_open(whole / REFERENCES, framework="pt") as file:
        metadata = file.metadata()
    shifted["train"][:, 1] += 0.5
    save_file(shifted, resumed / REFERENCES, metadata=metadata)
    counts = count_rows(monkeypatch)
    runs.job("train", 1, resumed, "dpo", LONG)
    assert counts == []
    pairs = zip(losses(lines(resumed)), losses(lines(whole)), strict=True)
    differences = [step for step, (ours, expected) in enumerate(pairs) if ours != expected]
    assert differences == list(range(SAVED, len(losses(lines(whole))))), "the file was not used"


@pytest.mark.parametrize("damage", ["missing", "damaged", "other weights", "other rows"])
def test_values_are_computed_again_from_the_start_weights(
    runs: Runs, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has other weights; they must not become the reference."""
    whole = runs.train_once(1, "dpo", **LONG)
    resumed = interrupt_run(runs, whole)
    file = resumed / REFERENCES
    wrong = {name: values + 1 for name, values in read_values(whole).items()}
    with safe_open(file, framework="pt") as stored:
        metadata = dict(stored.metadata())
    if damage == "missing":
        file.unlink()
    elif damage == "damaged":
        file.write_bytes(file.read_bytes()[:40])
    else:
        metadata["weights_checksum" if damage == "other weights" else "train"] = "0"
        save_file(wrong, file, metadata=metadata)
    counts = count_rows(monkeypatch)
    runs.job("train", 1, resumed, "dpo", LONG)
    assert counts == [40, 10]
    assert_same(whole, resumed)
    for name, values in read_values(whole).items():
        assert read_values(resumed)[name].equal(values)


def test_a_longer_run_computes_the_rows_that_are_missing(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runs.train_once(1, "dpo", **SHORT)
    folder = runs.folder("longer")
    shutil.copytree(first, folder, dirs_exist_ok=True)
    before = read_values(folder)["train"]
    num_missing = int(before.isnan().any(1).sum())
    counts = count_rows(monkeypatch)
    runs.job("train", 1, folder, "dpo", {"stop": {"steps": 8}})
    assert counts == [num_missing]
    after = read_values(folder)["train"]
    assert after.isfinite().all()
    assert after[before.isfinite()].equal(before[before.isfinite()])
    assert all(math.isfinite(loss) for loss in losses(lines(folder)))


@pytest.mark.full
def test_the_base_model_is_the_reference_of_adapters(runs: Runs) -> None:
    sft = runs.train_once(1, "clm", stop={"steps": 4})
    base = {"path": str(sft / "model"), "dropout": 0.0}
    lora = {**base, "lora": {"rank": 2}}
    adapted = runs.train_once(1, "dpo", model=lora, **LONG)
    full = runs.train_once(1, "dpo", model=base, **LONG)
    for name, values in read_values(full).items():
        assert read_values(adapted)[name].equal(values), name
    last = [line for line in lines(adapted) if "heldout/loss" in line][-1]
    assert last["heldout/reward_margin"] > 0


def test_models_are_evaluated_against_the_start_of_a_run(runs: Runs, tmp_path: Path) -> None:
    sft = runs.train_once(1, "clm", stop={"steps": 4})
    model = {"path": str(sft / "model"), "dropout": 0.0}
    run = runs.train_once(1, "dpo", model=model, **LONG)
    models = {"before": sft / "model", "after": run}
    data = runs.data["preferences"]
    before, after = evaluate_models(evaluation(tmp_path, data, "dpo", models), World())["rows"]
    assert before["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert before["reward_margin"] == 0
    last = [line for line in lines(run) if "heldout/loss" in line][-1]
    for name, value in after.items():
        if name != "name":
            assert value == pytest.approx(last[f"heldout/{name}"], rel=1e-5), name
    with pytest.raises(SettingsError, match="no model is from a run of task 'dpo'; add the folder"):
        evaluate_models(evaluation(tmp_path, data, "dpo", {"it": sft / "model"}), World())


def test_samples_and_the_exported_model_have_the_trained_weights(runs: Runs) -> None:
    samples = {"evaluation": {"samples": {"prompts": 3, "max_new_tokens": 4}}, **LONG}
    run = runs.train_once(1, "dpo", **samples)
    written = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [0] * 3 + [20] * 3
    plain = weights(runs.train_once(1, "dpo", **LONG))
    for name, value in weights(run).items():
        assert value.equal(plain[name]), f"samples changed {name}"
