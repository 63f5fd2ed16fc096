"""Run several verbs in order, each on the outputs of earlier ones."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from regauge import choices, config, files, log, processes, stop_signals, verbs
from regauge.errors import RegaugeError, SettingsError
from regauge.monitoring.notifications.events import EventSource
from regauge.monitoring.notifications.notifier import EndReport, notify_end
from regauge.monitoring.settings import Monitoring
from regauge.supervision.forks import open_fork_server
from regauge.verbs import _stages
from regauge.verbs._stages import plan as stage_plan
from regauge.verbs._stages import status as stage_status

RECORD = "pipeline.json"
LAST_RESULTS = ("report", "next")
"""Keys of a stage's result that the result of the pipeline repeats, from the last stage with one:
the path of a report, and the command that uses the output."""
OUTPUT = None


class PipelineOutput(config.Settings):
    """Output of a pipeline."""

    folder: str | None = None
    """Folder that contains one folder for each stage; by default `out/<name of the run file>`."""


class PipelineSettings(config.Settings):
    """The stages of a pipeline in order; they share the other tables of the run file."""

    output: PipelineOutput = PipelineOutput()
    stage: tuple[_stages.Stage, ...] = Field(min_length=1)
    """The stages, each a verb with the tables that override the shared ones."""


ROOT = PipelineSettings


@dataclass(frozen=True)
class PipelineJob:
    """A pipeline with validated stages."""

    run_file: Path
    folder: Path
    stages: list[_stages.ResolvedStage]
    statuses: dict[str, stage_status.StageStatus]
    """The status of each stage by name."""
    shared: config.Tables
    """The tables that all stages share."""

    @property
    def refusal(self) -> SettingsError | None:
        """The reason why the pipeline cannot start: other files in its folder, or a stale stage."""
        refusals = (status.refusal for status in self.statuses.values())
        return _find_folder_refusal(self.folder) or next(filter(None, refusals), None)


def main(
    run_file: verbs.RunFile,
    *overrides: verbs.Override,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Run the stages of a run file; finished stages are skipped.

    An override `stage.<name>.key.path=value` applies to one stage. Any other override applies to
    all stages that have the key.
    """
    if dry_run:
        return _show_plan(resolve(Path(run_file), overrides), as_json=json)
    job = load(Path(run_file), overrides)
    with (
        stop_signals.record_signals(),
        _hold_folder(job.folder),
        _notify_end(job),
        open_fork_server(),
    ):
        answer = run(job)
    if json:
        log.print_json(answer)
    else:
        _show_answer(answer)
    return answer


def load(run_file: Path, overrides: tuple[str, ...]) -> PipelineJob:
    """Resolve a pipeline; raises SettingsError if it cannot start."""
    job = resolve(run_file, overrides)
    if refusal := job.refusal:
        raise refusal
    return job


def resolve(run_file: Path, overrides: tuple[str, ...]) -> PipelineJob:
    """Validate every stage of a run file, and compare it with the finished stages."""
    shared_overrides, stage_overrides = _group_overrides(overrides)
    roots = verbs.settings_roots().values()
    tables = config.apply_overrides(config.read(run_file), shared_overrides, *roots)
    shared = {name: table for name, table in tables.items() if name != "stage"}
    output = tables.get("output")
    output = output if isinstance(output, dict) else {}
    pipeline_output = {name: output[name] for name in ("folder",) if name in output}
    pipeline_tables = tables | {"output": pipeline_output}
    settings = config.build(PipelineSettings, pipeline_tables, verbs.table_names(), str(run_file))
    stages = _apply_to_stages(settings.stage, shared_overrides, stage_overrides)
    verbs.allow_user_code(run_file, {**shared, "stage": [stage.model_extra for stage in stages]})
    folder = Path(settings.output.folder or Path("out") / run_file.stem)
    resolved_stages = _stages.resolve_stages(stages, shared, folder)
    statuses = stage_status.inspect_stages(resolved_stages)
    return PipelineJob(run_file, folder, resolved_stages, statuses, shared)


def run(job: PipelineJob) -> dict[str, Any]:
    """Run the unfinished stages; return the answers of all stages."""
    records = [_build_record(stage, "pending") for stage in job.stages]
    hashes: dict[str, str] = {}
    for index, stage in enumerate(job.stages):
        _save_records(job, records)
        outcome = job.statuses[stage.name].record
        header = f"[{stage.number}/{len(job.stages)}] {stage.name}: {stage.verb}"
        if outcome:
            log.logger.info("%s was finished earlier (%.1f s)", header, outcome["seconds"])
            hashes[stage.name] = outcome["sha256"]
        else:
            log.logger.info("%s", header)
            outcome = _run_stage(stage)
            hashes[stage.name] = _stages.save_outcome(stage, hashes, outcome)
            log.logger.info("%s took %.1f s", header, outcome["seconds"])
        outcome = {key: outcome[key] for key in ("seconds", "result")}
        records[index] = _build_record(stage, "finished") | outcome
    _save_records(job, records)
    answer = {"folder": str(job.folder), "stages": records}
    for key in LAST_RESULTS:
        values = [record["result"][key] for record in records if record["result"].get(key)]
        if values:
            answer[key] = values[-1]
    return answer


def _find_folder_refusal(folder: Path) -> SettingsError | None:
    """Return the refusal of a folder with files that do not belong to a pipeline."""
    entries = list(folder.iterdir()) if folder.is_dir() else []
    visible_entries = [entry for entry in entries if not entry.name.startswith(".")]
    if folder.is_file() or (visible_entries and not (folder / RECORD).exists()):
        return SettingsError(f"{folder} is not a pipeline's folder", "set another output.folder")
    return None


@contextmanager
def _hold_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a pipeline's folder; the system releases it when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(files.hold_lock(folder / files.LOCK))
        except BlockingIOError:
            remedy = "wait for it, or set another output.folder"
            raise SettingsError(f"another process is using {folder}", remedy) from None
        yield


def _notify_end(job: PipelineJob) -> AbstractContextManager[EndReport]:
    """Return a block that sends an event at its end, by the shared table `monitoring`."""
    tables = job.shared.get("monitoring", {})
    monitoring = config.build(Monitoring, tables, source=str(job.run_file))
    folder = job.folder.resolve()
    source = EventSource("pipeline", folder.name, str(folder))
    return notify_end(monitoring.notifications, source)


def _run_stage(stage: _stages.ResolvedStage) -> dict[str, Any]:
    """Run the verb of a stage; return its answer and duration."""
    start = time.monotonic()
    stop_signals.check_stop()
    try:
        with processes.restore_environment():
            answer = verbs.import_verb(stage.verb).run(stage.settings)
    except RegaugeError as error:
        error.add_location(f"stage '{stage.name}'")
        raise
    return {"seconds": round(time.monotonic() - start, 3), "result": answer or {}}


def _build_record(stage: _stages.ResolvedStage, state: str) -> dict[str, Any]:
    return {
        "name": stage.name,
        "verb": stage.verb,
        "folder": str(stage.folder),
        "state": state,
        "settings": config.dump(stage.settings),
    }


def _save_records(job: PipelineJob, records: list[dict[str, Any]]) -> None:
    config.save(job.folder / RECORD, {"run_file": str(job.run_file), "stages": records})


def _show_plan(job: PipelineJob, *, as_json: bool) -> dict[str, Any]:
    """Print the state and the plan of every stage; return them."""
    refusal = {"error": str(job.refusal), "code": job.refusal.exit_code} if job.refusal else {}
    dataset_rows = stage_plan.describe_datasets(job.stages, job.shared)
    plans = [_describe_stage(stage, job, dataset_rows) for stage in job.stages]
    for plan in (stage.get("plan", {}) for stage in plans):
        refusal = refusal or {key: plan[key] for key in ("error", "code") if "error" in plan}
    answer = {"folder": str(job.folder), "stages": plans, **refusal}
    if as_json:
        log.print_json(answer)
        return answer
    for stage, plan in zip(job.stages, plans, strict=True):
        header = f"[{stage.number}/{len(plans)}] {stage.name}: {stage.verb}"
        status = job.statuses[stage.name].summary
        log.stdout.print(f"{header} -> {stage.folder} ({status})", markup=False)
        verbs.show(plan.get("plan", {}), as_json=False)
    verbs.show(refusal, as_json=False)
    return answer


def _describe_stage(
    stage: _stages.ResolvedStage, job: PipelineJob, dataset_rows: stage_plan.DatasetRows
) -> dict[str, Any]:
    """Return the state of a stage, with its result if it is finished, or its plan."""
    status = job.statuses[stage.name]
    record = _build_record(stage, status.state)
    if status.state == "finished":
        return record | {key: status.record[key] for key in ("seconds", "result")}
    record["reason"] = status.reason
    if status.state == "pending":
        record["plan"] = stage_plan.make_plan(stage, job.statuses, dataset_rows)
    return record


def _show_answer(answer: dict[str, Any]) -> None:
    """Print the tables of all stages, the answer of the last stage, and what a user does next."""
    *earlier_stages, last_stage = answer["stages"]
    for stage in earlier_stages:
        tables = {key: rows for key, rows in stage["result"].items() if verbs.is_table(rows)}
        for key, rows in tables.items():
            title = stage["name"] if len(tables) == 1 else f"{stage['name']}: {key}"
            verbs.show({title: rows}, as_json=False)
    last_answer = {
        key: value for key, value in last_stage["result"].items() if key not in LAST_RESULTS
    }
    verbs.show(last_answer, as_json=False)
    for key in ("folder", *LAST_RESULTS):
        if key in answer:
            log.stdout.print(f"{key}: {answer[key]}", markup=False)


def _group_overrides(
    overrides: tuple[str, ...],
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the overrides of all stages, and the overrides of single stages by name."""
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
    stages: tuple[_stages.Stage, ...],
    shared_overrides: tuple[str, ...],
    stage_overrides: dict[str, tuple[str, ...]],
) -> tuple[_stages.Stage, ...]:
    """Return the stages with the overrides applied to their tables.

    An override of `output.folder` sets the folder of the pipeline, never of a stage.
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
            tables, (*overrides, *stage_overrides.get(name, ())), *verbs.settings_roots().values()
        )
        for key in ("verb", "name"):
            if key in tables:
                raise SettingsError(f"stage.{name}.{key} is fixed", "change it in the run file")
        overridden_stages.append(
            _stages.Stage.model_validate({"verb": stage.verb, "name": name} | tables)
        )
    return tuple(overridden_stages)
