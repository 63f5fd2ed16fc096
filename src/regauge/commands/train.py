"""Train a model, or resume a run that was stopped.

For example:

    $ regauge train run.toml stop.steps=1000
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import commands
from regauge.commands import AsJson, DryRun, Override, RunFile
from regauge.commands._parts.finished_run import complete_result, record_result
from regauge.planner.run_plans.plan_document import format_answer
from regauge.run_folders import formatting
from regauge.supervision.nodes.topology import is_whole_node
from regauge.system import processes
from regauge.system.errors import SettingsError
from regauge.system.json_files import read_json
from regauge.system.wording import format_metric
from regauge.training.callbacks import check_callbacks
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from regauge.data.unprepared import RowsByFolder

ROOT = TrainSettings
OUTPUT = "output.folder"


def main(
    run_file: RunFile,
    *overrides: Override,
    chaos: Annotated[Path | None, Parameter(show=False, help="Fault plan to inject.")] = None,
    callbacks: Annotated[Sequence[Any], Parameter(parse=False, show=False)] = (),
    max_usd: Annotated[
        float | None, Parameter(help="Save and stop when the cost reaches this many dollars.")
    ] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Train a run file's model; the same command resumes a run that was stopped.

    For example:

        >>> regauge.train("run.toml", stop__steps=1000)
    """
    limit = () if max_usd is None else (f"stop.usd={max_usd}",)
    settings = commands.load_settings(TrainSettings, run_file, (*overrides, *limit))
    if dry_run:
        from regauge.commands._parts.train_plan import read_dataset_rows

        dataset_rows = read_dataset_rows(settings, run_file, overrides)
        answer = plan(settings, dataset_rows)
        commands.show(answer if json else format_answer(answer), as_json=json)
        return answer
    result = run(settings, chaos, callbacks)
    if not processes.is_supervised():
        commands.show(result if json else _summarize(result), as_json=json)
    return result


def plan(settings: TrainSettings, dataset_rows: RowsByFolder | None = None) -> dict[str, Any]:
    """Return a run's plan, without allocating anything.

    `dataset_rows` has the row layouts of datasets that are not prepared yet.
    """
    from regauge.commands._parts.train_plan import plan_training

    return plan_training(settings, dataset_rows or {})


def run(
    settings: TrainSettings, chaos: Path | None = None, callbacks: Sequence[Any] = ()
) -> dict[str, Any]:
    """Train with the process count from the settings or the launcher; return the result.

    Without a launcher, this process starts the ranks and supervises them. The single process that a
    launcher starts on each node does the same. With callback objects, the run is computed in this
    process.
    """
    if not processes.is_supervised():  # the supervisor has already checked the run of its ranks
        from regauge.commands._parts.train_plan import check_before_start

        if result := check_before_start(settings):
            return complete_result(result, settings)
    if callbacks:
        return _run_here(settings, callbacks)
    if processes.is_launched() and not is_whole_node(settings.execution.nodes):
        from regauge.training.run import attempt

        return record_result(
            attempt(settings, processes.detect_world(settings.execution.processes))
        )
    from regauge.config.output_files import RESULT
    from regauge.supervision import supervisor
    from regauge.supervision.faults.faults import read_plan
    from regauge.training.defaults import count_local_processes

    if chaos is not None:
        read_plan(chaos)
    size = count_local_processes(settings.execution.processes, settings.accelerator)
    supervisor.supervise(settings, size, str(chaos.resolve()) if chaos else None)
    result = read_json(Path(settings.output.folder) / RESULT, "run the same command again")
    return record_result(complete_result(result, settings))


def _summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result lines for people: metrics, time and cost, model, next command."""
    before, after = result["initial_metrics"], result["metrics"]
    metrics = {
        name: format_metric(name, value)
        + (f" (before: {format_metric(name, before[name])})" if name in before else "")
        for name, value in after.items()
    }
    facts: dict[str, Any] = {"steps": f"{result['steps']:,} ({result['stop_reason']})"}
    if result.get("best_step") not in (None, result["steps"]):
        facts["best step"] = result["best_step"]
    facts |= {**metrics, "tokens": f"{result['tokens']:,}"}
    facts["time"] = formatting.duration(result["seconds"])
    if result.get("usd") is not None:
        facts["cost"] = formatting.dollars(result["usd"])
    if "goodput" in result:
        facts["goodput"] = formatting.percent(result["goodput"])
    return facts | {key: result[key] for key in ("output", "model", "next") if key in result}


def _run_here(settings: TrainSettings, callbacks: Sequence[Any]) -> dict[str, Any]:
    """Train in this process and call the callbacks; raises SettingsError for several processes."""
    from regauge.training.defaults import count_local_processes
    from regauge.training.run import attempt

    check_callbacks(callbacks)
    num_processes = count_local_processes(settings.execution.processes, settings.accelerator)
    if num_processes > 1 and not processes.is_launched():
        problem = f"callbacks of this program need one process, not {num_processes}"
        remedy = 'set execution.processes = 1, or name importable ones: callbacks=["module:Class"]'
        raise SettingsError(problem, remedy)
    world = processes.detect_world(settings.execution.processes)
    return record_result(attempt(settings, world, callbacks))
