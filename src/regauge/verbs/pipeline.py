"""Run several verbs one after another, each on what the earlier ones made."""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from regauge import choices, config, log, processes, verbs
from regauge.errors import RegaugeError, SettingsError
from regauge.supervision.forks import forks
from regauge.verbs import _stages

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
    """A pipeline that can start: every stage of it has been validated."""

    run_file: Path
    folder: Path
    stages: list[_stages.Ready]
    finished: dict[str, dict[str, Any]]


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
    work = load(Path(run_file), overrides)
    if dry_run:
        return _show_plan(work, as_json=json)
    with _owned(work.folder), forks():
        answer = run(work)
    if json:
        log.answer(answer)
    else:
        _show_end(answer)
    return answer


def load(run_file: Path, overrides: tuple[str, ...]) -> Work:
    """Validate every stage of a run file against itself and against what is finished."""
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
    _check_own(folder)
    return Work(run_file, folder, ready, _stages.finished(ready))


def run(work: Work) -> dict[str, Any]:
    """Run the stages that are not finished, and return what each of them answered."""
    records = [_record(stage, "waiting") for stage in work.stages]
    made: dict[str, str] = {}
    for index, stage in enumerate(work.stages):
        _save(work, records)
        outcome = work.finished.get(stage.name)
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


def _check_own(folder: Path) -> None:
    """Refuse a folder that holds anything but a pipeline."""
    entries = list(folder.iterdir()) if folder.is_dir() else []
    foreign = [entry for entry in entries if not entry.name.startswith(".")]
    if folder.is_file() or (foreign and not (folder / RECORD).exists()):
        raise SettingsError(f"{folder} holds something else", "set another output.folder")


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Let one process at a time work in a folder; the system lifts the lock when it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    plans = []
    for stage in work.stages:
        state = "finished" if stage.name in work.finished else "waiting"
        plans.append(_record(stage, state) | {"plan": _plan(stage, work)})
    answer = {"folder": str(work.folder), "stages": plans}
    if as_json:
        log.answer(answer)
        return answer
    for stage, plan in zip(work.stages, plans, strict=True):
        header = f"[{stage.number}/{len(plans)}] {stage.name}: {stage.verb}"
        log.stdout.print(f"{header} -> {stage.folder} ({plan['state']})", markup=False)
        verbs.show(plan["plan"], as_json=False)
    return answer


def _plan(stage: _stages.Ready, work: Work) -> dict[str, Any]:
    """Return a verb's own dry run; one that needs what no stage has made yet says so."""
    plan = getattr(verbs.module(stage.verb), "plan", None)
    if plan is None:
        return {}
    try:
        return dict(plan(stage.settings))
    except RegaugeError as error:
        unmade = [name for name in stage.inputs if name not in work.finished]
        if not unmade:
            error.within(f"stage '{stage.name}'")
            raise
        return {"known_after": ", ".join(unmade)}


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
