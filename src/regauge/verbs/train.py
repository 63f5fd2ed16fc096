"""Train a model, or go on with a run that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import config, processes, verbs
from regauge.supervision.nodes.topology import starts
from regauge.training.defaults import local_processes
from regauge.training.settings import Training
from regauge.verbs import AsJson, DryRun, Override, RunFile

ROOT = Training
OUTPUT = "output.folder"


def main(
    run_file: RunFile,
    *overrides: Override,
    chaos: Annotated[Path | None, Parameter(help="a plan of faults to inject on purpose")] = None,
    max_usd: Annotated[float | None, Parameter(help="save and stop at so many dollars")] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Train as a run file says; the same command goes on with a run that was stopped."""
    limit = () if max_usd is None else (f"stop.usd={max_usd}",)
    settings = verbs.load(Training, run_file, (*overrides, *limit))
    if dry_run:
        return verbs.show(plan(settings), as_json=json)
    result = run(settings, chaos)
    return result if processes.supervised() else verbs.show(result, as_json=json)


def plan(settings: Training) -> dict[str, Any]:
    """Return what a run would do, without allocating anything.

    torch is imported last, to count the model, once all else is known to be right.
    """
    from regauge.training import dry_run as planning

    answer = planning.plan(settings)
    if reason := planning.uncountable(settings):
        return {**answer, "parameters": f"unknown: {reason}"}
    from regauge.training.batch_finder.memory import sized

    answer |= sized(settings)
    if settings.batch.microbatch_rows == "auto":
        from regauge.training.batch_finder.finder import foretold

        answer["microbatch_rows"] = foretold(settings)
    return answer


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
        if (path := warm_start.begun(settings).model.path) is not None:
            hub.at(path)
    if processes.launched() and not starts(settings.execution.nodes):
        from regauge.training.run import attempt

        return attempt(settings, processes.world())
    from regauge.faults import read
    from regauge.supervision import supervisor
    from regauge.supervision.goodput import goodput
    from regauge.training.run_record import RESULT

    if chaos is not None:
        read(chaos)
    size = local_processes(settings.execution.processes, settings.accelerator)
    supervisor.supervise(settings, size, str(chaos.resolve()) if chaos else None)
    folder = Path(settings.output.folder)
    found = goodput(folder)
    result = config.read(folder / RESULT)
    return {**result, "goodput": round(found.share, 4)} if found else result
