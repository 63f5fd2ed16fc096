"""Evaluate saved models and artifacts on held-out rows; write one table, `evaluation.json`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from regauge.accelerators import REFERENCE_KIND, claim_device, init_process_group, wait_for_all
from regauge.config import parse_choice
from regauge.data.dataset import Dataset
from regauge.data.loader import build_loader
from regauge.data.row_order import sample_rows
from regauge.data.tokenizer import check_same_tokenizer
from regauge.evaluation.evaluation_files import write_samples, write_table
from regauge.evaluation.start_weights import StartWeights, add_references, load_weights
from regauge.inference.export.artifact import Artifact, is_artifact, open_artifact, open_unchecked
from regauge.inference.export.engine import load_engine
from regauge.inference.export.engine_module import EngineModule
from regauge.inference.export.trained_task import find_trained_task
from regauge.models.settings import Model
from regauge.models.tensors import precision_dtype
from regauge.system.errors import DataError, SettingsError
from regauge.system.hub import final_model_dir
from regauge.system.processes import World
from regauge.training.defaults import resolve_execution
from regauge.training.generation import generate_samples
from regauge.training.heldout import HeldoutSet, compute_means, load_custom_metrics
from regauge.training.settings import Evaluation

if TYPE_CHECKING:
    from torch import nn

    from regauge.accelerators import Accelerator, Batch
    from regauge.evaluation.settings import EvaluateSettings
    from regauge.tasks import ClassReport, MetricSums, Task

DEFAULT_MICROBATCH_ROWS = 64
MAX_TRAINING_ROWS = 20_000
"""Training rows on which baselines are fitted."""
Row = dict[str, Any]
EvaluatedModel = Model | Artifact


class Results(NamedTuple):
    rows: list[Row]
    classes: dict[str, ClassReport]
    """Model -> metrics for each class; empty for tasks without classes."""
    samples: list[Row]
    """Completions of held-out prompts."""


def evaluate_models(settings: EvaluateSettings, world: World) -> dict[str, Any]:
    """Evaluate the configured models and return the table; every process calls this."""
    dataset = Dataset(Path(settings.data.path))
    settings.evaluation.check(settings.task)
    num_heldout = len(dataset.rows("heldout"))
    if num_heldout == 0:
        raise DataError(
            f"{settings.data.path} has no held-out rows",
            "name other records with --source, or prepare it with a larger split.heldout_fraction",
        )
    folders = {name: _resolve_folder(path, dataset) for name, path in settings.models.items()}
    tasks = {name: _resolve_task(settings, folder, dataset) for name, folder in folders.items()}
    accelerator, execution = resolve_execution(settings.accelerator, settings.execution, world)
    device = claim_device(accelerator, world.device_index, execution.threads or 1)
    init_process_group(accelerator, world, execution.timeout_seconds)
    build_heldout = partial(
        _build_heldout_set,
        dataset=dataset,
        target=(accelerator, device),
        world=world,
        evaluation=settings.evaluation,
        seed=settings.seed,
    )
    models = {
        name: (_open_model(folders[name], task, accelerator.attention), build_heldout(task))
        for name, task in tasks.items()
    }
    dtype = precision_dtype(execution.precision)
    if settings.task.reference_columns:
        add_references(
            {name: heldout for name, (_, heldout) in models.items()},
            {name: _find_run(folder) for name, folder in folders.items()},
            partial(load_weights, dataset=dataset, dtype=dtype),
        )
    results = _evaluate_all(settings, dataset, models, dtype)
    write_samples(settings, results.samples)
    if dist.is_initialized():
        wait_for_all()
    resolved = settings.model_copy(update={"accelerator": accelerator, "execution": execution})
    num_rows = min(num_heldout, settings.evaluation.rows or num_heldout)
    sample = "" if num_rows == num_heldout else f"{num_rows:,} of "
    return write_table(
        resolved,
        results.rows,
        note=f"{sample}{num_heldout:,} held-out rows of {settings.data.path}",
        data_fingerprint=dataset.manifest.fingerprint,
        num_rows=num_rows,
        classes=results.classes,
    )


def _open_model(folder: Path, task: Task, attention: Literal["sdpa", "chunked"]) -> EvaluatedModel:
    """Return the artifact in a folder, or the settings of its model.

    Raises SettingsError for an artifact whose outputs the task cannot evaluate.
    """
    if is_artifact(folder):
        if not task.artifacts_have_metrics:
            problem = f"{folder} is an artifact without the token outputs of task '{task.kind}'"
            raise SettingsError(problem, "evaluate the run or the model folder instead")
        return open_artifact(folder)
    return Model(path=str(folder), attention=attention)


def _build_heldout_set(
    task: Task,
    dataset: Dataset,
    target: tuple[Accelerator, torch.device],
    *,
    world: World,
    evaluation: Evaluation,
    seed: int,
) -> HeldoutSet:
    accelerator, device = target
    loader = build_loader(
        task,
        dataset,
        "heldout",
        world=world,
        rows=evaluation.microbatch_rows or DEFAULT_MICROBATCH_ROWS,
        bucket_lengths=task.bucket_lengths(dataset.manifest),
        seed=seed,
    )
    return HeldoutSet(
        task,
        accelerator,
        accelerator.end_microbatch,
        device,
        loader,
        sample_rows(len(loader), evaluation.rows, dataset.manifest.fingerprint),
        custom_metrics=load_custom_metrics(evaluation.metrics),
    )


def load_as_module(artifact: Artifact) -> EngineModule:
    """Load an artifact as a task module, on the accelerator it was compiled for."""
    program = artifact.manifest.program
    engine = load_engine(artifact, batch_invariant=False)
    return EngineModule(engine, program.output_kind, program.fields)


def compute_heldout_metrics(
    module: nn.Module, task: Task, dataset: Path, rows: int
) -> dict[str, float]:
    """Return a module's metrics on at most `rows` held-out rows from a dataset, on the CPU.

    Returns an empty dict if the dataset does not have held-out rows.
    """
    opened = Dataset(dataset)
    if not len(opened.rows("heldout")):
        return {}
    task = task.resolve_defaults(opened.manifest)
    target = parse_choice("accelerators", REFERENCE_KIND), torch.device("cpu")
    evaluation = Evaluation(rows=rows)
    heldout = _build_heldout_set(task, opened, target, world=World(), evaluation=evaluation, seed=0)
    return heldout.evaluate(module)[0]


def _resolve_task(settings: EvaluateSettings, folder: Path, dataset: Dataset) -> Task:
    """Return the task for evaluating a model; raises SettingsError if the model has another one."""
    if settings.evaluate.task_settings == "given":
        task = settings.task
    else:
        task = _read_trained_task(folder)
    if task.kind != settings.task.kind:
        problem = f"{folder.parent} was trained on task '{task.kind}', not '{settings.task.kind}'"
        raise SettingsError(problem, "remove it from models")
    task.check_dataset(dataset.manifest)
    task = task.resolve_defaults(dataset.manifest)
    task.check_weights(folder)
    return task


def _read_trained_task(folder: Path) -> Task:
    trained = find_trained_task(folder)
    if trained is None:
        problem = f"{folder} is not from a run, so its task is unknown"
        raise SettingsError(problem, 'set evaluate.task_settings = "given"')
    return trained.task


def _find_run(folder: Path) -> Path | None:
    trained = find_trained_task(folder)
    return trained.run if trained else None


def _resolve_folder(path: str, dataset: Dataset) -> Path:
    """Return a model folder; raises SettingsError without a model or with another tokenizer."""
    if is_artifact(Path(path)):
        check_same_tokenizer(dataset.folder, open_unchecked(path).tokenizer_folder)
        return Path(path)
    folder = final_model_dir(path)
    if not (folder / "config.json").is_file():
        remedy = "name a finished run's output folder, a transformers folder or an artifact"
        raise SettingsError(f"{path} does not contain a trained model", remedy)
    check_same_tokenizer(dataset.folder, folder)
    return folder


def _evaluate_all(
    settings: EvaluateSettings,
    dataset: Dataset,
    models: dict[str, tuple[EvaluatedModel, HeldoutSet]],
    dtype: torch.dtype,
) -> Results:
    results = Results([], {}, [])

    def load_module(heldout: HeldoutSet, model: EvaluatedModel) -> nn.Module:
        if not isinstance(model, Model):
            return load_as_module(model)
        return load_weights(heldout, StartWeights(model, settings.seed), dataset, dtype)

    if settings.evaluate.untrained:
        untrained, heldout = _select_random_model(list(models.values()))
        metrics = heldout.evaluate(load_module(heldout, untrained))[0]
        results.rows.append({"name": "untrained", **metrics})
    outputs: dict[str, torch.Tensor] = {}
    for name, (model, heldout) in models.items():
        module = load_module(heldout, model)
        metrics, outputs = heldout.evaluate(module)
        results.rows.append({"name": name, **metrics})
        if report := heldout.class_report(outputs):
            results.classes[name] = report
        options = settings.evaluation.samples
        generated = generate_samples(heldout, module, options, dataset.folder)
        results.samples.extend({"model": name, **sample} for sample in generated)
    if settings.evaluate.baselines:
        baselines = _measure_baselines(settings, dataset, heldout, outputs)
        results.rows.extend(
            {"name": name, **compute_means(sums)} for name, sums in baselines.items()
        )
    return results


def _measure_baselines(
    settings: EvaluateSettings, dataset: Dataset, heldout: HeldoutSet, outputs: Batch
) -> dict[str, MetricSums]:
    """Return the metrics of the task's baselines; some are fitted on a sample of training rows."""
    baselines: dict[str, MetricSums] = {}
    texts = dataset.read_texts("heldout")
    if texts and outputs:
        row_texts = [texts[number] for number in heldout.row_numbers.tolist()]
        baselines = heldout.task.baselines(outputs, outputs, row_texts)
    training = Dataset(Path(settings.evaluate.training_data or settings.data.path))
    train = training.rows("train")
    numbers = sample_rows(len(train), MAX_TRAINING_ROWS, training.manifest.fingerprint)
    if not len(numbers):
        return baselines
    rows = dataset.rows("heldout").take(heldout.row_numbers)
    return {**baselines, **heldout.task.fit_baselines(train.take(numbers), rows)}


def _select_random_model(
    models: list[tuple[EvaluatedModel, HeldoutSet]],
) -> tuple[Model, HeldoutSet]:
    """Return the first model other than an artifact, with random weights."""
    for model, heldout in models:
        if isinstance(model, Model):
            return model.model_copy(update={"weights": "random"}), heldout
    problem = "evaluate.untrained needs a model, but all models are artifacts"
    raise SettingsError(problem, "remove evaluate.untrained")
