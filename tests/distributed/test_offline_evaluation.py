"""A model that a run has left is measured as it was measured in the run."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs import lines
from distributed.runs import DATA, TASKS, Runs
from regauge.config import build, choose
from regauge.errors import SettingsError
from regauge.evaluation.offline import measure
from regauge.evaluation.settings import Evaluating
from regauge.models import sentence_transformers
from regauge.models.sentence_transformers import Dense, Pooling, Reads, Sentences
from regauge.processes import World
from regauge.verbs import evaluate

SHORT: dict[str, Any] = {"stop": {"steps": 4}}


@pytest.mark.parametrize("task", [name for name in TASKS if name != "several"])
def test_a_model_is_measured_as_in_its_run(runs: Runs, task: str) -> None:
    run = runs.trained(1, task, **SHORT)
    layout = choose("tasks", TASKS[task]["task"]).reads()
    asked = {
        "output": {"folder": str(run.with_name(f"{run.name}-measured"))},
        "seed": 7,
        "data": {"path": str(runs.data[DATA.get(layout, layout)])},
        "task": TASKS[task]["task"],
        "subjects": {"models": {"it": str(run)}, "untrained": "no", "rivals": "no"},
        "accelerator": "cpu",
        "execution": {"precision": "fp32", "threads": 1},
    }
    (row,) = measure(build(Evaluating, asked), World())["rows"]
    last = [line for line in lines(run) if "heldout/loss" in line][-1]
    told = {name.removeprefix("heldout/"): last[name] for name in last if "heldout/" in name}
    assert row.keys() - {"name"} == told.keys()
    for name, value in told.items():
        assert row[name] == pytest.approx(value, rel=1e-6), name


def test_what_is_left_out_of_a_folder_is_told_of(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("regauge"), "propagate", True)
    run = runs.trained(1, "contrastive", **SHORT)
    dense = Dense(inputs=32, outputs=4, folder="2_Dense")
    told = Sentences(reads=Reads(tokens=16), pooling=Pooling(dense=(dense,)))
    shutil.copytree(run / "model", tmp_path / "other")
    sentence_transformers.write(tmp_path / "other", told, dense.inputs)
    asked = {
        "output": {"folder": str(tmp_path / "measured")},
        "data": {"path": str(runs.data["pairs"])},
        "task": TASKS["contrastive"]["task"],
        "subjects": {"tasks": "given", "untrained": "no", "rivals": "no"},
        "accelerator": "cpu",
        "execution": {"precision": "fp32", "threads": 1},
    }
    for folder, count in ((run / "model", 0), (tmp_path / "other", 1)):
        subjects = {**asked["subjects"], "models": {"it": str(folder)}}
        measure(build(Evaluating, {**asked, "subjects": subjects}), World())
        said = [each for each in caplog.messages if "the layers behind its pooling" in each]
        assert len(said) == count


def test_a_run_is_measured_by_its_own_fields_wherever_it_lies(runs: Runs, tmp_path: Path) -> None:
    run = tmp_path / "tasks" / "one"
    shutil.copytree(runs.trained(1, "classify", **SHORT), run)
    asked = {
        "output": {"folder": str(tmp_path / "measured")},
        "seed": 7,
        "data": {"path": str(runs.data["pairs"])},
        "task": {**TASKS["classify"]["task"], "texts_of": ("of another dataset",)},
        "subjects": {"models": {"it": str(run)}, "tasks": "own", "untrained": "yes"},
        "accelerator": "cpu",
        "execution": {"precision": "fp32", "threads": 1},
    }
    settings = build(Evaluating, asked)
    assert evaluate.plan(settings)["models"] == {"it": str(run)}
    rows = {row["name"]: row for row in measure(settings, World())["rows"]}
    last = [line for line in lines(run) if "heldout/loss" in line][-1]
    assert rows["it"]["loss"] == pytest.approx(last["heldout/loss"], rel=1e-6)
    assert rows["untrained"]["loss"] != rows["it"]["loss"]
    table = json.loads((tmp_path / "measured" / "evaluation.json").read_text())
    assert table["notes"][0].startswith(f"{last['heldout/items']:.0f} held-out rows")
    given = settings.model_copy(
        update={"subjects": settings.subjects.model_copy(update={"tasks": "given"})}
    )
    for verb in (evaluate.plan, lambda asked: measure(asked, World())):
        with pytest.raises(SettingsError, match="of another dataset"):
            verb(given)


def test_a_ranker_begins_with_the_encoder_and_the_head_of_another(runs: Runs) -> None:
    first = runs.trained(1, "rank", **SHORT)
    model = {"path": str(first), "dropout": 0.1}
    folder = runs.folder("second")
    runs.job("train", 1, folder, "rank", {**SHORT, "model": model})
    ends, begins = (
        [line["heldout/loss"] for line in lines(run) if "heldout/loss" in line]
        for run in (first, folder)
    )
    assert begins[0] == pytest.approx(ends[-1], rel=1e-6)
