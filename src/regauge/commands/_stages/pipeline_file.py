"""Reads a pipeline's run file: its settings, and its stages with their overrides.

It does not read data or output folders, so that `launch` can plan another machine's pipeline.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from regauge import commands, config
from regauge.commands._stages import ResolvedStage, Stage, resolve_stages
from regauge.commands._stages.repeating import drop_serving
from regauge.monitoring.settings import Monitoring
from regauge.registry.pipelines.settings import RegistryModel, Repeat
from regauge.system import choices
from regauge.system.errors import SettingsError


class PipelineOutput(config.Settings):
    """Pipeline output."""

    folder: str | None = None
    """Folder with one subfolder per stage; default: `out/<run file name>`."""


class PipelineSettings(config.Settings):
    """Pipeline stages in order; they share the run file's other tables."""

    output: PipelineOutput = PipelineOutput()
    repeat: Repeat | None = None
    """Repetition on new data; without this table, the stages run once."""
    registry: RegistryModel | None = None
    """The registry with the serving model, for `@serving`."""
    monitoring: Monitoring = Monitoring()
    """Pipeline events for people."""
    stage: tuple[Stage, ...] = Field(min_length=1)
    """Stages, each a verb with tables overriding the shared ones."""


@dataclass(frozen=True)
class PipelineFile:
    """A run file with all overrides applied."""

    settings: PipelineSettings
    stages: tuple[Stage, ...]
    shared: config.Tables
    """Tables shared by all stages."""
    folder: Path
    """Pipeline output folder."""


def read_pipeline_file(run_file: Path, overrides: tuple[str, ...]) -> PipelineFile:
    """Read a run file, and check it except for the stages' settings.

    Raises SettingsError.
    """
    shared_overrides, stage_overrides = _group_overrides(overrides)
    roots = commands.settings_roots().values()
    tables = config.apply_overrides(config.read(run_file), shared_overrides, *roots)
    shared = {name: table for name, table in tables.items() if name != "stage"}
    output = tables.get("output")
    output = output if isinstance(output, dict) else {}
    pipeline_output = {name: output[name] for name in ("folder",) if name in output}
    pipeline_tables = tables | {"output": pipeline_output}
    settings = config.build(
        PipelineSettings, pipeline_tables, commands.table_names(), str(run_file)
    )
    stages = _apply_to_stages(settings.stage, shared_overrides, stage_overrides)
    commands.allow_user_code(run_file, {**shared, "stage": [stage.model_extra for stage in stages]})
    folder = Path(settings.output.folder or Path("out") / run_file.stem)
    return PipelineFile(settings, stages, shared, folder)


def resolve_without_data(pipeline: PipelineFile) -> list[ResolvedStage]:
    """Return the stages as they are while no version serves, without reading any file.

    Their folders are those in a pipeline that does not repeat. Raises SettingsError for an invalid
    stage.
    """
    stages, shared = pipeline.stages, pipeline.shared
    if pipeline.settings.repeat is not None:
        shared = drop_serving(shared)
        stages = tuple(
            Stage.model_validate(
                {"verb": stage.verb, "name": stage.name, **drop_serving(stage.model_extra or {})}
            )
            for stage in stages
        )
    return resolve_stages(stages, shared, pipeline.folder)


def _group_overrides(
    overrides: tuple[str, ...],
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the overrides for all stages, and stage name -> overrides for single stages."""
    shared_overrides: list[str] = []
    stage_overrides: dict[str, tuple[str, ...]] = {}
    for override in overrides:
        table, _, rest = override.partition(".")
        name, dot, stage_override = rest.partition(".")
        if table == "stage" and dot and "=" not in name:
            stage_overrides[name] = (*stage_overrides.get(name, ()), stage_override)
        else:
            shared_overrides.append(override)
    return tuple(shared_overrides), stage_overrides


def _apply_to_stages(
    stages: tuple[Stage, ...],
    shared_overrides: tuple[str, ...],
    stage_overrides: dict[str, tuple[str, ...]],
) -> tuple[Stage, ...]:
    """Return the stages with the overrides applied to their tables.

    An override of `output.folder` sets the pipeline's folder, never a stage's.
    """
    shared_overrides = tuple(
        override for override in shared_overrides if not override.startswith("output.folder=")
    )
    names = tuple(stage.name or stage.verb for stage in stages)
    for name in stage_overrides:
        if name not in names:
            raise SettingsError(f"no stage '{name}'", choices.did_you_mean(name, names))
    overridden_stages = []
    for name, stage in zip(names, stages, strict=True):
        tables = dict(stage.model_extra or {})
        overrides = tuple(text for text in shared_overrides if re.split("[.=]", text)[0] in tables)
        tables = config.apply_overrides(
            tables,
            (*overrides, *stage_overrides.get(name, ())),
            *commands.settings_roots().values(),
        )
        for key in ("verb", "name"):
            if key in tables:
                raise SettingsError(f"stage.{name}.{key} is fixed", "change it in the run file")
        overridden_stages.append(Stage.model_validate({"verb": stage.verb, "name": name} | tables))
    return tuple(overridden_stages)
