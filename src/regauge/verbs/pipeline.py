"""Run several verbs one after another, each on what the earlier ones made."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from regauge import choices, config, files, log, processes, verbs
from regauge.errors import RegaugeError, SettingsError
from regauge.supervision.forks import forks
from regauge.verbs import _stage_plan, _stage_status, _stages

RECORD = "pipeline.json"
OUTPUT = None


class PipelineOutput(config.Settings):
    """Where a pipeline writes."""

    folder: str | None = None
    """Folder that holds one folder per stage; `out/<name of the run file>` when left out."""


class Pipeline(config.Settings):
    """Stages in their order; the other tables of the run file are shared by all of them."""

    output: PipelineOutput = PipelineOutput()
    stage: tuple[_stages.Stage, ...] = Field(min_length=1)
    """The stages, each a verb with what is different for it."""


ROOT = Pipeline


@dataclass(frozen=True)
class Work:
    """A pipeline of which every stage has been validated."""

    run_file: Path
    folder: Path
    stages: list[_stages.Ready]
    statuses: dict[str, _stage_status.Status]
    """The status of each stage, by its name."""
    shared: config.Tables
    """The tables that all stages share."""

    @property
    def refusal(self) -> SettingsError | None:
        """Why the pipeline cannot start: its folder is not its own, or a stage is stale."""
        refusals = (status.refusal for status in self.statuses.values())
        return _find_foreign(self.folder) or next(filter(None, refusals), None)


def main(
    run_file: verbs.RunFile,
    *overrides: verbs.Override,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Run the stages of a run file; a finished stage is not run again.

    `stage.<name>.key.path=value` assigns to one stage, any other assignment to every stage that
    has such a key.
    """
    if dry_run:
        return _show_plan(resolve(Path(run_file), overrides), as_json=json)
    work = load(Path(run_file), overrides)
    with _owned(work.folder), forks():
        answer = run(work)
    if json:
        log.answer(answer)
    else:
        _show_end(answer)
    return answer


def load(run_file: Path, overrides: tuple[str, ...]) -> Work:
    """Return a pipeline that can start; raises SettingsError for one that cannot."""
    work = resolve(run_file, overrides)
    if refusal := work.refusal:
        raise refusal
    return work


def resolve(run_file: Path, overrides: tuple[str, ...]) -> Work:
    """Validate every stage of a run file, and compare it with what is finished."""
    everywhere, by_stage = _sort(overrides)
    tables = config.override(config.read(run_file), everywhere)
    shared = {name: table for name, table in tables.items() if name != "stage"}
    output = tables.get("output")
    own = {"folder": output["folder"]} if isinstance(output, dict) and "folder" in output else {}
    settings = config.build(Pipeline, tables | {"output": own}, verbs.tables(), str(run_file))
    stages = _assign(settings.stage, everywhere, by_stage)
    verbs.own(run_file, {**shared, "stage": [stage.model_extra for stage in stages]})
    folder = Path(settings.output.folder or Path("out") / run_file.stem)
    ready = _stages.resolve(stages, shared, folder)
    return Work(run_file, folder, ready, _stage_status.inspect(ready), shared)


def run(work: Work) -> dict[str, Any]:
    """Run the stages that are not finished, and return what each of them answered."""
    records = [_record(stage, "waiting") for stage in work.stages]
    made: dict[str, str] = {}
    for index, stage in enumerate(work.stages):
        _save(work, records)
        outcome = work.statuses[stage.name].outcome
        header = f"[{stage.number}/{len(work.stages)}] {stage.name}: {stage.verb}"
        if outcome:
            log.logger.info("%s was finished earlier (%.1f s)", header, outcome["seconds"])
            made[stage.name] = outcome["sha256"]
        else:
            log.logger.info("%s", header)
            outcome = _run_stage(stage)
            made[stage.name] = _stages.mark(stage, made, outcome)
            log.logger.info("%s took %.1f s", header, outcome["seconds"])
        outcome = {key: outcome[key] for key in ("seconds", "answer")}
        records[index] = _record(stage, "finished") | outcome
    _save(work, records)
    reports = [record["answer"].get("report") for record in records]
    report = next((path for path in reversed(reports) if path), None)
    answer = {"folder": str(work.folder), "stages": records}
    return answer | ({"report": report} if report else {})


def _find_foreign(folder: Path) -> SettingsError | None:
    """Return the refusal of a folder that holds anything but a pipeline."""
    entries = list(folder.iterdir()) if folder.is_dir() else []
    foreign = [entry for entry in entries if not entry.name.startswith(".")]
    if folder.is_file() or (foreign and not (folder / RECORD).exists()):
        return SettingsError(f"{folder} holds something else", "set another output.folder")
    return None


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Let one process at a time work in a folder; the system lifts the lock when it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(files.locked(folder / files.LOCK))
        except BlockingIOError:
            remedy = "wait for it, or set another output.folder"
            raise SettingsError(f"another process works in {folder}", remedy) from None
        yield


def _run_stage(stage: _stages.Ready) -> dict[str, Any]:
    started = time.monotonic()
    try:
        with processes.own_environment():
            answer = verbs.module(stage.verb).run(stage.settings)
    except RegaugeError as error:
        error.within(f"stage '{stage.name}'")
        raise
    return {"seconds": round(time.monotonic() - started, 3), "answer": answer or {}}


def _record(stage: _stages.Ready, state: str) -> dict[str, Any]:
    return {
        "name": stage.name,
        "verb": stage.verb,
        "folder": str(stage.folder),
        "state": state,
        "settings": config.dump(stage.settings),
    }


def _save(work: Work, records: list[dict[str, Any]]) -> None:
    config.save(work.folder / RECORD, {"run_file": str(work.run_file), "stages": records})


def _show_plan(work: Work, *, as_json: bool) -> dict[str, Any]:
    refusal = {"would_refuse": str(work.refusal)} if work.refusal else {}
    described = _stage_plan.describe_datasets(work.stages, work.shared)
    plans = [_describe(stage, work, described) for stage in work.stages]
    answer = {"folder": str(work.folder), "stages": plans, **refusal}
    if as_json:
        log.answer(answer)
        return answer
    for stage, plan in zip(work.stages, plans, strict=True):
        header = f"[{stage.number}/{len(plans)}] {stage.name}: {stage.verb}"
        status = work.statuses[stage.name].summary
        log.stdout.print(f"{header} -> {stage.folder} ({status})", markup=False)
        verbs.show(plan.get("plan", {}), as_json=False)
    verbs.show(refusal, as_json=False)
    return answer


def _describe(stage: _stages.Ready, work: Work, described: _stage_plan.Described) -> dict[str, Any]:
    """Return the state of a stage, and what it made or would do."""
    status = work.statuses[stage.name]
    record = _record(stage, status.state)
    if status.state == "done":
        return record | {key: status.outcome[key] for key in ("seconds", "answer")}
    record["reason"] = status.reason
    if status.state == "to do":
        record["plan"] = _stage_plan.make_plan(stage, work.statuses, described)
    return record


def _show_end(answer: dict[str, Any]) -> None:
    """Print the tables of all stages, what the last one answered, and the report to open."""
    *earlier, last = answer["stages"]
    for stage in earlier:
        tables = {key: rows for key, rows in stage["answer"].items() if verbs.is_table(rows)}
        for key, rows in tables.items():
            title = stage["name"] if len(tables) == 1 else f"{stage['name']}: {key}"
            verbs.show({title: rows}, as_json=False)
    told = {key: value for key, value in last["answer"].items() if key != "report"}
    verbs.show(told, as_json=False)
    log.stdout.print(f"folder: {answer['folder']}", markup=False)
    if "report" in answer:
        log.stdout.print(f"report: {answer['report']}", markup=False)


def _sort(overrides: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the assignments for every stage, and those for one, by its name."""
    everywhere: list[str] = []
    by_stage: dict[str, tuple[str, ...]] = {}
    for assignment in overrides:
        first, _, rest = assignment.partition(".")
        name, dot, inner = rest.partition(".")
        if first == "stage" and dot and "=" not in name:
            by_stage[name] = (*by_stage.get(name, ()), inner)
        else:
            everywhere.append(assignment)
    return tuple(everywhere), by_stage


def _assign(
    stages: tuple[_stages.Stage, ...],
    everywhere: tuple[str, ...],
    by_stage: dict[str, tuple[str, ...]],
) -> tuple[_stages.Stage, ...]:
    """Return the stages with the command line laid over what they say themselves.

    `output.folder` is the pipeline's, also where a stage has an `output` of its own.
    """
    everywhere = tuple(text for text in everywhere if not text.startswith("output.folder="))
    names = tuple(stage.name or stage.verb for stage in stages)
    for name in by_stage:
        if name not in names:
            raise SettingsError(f"no stage '{name}'", choices.did_you_mean(name, names))
    result = []
    for name, stage in zip(names, stages, strict=True):
        own = dict(stage.model_extra or {})
        shared = tuple(text for text in everywhere if re.split("[.=]", text)[0] in own)
        own = config.override(own, (*shared, *by_stage.get(name, ())))
        for key in ("verb", "name"):
            if key in own:
                raise SettingsError(f"stage.{name}.{key} is fixed", "change it in the run file")
        result.append(_stages.Stage.model_validate({"verb": stage.verb, "name": name} | own))
    return tuple(result)
