"""Benchmark artifact inference, a server, or training on more and more processes.

For example:

    $ regauge benchmark out/artifact
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import commands, config
from regauge.commands import AsJson, DryRun
from regauge.config.output_files import BENCHMARK
from regauge.evaluation.benchmark.serving_settings import ServingBenchmarkSettings
from regauge.evaluation.benchmark.settings import (
    BenchmarkSettings,
    TrainingBenchmarkSettings,
)
from regauge.evaluation.report import benchmarks
from regauge.system.errors import DifferenceError, SettingsError
from regauge.system.json_files import write_sealed

ROOT = BenchmarkSettings
FLAG_ROOTS = {"--training": TrainingBenchmarkSettings, "--serve": ServingBenchmarkSettings}
OUTPUT = "output.folder"
DEFAULT_SERVER_FOLDER = Path("out") / "benchmark-server"
"""Output folder if the command line names a server."""
ADDRESS = re.compile(r"^(https?):/+")
"""Start of a server address; a path has one slash in place of two."""

Answer = dict[str, Any]
AnySettings = BenchmarkSettings | TrainingBenchmarkSettings | ServingBenchmarkSettings


def main(
    run_file: Annotated[Path, Parameter(help="Artifact, or run file with [inference].")],
    *overrides: Annotated[str, Parameter(help="More artifacts, and overrides as key.path=value.")],
    training: Annotated[
        bool, Parameter(help="Benchmark a run file's training on 1, 2, 4 ... processes.")
    ] = False,
    serve: Annotated[
        bool, Parameter(help="Benchmark a server: its URL, or an artifact to serve.")
    ] = False,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> Answer:
    """Measure artifact latency, throughput, energy and cost.

    With `--training`, measure training throughput and its scaling efficiency. With `--serve`,
    measure the latency, throughput and cost of a server over HTTP.

    For example:

        >>> regauge.benchmark("out/artifact")
    """
    settings: AnySettings
    if training and serve:
        raise SettingsError("--training and --serve exclude each other", "set one of them")
    if training:
        settings = commands.load_settings(TrainingBenchmarkSettings, run_file, overrides)
    elif serve:
        settings = load_server(run_file, overrides)
    else:
        settings = load((str(run_file), *overrides))
    if dry_run:
        return commands.show(plan(settings), as_json=json)
    answer = _measure(settings)
    document = benchmarks.read_benchmark(Path(answer["output"]) / BENCHMARK)
    full_answer = {"output": answer["output"], **document}
    commands.show(full_answer if json else answer, as_json=json)
    _raise_if_worse(document)
    return full_answer


def load(arguments: tuple[str, ...]) -> BenchmarkSettings:
    """Build the settings from artifacts or a run file, and overrides."""
    from regauge.evaluation.benchmark import inference

    paths = [Path(word) for word in arguments if "=" not in word or Path(word).exists()]
    overrides = tuple(word for word in arguments if "=" in word and not Path(word).exists())
    has_run_file = bool(paths) and paths[0].suffix in commands.RUN_FILE_SUFFIXES
    run_file = paths.pop(0) if has_run_file else None
    tables: config.Tables = {"output": {"folder": str(inference.DEFAULT_FOLDER)}}
    if run_file is not None:
        tables = commands.allow_user_code(run_file, config.read(run_file))
    if paths:
        artifacts = {"inference": {"artifacts": inference.name_artifacts(paths)}}
        tables = config.merge(tables, artifacts)
    tables = config.apply_overrides(tables, overrides, BenchmarkSettings)
    if not tables.get("inference", {}).get("artifacts"):
        remedy = "name artifacts, or add --training to benchmark the training of a run file"
        raise SettingsError("no artifacts to benchmark", remedy)
    source = str(run_file or "the command line")
    return config.build(BenchmarkSettings, tables, commands.table_names(), source)


def load_server(target: Path, overrides: tuple[str, ...]) -> ServingBenchmarkSettings:
    """Build the settings from a server address, an artifact or a run file."""
    if target.suffix in commands.RUN_FILE_SUFFIXES:
        return commands.load_settings(ServingBenchmarkSettings, target, overrides)
    text = str(target)
    server = {"url": ADDRESS.sub(r"\1://", text)} if ADDRESS.match(text) else {"artifact": text}
    tables: config.Tables = {"output": {"folder": str(DEFAULT_SERVER_FOLDER)}, "server": server}
    tables = config.apply_overrides(tables, overrides, ServingBenchmarkSettings)
    names = commands.table_names()
    return config.build(ServingBenchmarkSettings, tables, names, "the command line")


def plan(settings: AnySettings) -> Answer:
    """Return the planned measurements; raises SettingsError for impossible ones."""
    if isinstance(settings, TrainingBenchmarkSettings):
        return _plan_training(settings)
    if isinstance(settings, ServingBenchmarkSettings):
        from regauge.evaluation.benchmark import serving

        return serving.plan(settings)
    from regauge.evaluation.benchmark import inference

    return inference.plan(settings)


def run(settings: AnySettings) -> Answer:
    """Run the benchmark and write its results; return them as tables and texts.

    Raises DifferenceError if a server's figures are worse than the baseline's.
    """
    answer = _measure(settings)
    _raise_if_worse(benchmarks.read_benchmark(Path(answer["output"]) / BENCHMARK))
    return answer


def _measure(settings: AnySettings) -> Answer:
    folder = Path(settings.output.folder)
    if isinstance(settings, TrainingBenchmarkSettings):
        document = _run_training(settings)
    elif isinstance(settings, ServingBenchmarkSettings):
        from regauge.evaluation.benchmark import serving

        document = serving.run(settings)
    else:
        from regauge.evaluation.benchmark import inference

        document = inference.run(settings)
    write_sealed(folder / BENCHMARK, document)
    return {"output": str(folder), **benchmarks.write_benchmark_files(folder, document)}


def _raise_if_worse(document: Answer) -> None:
    rows = document.get("regression", {}).get("rows", ())
    worse = [row for row in rows if row["is_regression"]]
    if worse:
        first = worse[0]
        change = f"{first['figure']} of {first['load']} changed by {first['change']:+.0%}"
        count = f"{len(worse)} of {len(rows)} figures are worse than the baseline"
        raise DifferenceError(f"{count}: {change}", "repeat it, or raise regression.max_regression")


def _plan_training(settings: TrainingBenchmarkSettings) -> Answer:
    from regauge.evaluation.benchmark import training
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
    from regauge.evaluation.benchmark import summary, training
    from regauge.training.dry_run import check_run

    settings = settings.model_copy(update={"accelerator": training.choose_accelerator(settings)})
    process_counts = training.list_process_counts(settings)
    for num_processes in process_counts:
        check_run(training.build_short_run(settings, num_processes, 1))
    num_nodes, train = training.count_nodes(settings), commands.import_verb("train")

    def measure(num_processes: int, repeat: int) -> training.TimedSteps:
        short_run = training.build_short_run(settings, num_processes, repeat)
        train.run(short_run)
        return training.read_timed_steps(Path(short_run.output.folder), settings.benchmark)

    timed_steps = summary.repeat_alternately(process_counts, settings.benchmark.repeats, measure)
    rows = [
        training.build_row(training.build_short_run(settings, num_processes, 1), steps, num_nodes)
        for num_processes, steps in timed_steps.items()
    ]
    path = Path(settings.output.folder) / BENCHMARK
    earlier = benchmarks.read_benchmark(path) if path.exists() else {}
    return training.build_document(settings, rows, earlier)
