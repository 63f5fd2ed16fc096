"""One training stage's tables in a pipeline's run file, with its earlier stages' tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

STAGES = "stage"
Stage = dict[str, Any]


def select_stage(tables: config.Tables, name: str | None) -> config.Tables:
    """Return a training stage's tables: shared tables, its own, and its data's `rows`.

    Without a name, the only training stage is selected. A run file's tables without stages are
    returned as they are. Raises SettingsError for a name that is not a training stage.
    """
    stages = tables.get(STAGES)
    if not isinstance(stages, list | tuple):
        if name is not None:
            problem = f"--stage {name}: the run file has no stages"
            raise SettingsError(problem, "remove --stage")
        return tables
    named = {str(stage.get("name", stage.get("verb"))): dict(stage) for stage in stages}
    training = [key for key, stage in named.items() if stage.get("verb") == "train"]
    if name is None and len(training) != 1:
        problem = f"the run file has {len(training)} training stages"
        raise SettingsError(problem, f"select one with --stage: {', '.join(training)}")
    selected = name or training[0]
    if selected not in training:
        raise SettingsError(f"no training stage '{selected}'", did_you_mean(selected, training))
    return _merge(tables, named, selected)


def _merge(tables: config.Tables, named: Mapping[str, Stage], selected: str) -> config.Tables:
    shared = {key: table for key, table in tables.items() if key != STAGES}
    stage = {key: table for key, table in named[selected].items() if key not in ("verb", "name")}
    stage = _resolve_model(stage, named)
    folder = str(dict(tables.get("output", {})).get("folder", "out"))
    data = stage.get("data")
    if isinstance(data, dict) and str(data.get("path", "")).startswith("@"):
        source, _, layout = data["path"][1:].partition("/")
        prepared = named.get(source, {})
        shared |= {key: prepared[key] for key in ("rows", "tokenizer") if key in prepared}
        rows = shared.get("rows")
        if layout and isinstance(rows, dict) and layout in rows:
            shared["rows"] = rows[layout]
        number = [*named].index(source) + 1 if source in named else 0
        path = "/".join(filter(None, (folder, f"{number}-{source}", layout)))
        stage["data"] = {**data, "path": path}
    return config.overlay_tables(shared, stage, TrainSettings, f"stage '{selected}'")


def _resolve_model(stage: Stage, named: Mapping[str, Stage]) -> Stage:
    """Return a stage with its model's sizes, if an earlier stage trains that model."""
    model = stage.get("model")
    path = str(model.get("path", "")) if isinstance(model, dict) else ""
    source = named.get(path[1:].partition("/")[0]) if path.startswith("@") else None
    if source is None or not isinstance(model, dict):
        return stage
    earlier = _resolve_model(source, named).get("model", {})
    rest = {key: value for key, value in model.items() if key not in ("path", "weights")}
    return {**stage, "model": {**earlier, **rest}}
