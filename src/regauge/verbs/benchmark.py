"""Benchmark the inference of artifacts, or training on a growing number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import config, verbs
from regauge.benchmarking.settings import BENCHMARK, BenchmarkSettings, TrainingBenchmarkSettings
from regauge.errors import SettingsError
from regauge.verbs import AsJson, DryRun

ROOT = BenchmarkSettings
FLAG_ROOTS = {"--training": TrainingBenchmarkSettings}
OUTPUT = "output.folder"

Answer = dict[str, Any]


def main(
    run_file: Annotated[Path, Parameter(help="Artifact, or run file with [inference].")],
    *overrides: Annotated[str, Parameter(help="More artifacts, and overrides as key.path=value.")],
    training: Annotated[
        bool, Parameter(help="Benchmark the training of a run file on 1, 2, 4 ... processes.")
    ] = False,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> Answer:
    """Measure the latency, throughput, energy and cost of artifacts.

    With `--training`, measure the throughput of training and its scaling efficiency.
    """
    if training:
        settings: BenchmarkSettings | TrainingBenchmarkSettings = verbs.load_settings(
            TrainingBenchmarkSettings, run_file, overrides
        )
    else:
        settings = load((str(run_file), *overrides))
    if dry_run:
        return verbs.show(plan(settings), as_json=json)
    from regauge.reporting import benchmarks

    answer = run(settings)
    document = benchmarks.read_benchmark(Path(answer["output"]) / BENCHMARK)
    full_answer = {"output": answer["output"], **document}
    verbs.show(full_answer if json else answer, as_json=json)
    return full_answer


def load(arguments: tuple[str, ...]) -> BenchmarkSettings:
    """Build the settings from artifacts or a run file, and overrides."""
    from regauge.benchmarking import inference

    paths = [Path(word) for word in arguments if "=" not in word or Path(word).exists()]
    overrides = tuple(word for word in arguments if "=" in word and not Path(word).exists())
    has_run_file = bool(paths) and paths[0].suffix in verbs.RUN_FILE_SUFFIXES
    run_file = paths.pop(0) if has_run_file else None
    tables: config.Tables = {"output": {"folder": str(inference.DEFAULT_FOLDER)}}
    if run_file is not None:
        tables = verbs.allow_user_code(run_file, config.read(run_file))
    if paths:
        artifacts = {"inference": {"artifacts": inference.name_artifacts(paths)}}
        tables = config.merge(tables, artifacts)
    tables = config.apply_overrides(tables, overrides, BenchmarkSettings)
    if not tables.get("inference", {}).get("artifacts"):
        remedy = "name artifacts, or add --training to benchmark the training of a run file"
        raise SettingsError("no artifacts to benchmark", remedy)
    source = str(run_file or "the command line")
    return config.build(BenchmarkSettings, tables, verbs.table_names(), source)


def plan(settings: BenchmarkSettings | TrainingBenchmarkSettings) -> Answer:
    """Return the planned measurements; raises SettingsError for impossible ones."""
    if isinstance(settings, TrainingBenchmarkSettings):
        return _plan_training(settings)
    from regauge.benchmarking import inference

    return inference.plan(settings)


def run(settings: BenchmarkSettings | TrainingBenchmarkSettings) -> Answer:
    """Run the benchmark and write its results; return them as tables and texts."""
    from regauge.json_files import write_sealed
    from regauge.reporting import benchmarks

    folder = Path(settings.output.folder)
    if isinstance(settings, TrainingBenchmarkSettings):
        document = _run_training(settings)
    else:
        from regauge.benchmarking import inference

        document = inference.run(settings)
    write_sealed(folder / BENCHMARK, document)
    return {"output": str(folder), **benchmarks.write_benchmark_files(folder, document)}


def _plan_training(settings: TrainingBenchmarkSettings) -> Answer:
    """Return the short runs that the benchmark would do."""
    from regauge.benchmarking import training
    from regauge.training.dry_run import check_run_offline

    refusal: Answer = {}
    num_nodes, rows = training.count_nodes(settings), []
    for num_processes in training.list_process_counts(settings):
        short_run = training.build_short_run(settings, num_processes, 1)
        refusal = refusal or check_run_offline(short_run)[1]
        rows.append(
            {
                "processes": num_processes * num_nodes,
                "global_batch_size": short_run.batch.rows,
                "steps": short_run.stop.steps,
                "learning_rate": short_run.optimizer.learning_rate,
            }
        )
    return {
        "output": settings.output.folder,
        "scaling": settings.benchmark.scaling,
        "repeats": settings.benchmark.repeats,
        "runs": rows,
        **refusal,
    }


def _run_training(settings: TrainingBenchmarkSettings) -> Answer:
    """Do all short runs of a training benchmark; return the document with the results."""
    from regauge.benchmarking import training
    from regauge.reporting import benchmarks
    from regauge.training.dry_run import check_run

    settings = settings.model_copy(update={"accelerator": training.choose_accelerator(settings)})
    process_counts = training.list_process_counts(settings)
    for num_processes in process_counts:
        check_run(training.build_short_run(settings, num_processes, 1))
    num_nodes, train = training.count_nodes(settings), verbs.import_verb("train")
    timed_steps: dict[int, list[Any]] = {num_processes: [] for num_processes in process_counts}
    for repeat in range(1, settings.benchmark.repeats + 1):
        for num_processes in process_counts:
            short_run = training.build_short_run(settings, num_processes, repeat)
            train.run(short_run)
            folder = Path(short_run.output.folder)
            timed_steps[num_processes].append(training.read_timed_steps(folder, settings.benchmark))
    rows = [
        training.build_row(training.build_short_run(settings, num_processes, 1), steps, num_nodes)
        for num_processes, steps in timed_steps.items()
    ]
    path = Path(settings.output.folder) / BENCHMARK
    earlier = benchmarks.read_benchmark(path) if path.exists() else {}
    return training.build_document(settings, rows, earlier)
