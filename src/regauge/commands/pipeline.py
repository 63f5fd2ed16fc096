"""Run several verbs in order, each on the outputs of earlier ones.

For example:

    $ regauge pipeline pipeline.toml --why
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cyclopts import Parameter

from regauge import commands, config
from regauge.commands import _stages
from regauge.commands._stages import is_follower, repetition
from regauge.commands._stages.pipeline_file import PipelineSettings, read_pipeline_file
from regauge.commands._stages.status import (
    DatasetRows,
    StageStatus,
    describe_datasets,
    explain_stage,
    inspect_stages,
    make_plan,
)
from regauge.config.output_files import PIPELINE
from regauge.monitoring.notify.events import EventSource
from regauge.monitoring.notify.notifier import open_notifier
from regauge.monitoring.notify.sinks import build_sinks
from regauge.monitoring.settings import Monitoring
from regauge.registry.pipelines.deadline import DeadlineTracker
from regauge.registry.pipelines.rounds import ROUNDS, read_clocks
from regauge.supervision.forks import open_fork_server
from regauge.system import choices, files, log, processes, stop_signals, timing
from regauge.system.errors import (
    DifferenceError,
    RegaugeError,
    SettingsError,
    TransientError,
    find_refusal,
)

if TYPE_CHECKING:
    from regauge.monitoring.notify.notifier import Notifier
    from regauge.monitoring.notify.settings import Notifications

LAST_RESULTS = ("report", "next")
"""Keys of a stage's result that the result of the pipeline repeats, from the last stage with one:
the path of a report, and the command that uses the output."""
OUTPUT = None
ROOT = PipelineSettings


@dataclass(frozen=True)
class PipelineJob:
    """A pipeline with validated stages."""

    run_file: Path
    folder: Path
    stages: list[_stages.ResolvedStage]
    statuses: dict[str, StageStatus]
    """Stage name -> status."""
    shared: config.Tables
    """Tables shared by all stages."""
    repetition: repetition.Repetition | None = None
    """A repeating pipeline's rounds."""
    until: str | None = None
    """Last stage to run; None for all stages."""

    @property
    def selected_stages(self) -> list[_stages.ResolvedStage]:
        """The stages to run, including `until`."""
        names = [stage.name for stage in self.stages]
        return self.stages if self.until is None else self.stages[: names.index(self.until) + 1]

    @property
    def is_whole(self) -> bool:
        """Whether all pipeline stages are selected."""
        return len(self.selected_stages) == len(self.stages)

    @property
    def is_finished(self) -> bool:
        """Whether all selected stages are finished."""
        return all(self.statuses[stage.name].state == "finished" for stage in self.selected_stages)

    @property
    def refusal(self) -> SettingsError | None:
        """Why the pipeline cannot start: other files in the folder, or a stale stage."""
        refusals = (status.refusal for status in self.statuses.values())
        return _find_folder_refusal(self) or next(filter(None, refusals), None)


def main(
    run_file: commands.RunFile,
    *overrides: commands.Override,
    why: Annotated[
        bool, Parameter(help="Print each stage's changed inputs, without running.")
    ] = False,
    watch: Annotated[
        float | None, Parameter(help="Seconds between checks for new data; runs until stopped.")
    ] = None,
    until: Annotated[
        str | None, Parameter(help="Last stage to run; later stages are left out.")
    ] = None,
    wait: Annotated[
        bool, Parameter(help="Wait for another pipeline in the same folder to end.")
    ] = False,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Run the stages in a run file; finished stages are skipped.

    An override `stage.<name>.key.path=value` applies to one stage. Any other override applies to
    all stages that have the key.

    For example:

        >>> regauge.pipeline("pipeline.toml", why=True)
    """
    path = Path(run_file)
    if why:
        return _show_reasons(select_stages(resolve(path, overrides), until), as_json=json)
    if dry_run:
        return _show_plan(select_stages(resolve(path, overrides), until), as_json=json)
    job = select_stages(load(path, overrides), until)
    _check_watch(job, watch)
    if is_follower(job.selected_stages[-1]):
        return _run_follower(job)
    with (
        stop_signals.record_signals(),
        _hold_folder(job.folder, is_patient=wait),
        open_fork_server(),
    ):
        if watch is not None:
            watch_data(path, overrides, watch)
        # Another pipeline may have run stages before this one got the folder.
        answer = run(select_stages(load(path, overrides, job.repetition), until))
    if json:
        log.print_json(answer)
    else:
        _show_answer(answer)
    return answer


def wait_for_stop(seconds: float) -> None:
    """Wait for some seconds; raises StopSignalError after a stop signal."""
    timing.wait_for(lambda: False, seconds)


def watch_data(
    run_file: Path,
    overrides: tuple[str, ...],
    seconds: float,
    pause: Callable[[float], object] = wait_for_stop,
) -> NoReturn:
    """Run a round whenever data arrives, until a stop signal ends the command.

    A refused model and a temporary failure are logged, and the next round is awaited. `pause` waits
    for `seconds`.
    """
    while True:
        try:
            job = load(run_file, overrides)
            if not _has_nothing_to_do(job):
                _show_answer(run(job))
        except (DifferenceError, TransientError) as error:
            log.logger.warning("%s", error)
        pause(seconds)


def load(
    run_file: Path, overrides: tuple[str, ...], earlier: repetition.Repetition | None = None
) -> PipelineJob:
    """Resolve a pipeline; raises SettingsError if it cannot start.

    `earlier` is what this command resolved before, with its file hashes.
    """
    job = resolve(run_file, overrides, earlier)
    if refusal := job.refusal:
        raise refusal
    return job


def resolve(
    run_file: Path, overrides: tuple[str, ...], earlier: repetition.Repetition | None = None
) -> PipelineJob:
    """Validate every stage in a run file, and compare it with the finished stages."""
    pipeline = read_pipeline_file(run_file, overrides)
    folder, shared, repeat = pipeline.folder, pipeline.shared, pipeline.settings.repeat
    if repeat is not None:
        rounds = repetition.select_round(pipeline, repeat, earlier)
        return PipelineJob(run_file, folder, rounds.stages, rounds.statuses, shared, rounds)
    stages = _stages.resolve_stages(pipeline.stages, shared, folder)
    return PipelineJob(run_file, folder, stages, inspect_stages(stages), shared)


def select_stages(job: PipelineJob, until: str | None) -> PipelineJob:
    """Return a job ending with the stage `until`; raises SettingsError for an unknown stage."""
    names = tuple(stage.name for stage in job.stages)
    if until is not None and until not in names:
        raise SettingsError(f"--until: no stage '{until}'", choices.did_you_mean(until, names))
    return replace(job, until=until)


def run(job: PipelineJob) -> dict[str, Any]:
    """Run the unfinished selected stages; return the answers of all selected stages."""
    rounds = job.repetition
    if rounds is not None and job.is_finished and not rounds.is_new:
        return _answer_unchanged(job)
    with _open_notifier(job) as notifier:
        return _run_stages(job, _build_deadline(job, notifier))


@contextmanager
def _open_notifier(job: PipelineJob) -> Iterator[Notifier]:
    """Yield a notifier for the shared table `monitoring`; send an event at the end of the block.

    A success is an event only if the block runs the last stage. Raises SettingsError if a sink's
    secret cannot be read.
    """
    path = job.folder.resolve()
    source = EventSource("pipeline", path.name, str(path))
    with open_notifier(_read_notifications(job), source) as notifier:
        try:
            yield notifier
        except DifferenceError as error:
            notifier.send(
                "gate_refused", problem=error.problem, next_action=error.remedy, is_final=True
            )
            raise
        if job.is_whole:
            notifier.send("finished", is_final=True)


def _read_notifications(job: PipelineJob) -> Notifications:
    table = job.shared.get("monitoring", {})
    return config.build(Monitoring, table, source=str(job.run_file)).notifications


def _run_stages(job: PipelineJob, deadline: DeadlineTracker | None) -> dict[str, Any]:
    rounds = job.repetition
    if rounds is not None:
        rounds.begin()
    records = [_build_record(stage, "pending") for stage in job.stages]
    for index, stage in enumerate(job.selected_stages):
        _save_records(job, records)
        outcome = job.statuses[stage.name].record
        has_run = not outcome
        header = f"[{stage.number}/{len(job.stages)}] {stage.name}: {stage.verb}"
        if outcome:
            log.logger.info("%s was finished earlier (%.1f s)", header, outcome["seconds"])
        else:
            log.logger.info("%s%s", header, _describe_reason(job, stage))
            with deadline.watch(stage.name) if deadline else nullcontext():
                outcome = _run_stage(stage, rounds)
            _stages.save_outcome(stage, outcome)
            log.logger.info("%s took %.1f s", header, outcome["seconds"])
        if rounds is not None:
            rounds.record_stage(stage, outcome, ran=has_run)
        records[index] = _build_record(stage, "finished", outcome)
    _save_records(job, records)
    if rounds is not None and job.is_whole:
        rounds.finish()
    return _build_answer(job, records[: len(job.selected_stages)])


def _build_answer(job: PipelineJob, records: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"folder": str(job.folder), "stages": records}
    if job.repetition is not None:
        answer["round"] = job.repetition.current.number
    for key in LAST_RESULTS:
        values = [record["result"][key] for record in records if record["result"].get(key)]
        if values:
            answer[key] = values[-1]
    return answer


def _answer_unchanged(job: PipelineJob) -> dict[str, Any]:
    records = [
        _build_record(stage, "finished", job.statuses[stage.name].record)
        for stage in job.selected_stages
    ]
    answer = _build_answer(job, records)
    text = f"round {answer['round']} is finished, and no data is new"
    if not job.is_whole:
        text = f"round {answer['round']} has finished stage '{job.until}'"
    return {**answer, "unchanged": text}


def _has_nothing_to_do(job: PipelineJob) -> bool:
    """Return whether a round is finished, or the gate refuses again."""
    rounds = job.repetition
    if rounds is None or rounds.is_new:
        return False
    if job.is_finished:
        return True
    first = next(stage for stage in job.stages if job.statuses[stage.name].state != "finished")
    return bool(rounds.current.refused_sha256 == first.sha256)


def _check_watch(job: PipelineJob, seconds: float | None) -> None:
    if seconds is None:
        return
    if seconds <= 0:
        raise SettingsError(f"--watch {seconds:g} is not an interval", "use a positive number")
    if not job.is_whole:
        raise SettingsError("--watch runs all stages of a round", "remove --until")
    if job.repetition is None:
        raise SettingsError("--watch needs a pipeline that repeats", "add the table [repeat]")


def _build_deadline(job: PipelineJob, notifier: Notifier) -> DeadlineTracker | None:
    rounds = job.repetition
    if rounds is None or rounds.settings.deadline_hours is None:
        return None
    pending = [stage.name for stage in job.stages if job.statuses[stage.name].state != "finished"]

    def send_deadline(problem: str) -> None:
        action = "look at the running stage, or raise repeat.deadline_hours"
        notifier.send("deadline_at_risk", problem=problem, next_action=action)

    return DeadlineTracker(
        rounds.settings.deadline_hours,
        rounds.current,
        pending,
        rounds.earlier_rounds,
        read_clocks,
        send_deadline,
    )


def _run_follower(job: PipelineJob) -> dict[str, Any]:
    """Run the last selected stage on a node other than the first; node 0 writes all records.

    Raises SettingsError if an earlier stage is not finished.
    """
    *earlier, stage = job.selected_stages
    for input_stage in earlier:
        if job.statuses[input_stage.name].state != "finished":
            problem = f"stage '{input_stage.name}' is not finished, and runs on one machine"
            raise SettingsError(problem, f"run --until {input_stage.name} on one machine first")
    if job.is_finished:
        return {}
    with stop_signals.record_signals(), open_fork_server():
        _run_stage(stage, None)
    return {}


def _describe_reason(job: PipelineJob, stage: _stages.ResolvedStage) -> str:
    if job.repetition is None:
        return ""
    row = explain_stage(stage, job.statuses[stage.name], job.repetition)
    return f" ({row['why']})"


def _show_reasons(job: PipelineJob, *, as_json: bool) -> dict[str, Any]:
    rows = [
        explain_stage(stage, job.statuses[stage.name], job.repetition)
        for stage in job.selected_stages
    ]
    answer: dict[str, Any] = {"folder": str(job.folder)}
    if job.repetition is not None:
        current = job.repetition.current
        answer["round"] = current.number
        answer["starts_from"] = current.base or "no version"
        answer["serving"] = current.serving or "no version"
    answer["stages"] = rows
    if as_json:
        log.print_json(answer)
        return answer
    for row in rows:
        state = "run" if row["state"] == "pending" else row["state"]
        state = "skip" if state == "finished" else state
        log.stdout.print(f"{row['name']}: {state}: {row['why']}", markup=False)
    lines = {key: value for key, value in answer.items() if key != "stages"}
    commands.show(lines, as_json=False)
    return answer


def _find_folder_refusal(job: PipelineJob) -> SettingsError | None:
    folder, remedy = job.folder, "set another output.folder"
    if (folder / PIPELINE).exists() and (folder / ROUNDS).exists() != (job.repetition is not None):
        kind = "a pipeline that does not repeat" if job.repetition else "a pipeline that repeats"
        return SettingsError(f"{folder} contains {kind}", remedy)
    entries = list(folder.iterdir()) if folder.is_dir() else []
    visible_entries = [entry for entry in entries if not entry.name.startswith(".")]
    is_known = any((folder / name).exists() for name in (PIPELINE, ROUNDS))
    if folder.is_file() or (visible_entries and not is_known):
        return SettingsError(f"{folder} is not a pipeline's folder", remedy)
    return None


@contextmanager
def _hold_folder(folder: Path, *, is_patient: bool = False) -> Iterator[None]:
    """Hold a pipeline folder's lock; the system releases it when the process ends.

    A patient command waits for the lock. Otherwise raises SettingsError if it is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seconds = math.inf if is_patient else 0.0
    with ExitStack() as stack:
        try:
            stack.enter_context(files.hold_lock(folder / files.LOCK, seconds))
        except BlockingIOError:
            remedy = "wait for it with --wait, or set another output.folder"
            raise SettingsError(f"another process is using {folder}", remedy) from None
        yield


def _run_stage(
    stage: _stages.ResolvedStage, rounds: repetition.Repetition | None
) -> dict[str, Any]:
    """Run a stage's verb; return the answer and duration. A gate's refusal is recorded."""
    start = time.monotonic()
    stop_signals.check_stop()
    try:
        with processes.restore_environment():
            answer = commands.import_verb(stage.verb).run(stage.settings)
    except RegaugeError as error:
        if rounds is not None and stage.verb == "gate" and isinstance(error, DifferenceError):
            rounds.refuse(stage)
        error.add_location(f"stage '{stage.name}'")
        raise
    return {"seconds": round(time.monotonic() - start, 3), "result": answer or {}}


def _build_record(
    stage: _stages.ResolvedStage, state: str, outcome: Mapping[str, Any] = {}
) -> dict[str, Any]:
    return {
        "name": stage.name,
        "verb": stage.verb,
        "folder": str(stage.folder),
        "state": state,
        "settings": config.dump(stage.settings),
        **{key: outcome[key] for key in ("seconds", "result") if outcome},
    }


def _save_records(job: PipelineJob, records: list[dict[str, Any]]) -> None:
    config.save(job.folder / PIPELINE, {"run_file": str(job.run_file), "stages": records})


def _show_plan(job: PipelineJob, *, as_json: bool) -> dict[str, Any]:
    refusal = {"error": str(job.refusal), "code": job.refusal.exit_code} if job.refusal else {}
    dataset_rows = describe_datasets(job.stages, job.shared)
    plans = [_describe_stage(stage, job, dataset_rows) for stage in job.selected_stages]
    for plan in (stage.get("plan", {}) for stage in plans):
        refusal = refusal or {key: plan[key] for key in ("error", "code") if "error" in plan}
    refusal = refusal or find_refusal(lambda: build_sinks(_read_notifications(job)))
    answer = {"folder": str(job.folder), "stages": plans, **refusal}
    if as_json:
        log.print_json(answer)
        return answer
    for stage, plan in zip(job.selected_stages, plans, strict=True):
        header = f"[{stage.number}/{len(job.stages)}] {stage.name}: {stage.verb}"
        status = job.statuses[stage.name].summary
        log.stdout.print(f"{header} -> {stage.folder} ({status})", markup=False)
        commands.show(plan.get("plan", {}), as_json=False)
    commands.show(refusal, as_json=False)
    return answer


def _describe_stage(
    stage: _stages.ResolvedStage, job: PipelineJob, dataset_rows: DatasetRows
) -> dict[str, Any]:
    status = job.statuses[stage.name]
    record = _build_record(stage, status.state, status.record)
    if status.state != "finished":
        record["reason"] = status.reason
    if status.state == "pending":
        record["plan"] = make_plan(stage, job.statuses, dataset_rows)
    return record


def _show_answer(answer: dict[str, Any]) -> None:
    if "unchanged" in answer:
        log.stdout.print(f"nothing to do: {answer['unchanged']}", markup=False)
        return
    *earlier_stages, last_stage = answer["stages"]
    for stage in earlier_stages:
        tables = {key: rows for key, rows in stage["result"].items() if commands.is_table(rows)}
        for key, rows in tables.items():
            title = stage["name"] if len(tables) == 1 else f"{stage['name']}: {key}"
            commands.show({title: rows}, as_json=False)
    last_answer = {
        key: value for key, value in last_stage["result"].items() if key not in LAST_RESULTS
    }
    commands.show(last_answer, as_json=False)
    for key in ("folder", *LAST_RESULTS):
        if key in answer:
            log.stdout.print(f"{key}: {answer[key]}", markup=False)
