"""What a stage of a pipeline that is to do would do: its verb's own dry run."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regauge import config, verbs
from regauge.errors import RegaugeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.verbs._stage_status import Status
    from regauge.verbs._stages import Ready

Described = dict[str, Any]
"""The rows of datasets, by the folders of these: see `data/unprepared.py`."""


def describe_datasets(stages: list[Ready], shared: config.Tables) -> Described:
    """Return the rows of datasets that the shared tables describe or that stages prepare."""
    from regauge.data import unprepared

    described: Described = {}
    with suppress(SettingsError):  # stages may complete shared rows
        described |= unprepared.describe_datasets(shared)
    for stage in stages:
        list_datasets = getattr(verbs.module(stage.verb), "list_datasets", None)
        if list_datasets is not None:
            described |= list_datasets(stage.settings)
    return described


def make_plan(stage: Ready, statuses: Mapping[str, Status], described: Described) -> dict[str, Any]:
    """Return a verb's own dry run; one that needs what no stage has made yet says so."""
    plan = getattr(verbs.module(stage.verb), "plan", None)
    if plan is None:
        return {}
    states = {name: statuses[name].state for name in stage.inputs}
    if stale := [name for name, state in states.items() if state == "stale"]:
        return {"known_after": ", ".join(stale)}
    takes_rows = "described" in inspect.signature(plan).parameters
    try:
        return dict(plan(stage.settings, **({"described": described} if takes_rows else {})))
    except RegaugeError as error:
        unmade = [name for name, state in states.items() if state != "done"]
        if not unmade:
            error.within(f"stage '{stage.name}'")
            raise
        return {"known_after": ", ".join(unmade)}
