"""Plans of unfinished pipeline stages, from their verbs' dry runs."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regauge import commands, config
from regauge.system.errors import RegaugeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.commands._stages import ResolvedStage
    from regauge.commands._stages.status import StageStatus

DatasetRows = dict[str, Any]
"""Dataset folder -> row layouts; see `data/unprepared.py`."""


def describe_datasets(stages: list[ResolvedStage], shared: config.Tables) -> DatasetRows:
    """Return the row layouts of datasets in the shared tables and of those prepared by stages."""
    from regauge.commands._parts.default_tables import complete_tables
    from regauge.data import unprepared

    dataset_rows: DatasetRows = {}
    with suppress(SettingsError):  # a stage's tables may complete the shared ones
        dataset_rows |= unprepared.describe_datasets(complete_tables(shared))
    for stage in stages:
        list_datasets = getattr(commands.import_verb(stage.verb), "list_datasets", None)
        if list_datasets is not None:
            dataset_rows |= list_datasets(stage.settings)
    return dataset_rows


def make_plan(
    stage: ResolvedStage, statuses: Mapping[str, StageStatus], dataset_rows: DatasetRows
) -> dict[str, Any]:
    """Return the dry run of a stage's verb.

    If it depends on stale or unfinished inputs, the plan only has their names.
    """
    plan = getattr(commands.import_verb(stage.verb), "plan", None)
    if plan is None:
        return {}
    states = {name: statuses[name].state for name in stage.inputs}
    if stale := [name for name, state in states.items() if state == "stale"]:
        return {"depends_on": ", ".join(stale)}
    needs_rows = "dataset_rows" in inspect.signature(plan).parameters
    try:
        return dict(plan(stage.settings, **({"dataset_rows": dataset_rows} if needs_rows else {})))
    except RegaugeError as error:
        unfinished = [name for name, state in states.items() if state != "finished"]
        if not unfinished:
            error.add_location(f"stage '{stage.name}'")
            raise
        return {"depends_on": ", ".join(unfinished)}
