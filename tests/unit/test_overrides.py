"""An override of the command line replaces the keys of the run file that exclude its key."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest

from regauge import config
from regauge.commands import pipeline, settings_roots
from regauge.inference.export.export_settings import ExportSettings
from regauge.system.errors import SettingsError
from regauge.training.settings import Stop, TrainSettings

TARGET = {"metric": "heldout/f1", "at_least": 0.5}


@pytest.mark.parametrize(
    ("tables", "override", "expected"),
    [
        ({"stop": {"epochs": 3}}, "stop.steps=10", {"stop": {"steps": 10}}),
        ({"stop": {"steps": 3}}, "stop.epochs=0.5", {"stop": {"epochs": 0.5}}),
        (
            {"stop": {"steps": 3, "target": TARGET}},
            "stop.target.at_most=1",
            {"stop": {"steps": 3, "target": {"metric": "heldout/f1", "at_most": 1}}},
        ),
        (
            {"model": {"architecture": "bert", "config": {"hidden_size": 8}, "dropout": 0.1}},
            "model.path=a",
            {"model": {"path": "a", "dropout": 0.1}},
        ),
        ({"model": {"path": "a"}}, "model.architecture=bert", {"model": {"architecture": "bert"}}),
        (
            {"model": {"path": "a"}},
            "model.init_from.path=b",
            {"model": {"init_from": {"path": "b"}}},
        ),
        (
            {"execution": {"price": {"usd_per_hour": 2, "market": "spot", "as_of": "2026-01-02"}}},
            "execution.price.instance=a",
            {"execution": {"price": {"instance": "a"}}},
        ),
        (
            {"export": {"run": "a", "to": "b"}},
            "export.model=c",
            {"export": {"model": "c", "to": "b"}},
        ),
        ({"comparison": {"target": TARGET}}, "comparison.target.at_most=1", None),
    ],
)
def test_an_override_replaces_what_its_key_excludes(
    tables: dict[str, Any],
    override: str,
    expected: dict[str, Any] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="regauge"):
        result = config.apply_overrides(tables, (override,), *settings_roots().values())
    key = override.partition("=")[0]
    assert f"{key} replaces " in caplog.text or key.startswith("model.init_from.")
    assert " of the run file" in caplog.text
    if expected is not None:
        assert result == expected
    else:
        assert result["comparison"]["target"] == {"metric": "heldout/f1", "at_most": 1}


def test_two_overrides_that_exclude_each_other_stay(caplog: pytest.LogCaptureFixture) -> None:
    tables = {"stop": {"epochs": 1}}
    with caplog.at_level(logging.INFO, logger="regauge"):
        result = config.apply_overrides(tables, ("stop.steps=2", "stop.epochs=3"), TrainSettings)
    assert not caplog.messages
    assert result == {"stop": {"epochs": 3, "steps": 2}}
    with pytest.raises(SettingsError, match="set either stop"):
        config.build(Stop, result["stop"])


def test_keys_that_exclude_nothing_stay(caplog: pytest.LogCaptureFixture) -> None:
    tables = {"stop": {"epochs": 1}, "model": {"path": "a"}}
    overrides = ("stop.usd=2", "model.config.hidden_size=8")
    result = config.apply_overrides(tables, overrides, TrainSettings)
    assert result["stop"] == {"epochs": 1, "usd": 2}
    assert result["model"] == {"path": "a", "config": {"hidden_size": 8}}
    assert not caplog.text


def test_the_excluded_keys_are_keys_of_the_same_table() -> None:
    models = [TrainSettings, ExportSettings]
    count = 0
    while models:
        model = models.pop()
        for key, others in model.exclusive_keys.items():
            count += 1
            assert {key, *others} <= model.model_fields.keys()
        models += [
            table
            for field in model.model_fields.values()
            if (table := config.find_model(field.annotation, config.Settings)) is not None
        ]
    assert count >= 10


PIPELINE = """\
data.path = "a"
task = "clm"
batch = { rows = 8, microbatch_rows = 8 }
stop = { epochs = 3, usd = 2 }
model = { architecture = "bert", config = { hidden_size = 8 }, dropout = 0.1 }
execution.price.usd_per_hour = 3

[[stage]]
verb = "train"
name = "first"

[[stage]]
verb = "train"
name = "second"
stop.steps = 10
model.path = "b"

[[stage]]
verb = "train"
name = "third"
"""


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ((), [(3, None), (None, 10), (3, None)]),
        (("stage.first.stop.steps=4",), [(None, 4), (None, 10), (3, None)]),
        (("stage.second.stop.epochs=2",), [(3, None), (2, None), (3, None)]),
        (("stop.steps=5",), [(None, 5)] * 3),
        (("stop.epochs=5",), [(5, None)] * 3),
    ],
)
def test_the_tables_of_a_stage_replace_what_their_keys_exclude(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    overrides: tuple[str, ...],
    lengths: list[tuple[float | None, int | None]],
) -> None:
    (tmp_path / "run.toml").write_text(PIPELINE)
    with caplog.at_level(logging.INFO, logger="regauge"):
        stages = pipeline.resolve(tmp_path / "run.toml", overrides).stages
    first, second, third = (cast("TrainSettings", stage.settings) for stage in stages)
    assert [(item.stop.epochs, item.stop.steps) for item in (first, second, third)] == lengths
    assert first.stop.usd == second.stop.usd == 2
    assert first.model == third.model
    assert (first.model.path, first.model.architecture) == (None, "bert")
    assert (second.model.path, second.model.config, second.model.dropout) == ("b", {}, 0.1)
    line = "model.path replaces model.architecture of the shared tables in stage 'second'"
    assert line in caplog.messages


def test_an_override_finds_a_table_of_a_list_by_its_name() -> None:
    tables = {"task": ({"name": "a", "kind": "clm"}, {"name": "b", "kind": "mlm"})}
    result = config.apply_overrides(tables, ("task.b.weight=2",), TrainSettings)
    assert [table.get("weight") for table in result["task"]] == [None, 2]
    with pytest.raises(SettingsError) as caught:
        config.apply_overrides(tables, ("task.weight=2",), TrainSettings)
    assert str(caught.value) == "'task' in 'task.weight' is a list; name one of them: a, b"


def test_a_key_of_a_choice_may_follow_the_name_of_its_kind() -> None:
    tables = {"task": "mlm", "optimizer": {"schedule": "cosine"}}
    overrides = ("task.mlm_probability=0.3", "optimizer.schedule.warmup_steps=4")
    result = config.apply_overrides(tables, overrides, TrainSettings)
    assert result["task"] == {"kind": "mlm", "mlm_probability": 0.3}
    assert result["optimizer"]["schedule"] == {"kind": "cosine", "warmup_steps": 4}


def test_the_command_line_replaces_the_length_of_a_run(tmp_path: Path) -> None:
    from regauge.commands import load_settings

    run_file = tmp_path / "run.toml"
    run_file.write_text(
        'data.path = "a"\ntask = "clm"\nmodel.path = "b"\noutput.folder = "c"\n'
        "batch = { rows = 8, microbatch_rows = 8 }\nstop.epochs = 3\n"
    )
    settings = load_settings(TrainSettings, run_file, ("stop.steps=10",))
    assert settings.stop.steps == 10
    assert settings.stop.epochs is None
