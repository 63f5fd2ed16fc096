"""Measure how fast artifacts answer, or how fast a run trains on growing numbers of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import config, verbs
from regauge.benchmarking.settings import BENCHMARK, Benchmarking, Measuring
from regauge.errors import SettingsError
from regauge.verbs import AsJson, DryRun

ROOT = Measuring
ALSO = {"--training": Benchmarking}
OUTPUT = "output.folder"

Answer = dict[str, Any]


def main(
    run_file: Annotated[Path, Parameter(help="an artifact, or a run file with [inference]")],
    *overrides: Annotated[str, Parameter(help="more artifacts, and key.path=value")],
    training: Annotated[
        bool, Parameter(help="measure how a run file trains on 1, 2, 4 ... processes instead")
    ] = False,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> Answer:
    """Measure latency, inferences and real tokens a second, energy and dollars of artifacts."""
    if training:
        settings: Measuring | Benchmarking = verbs.load(Benchmarking, run_file, overrides)
    else:
        settings = load((str(run_file), *overrides))
    if dry_run:
        return verbs.show(plan(settings), as_json=json)
    from regauge.reporting import benchmarks

    told = run(settings)
    whole = {"output": told["output"], **benchmarks.read(Path(told["output"]) / BENCHMARK)}
    verbs.show(whole if json else told, as_json=json)
    return whole


def load(what: tuple[str, ...]) -> Measuring:
    """Return the settings of a command line: artifacts, or a run file, and what goes over it."""
    from regauge.benchmarking import inference

    paths = [Path(word) for word in what if "=" not in word or Path(word).exists()]
    assigned = tuple(word for word in what if "=" in word and not Path(word).exists())
    file = paths.pop(0) if paths and paths[0].suffix in verbs.RUN_FILES else None
    tables: config.Tables = {"output": {"folder": str(inference.DEFAULT)}}
    if file is not None:
        tables = verbs.own(file, config.read(file))
    if paths:
        named = {"inference": {"artifacts": inference.named(paths)}}
        tables = config.merge(tables, named)
    tables = config.override(tables, assigned)
    if not tables.get("inference", {}).get("artifacts"):
        remedy = "name artifacts, or add --training to measure how a run file trains"
        raise SettingsError("nothing is said to be measured", remedy)
    return config.build(Measuring, tables, verbs.tables(), str(file or "the command line"))


def plan(settings: Measuring | Benchmarking) -> Answer:
    """Return what would be measured; what cannot be is refused here."""
    if isinstance(settings, Benchmarking):
        return _plan_of_training(settings)
    from regauge.benchmarking import inference

    return inference.plan(settings)


def run(settings: Measuring | Benchmarking) -> Answer:
    """Let everything that is measured have its turns; write what was found, return it in words."""
    from regauge.files import write_json
    from regauge.reporting import benchmarks

    folder = Path(settings.output.folder)
    if isinstance(settings, Benchmarking):
        document = _training(settings)
    else:
        from regauge.benchmarking import inference

        document = inference.run(settings)
    write_json(folder / BENCHMARK, document)
    return {"output": str(folder), **benchmarks.written(folder, document)}


def _plan_of_training(settings: Benchmarking) -> Answer:
    """Return the short runs that there would be."""
    from regauge.benchmarking import training
    from regauge.training.dry_run import check_local

    refusal: dict[str, str] = {}
    nodes, rows = training.machines(settings), []
    for size in training.sizes(settings):
        short = training.turn_of(settings, size, 1)
        refusal = refusal or check_local(short)[1]
        told = {"global_batch": short.batch.rows, "steps": short.stop.steps}
        rate = short.optimizer.learning_rate
        rows.append({"processes": size * nodes, **told, "learning_rate": rate})
    asked = settings.benchmark
    answer = {"output": settings.output.folder, "scaling": asked.scaling, "turns": asked.turns}
    return {**answer, "runs": rows, **refusal}


def _training(settings: Benchmarking) -> Answer:
    """Run all turns of a benchmark of training; return what was measured."""
    from regauge.benchmarking import training
    from regauge.reporting import benchmarks
    from regauge.training.dry_run import check

    settings = settings.model_copy(update={"accelerator": training.device(settings)})
    for size in training.sizes(settings):
        check(training.turn_of(settings, size, 1))
    nodes, train = training.machines(settings), verbs.module("train")
    sizes = training.sizes(settings)
    found: dict[int, list[Any]] = {size: [] for size in sizes}
    for number in range(1, settings.benchmark.turns + 1):
        for size in sizes:
            short = training.turn_of(settings, size, number)
            train.run(short)
            found[size].append(training.read(Path(short.output.folder), settings.benchmark))
    rows = [
        training.row(training.turn_of(settings, size, 1), turns, nodes)
        for size, turns in found.items()
    ]
    path = Path(settings.output.folder) / BENCHMARK
    earlier = benchmarks.read(path) if path.exists() else {}
    return training.document(settings, rows, earlier)
