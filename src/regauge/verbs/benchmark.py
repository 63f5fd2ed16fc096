"""Measure how fast a run trains on growing numbers of processes, and how well that scales."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import config, verbs
from regauge.errors import SettingsError
from regauge.training.benchmark_settings import BENCHMARK, Benchmarking
from regauge.verbs import AsJson, DryRun, Override, RunFile

ROOT = Benchmarking
OUTPUT = "output.folder"


def main(
    run_file: RunFile,
    *overrides: Override,
    training: Annotated[bool, Parameter(help="measure training, the only kind so far")] = False,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> dict[str, Any]:
    """Measure sequences and real tokens a second of a run file on 1, 2, 4 ... processes."""
    if not training:
        raise SettingsError("nothing is said to be measured", "add --training")
    settings = verbs.load(Benchmarking, run_file, overrides)
    answer = plan(settings) if dry_run else run(settings)
    verbs.show(answer if dry_run or json else _told(answer), as_json=json)
    return answer


def _told(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured as it fits a terminal."""
    from regauge.reporting import scaling

    found = scaling.told(answer)
    if found is None:
        return answer
    wide = ("learning rate", "from, to", "$ per 1M tokens")
    rows = [{name: cell for name, cell in row.items() if name not in wide} for row in found.rows]
    return {"output": answer["output"], found.title: rows, "how": found.sentence}


def plan(settings: Benchmarking) -> dict[str, Any]:
    """Return the short runs that there would be; what cannot run is refused here."""
    from regauge.training import benchmarking
    from regauge.training.plan import check

    nodes, rows = benchmarking.machines(settings), []
    for size in benchmarking.sizes(settings):
        short = benchmarking.turn_of(settings, size, 1)
        check(short)
        told = {"global_batch": short.batch.rows, "steps": short.stop.steps}
        rate = short.optimizer.learning_rate
        rows.append({"processes": size * nodes, **told, "learning_rate": rate})
    asked = settings.benchmark
    output = settings.output.folder
    return {"output": output, "scaling": asked.scaling, "turns": asked.turns, "runs": rows}


def run(settings: Benchmarking) -> dict[str, Any]:
    """Run all turns, write what was measured, and return it."""
    from regauge.checkpoint.folder import write_json
    from regauge.training import benchmarking

    settings = settings.model_copy(update={"accelerator": benchmarking.device(settings)})
    plan(settings)
    nodes, train = benchmarking.machines(settings), verbs.module("train")
    sizes = benchmarking.sizes(settings)
    found: dict[int, list[Any]] = {size: [] for size in sizes}
    for number in range(1, settings.benchmark.turns + 1):
        for size in sizes:
            short = benchmarking.turn_of(settings, size, number)
            train.run(short)
            found[size].append(benchmarking.read(Path(short.output.folder), settings.benchmark))
    rows = [
        benchmarking.row(benchmarking.turn_of(settings, size, 1), turns, nodes)
        for size, turns in found.items()
    ]
    path = Path(settings.output.folder) / BENCHMARK
    earlier = config.read(path) if path.exists() else {}
    document = benchmarking.document(settings, rows, earlier)
    write_json(path, document)
    return {"output": str(path.parent), **document}
