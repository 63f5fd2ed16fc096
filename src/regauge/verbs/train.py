"""Train a model, or go on with a run that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import config, processes, verbs
from regauge.supervision.nodes.topology import starts
from regauge.training.defaults import local_processes
from regauge.training.settings import Training
from regauge.verbs import AsJson, DryRun, Override, RunFile

if TYPE_CHECKING:
    from regauge.data.unprepared import Described

ROOT = Training
OUTPUT = "output.folder"


def main(
    run_file: RunFile,
    *overrides: Override,
    chaos: Annotated[Path | None, Parameter(show=False, help="a plan of faults to inject")] = None,
    max_usd: Annotated[float | None, Parameter(help="save and stop at so many dollars")] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Train as a run file says; the same command goes on with a run that was stopped."""
    limit = () if max_usd is None else (f"stop.usd={max_usd}",)
    settings = verbs.load(Training, run_file, (*overrides, *limit))
    if dry_run:
        described = _describe_datasets(settings, run_file, overrides)
        return verbs.show(plan(settings, described), as_json=json)
    result = run(settings, chaos)
    return result if processes.supervised() else verbs.show(result, as_json=json)


def plan(settings: Training, described: Described | None = None) -> dict[str, Any]:
    """Return what a run would do, without allocating anything.

    `described` has the rows of datasets that are not prepared yet. torch is imported last, to count
    the model, once all else is known to be right.
    """
    from regauge.models.hub import local_only
    from regauge.training import dry_run as planning

    answer = planning.plan(settings)
    if reason := planning.uncountable(settings, described or {}):
        return {**answer, "parameters": f"unknown: {reason}"}
    from regauge.training.batch_finder.memory import sized

    with local_only():
        answer |= sized(settings, described or {})
        if settings.batch.microbatch_rows == "auto":
            from regauge.training.batch_finder.finder import describe_forecast

            answer["microbatch_rows"] = describe_forecast(settings)
    return answer


def _describe_datasets(settings: Training, run_file: Path, overrides: tuple[str, ...]) -> Described:
    """Return what the run file says of the rows of datasets, unless all are prepared.

    A command line that names a dataset may leave out the folder that `prepare` writes.
    """
    from regauge.data.unprepared import describe_datasets, is_prepared

    if all(is_prepared(Path(aim.data.path)) for aim in settings.task_configs):
        return {}
    tables = config.read(run_file)
    others = tuple(text for text in overrides if not text.startswith("data."))
    versions = (config.override(tables, texts) for texts in (others, overrides))
    return dict(item for version in versions for item in describe_datasets(version).items())


def run(settings: Training, chaos: Path | None = None) -> dict[str, Any]:
    """Train on as many processes as the settings or the launcher say; return the result.

    Where no launcher started this process, it starts those of the run and supervises them; so does
    the one that a launcher starts on each node.
    """
    from regauge.models import hub
    from regauge.training import dry_run as planning
    from regauge.training import warm_start

    if not processes.supervised():  # then it has been checked, and what is wrong now is told
        planning.check(settings)
        if (path := warm_start.use_copied_weights(settings).model.path) is not None:
            hub.at(path)
    if processes.launched() and not starts(settings.execution.nodes):
        from regauge.training.run import attempt

        return attempt(settings, processes.world())
    from regauge.supervision import supervisor
    from regauge.supervision.goodput import goodput
    from regauge.testing.faults import read_plan
    from regauge.training.run_record import RESULT

    if chaos is not None:
        read_plan(chaos)
    size = local_processes(settings.execution.processes, settings.accelerator)
    supervisor.supervise(settings, size, str(chaos.resolve()) if chaos else None)
    folder = Path(settings.output.folder)
    found = goodput(folder)
    result = config.read(folder / RESULT)
    return {**result, "goodput": round(found.share, 4)} if found else result
