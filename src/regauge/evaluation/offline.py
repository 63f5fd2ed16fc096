"""Saved models on held-out rows, beside each other in one table: `evaluation.json`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from regauge import jsonl
from regauge.accelerators import join, take
from regauge.artifacts import artifact as artifacts
from regauge.artifacts.artifact import Artifact
from regauge.config import FORMAT, build, dump, read
from regauge.data import tokenizer
from regauge.data.dataset import Dataset
from regauge.data.row_order import sample
from regauge.errors import DataError, SettingsError
from regauge.evaluation.artifact_metrics import answering
from regauge.evaluation.settings import DEFAULT_MICROBATCH_ROWS, EVALUATION
from regauge.files import write_json
from regauge.models.hub import final
from regauge.models.init_weights import META, initial_weights, materialize
from regauge.models.settings import Model
from regauge.models.tensors import dtype_of, move
from regauge.training.defaults import resolve_execution
from regauge.training.generation import FILE, generate_samples
from regauge.training.heldout import HeldoutSet, compute_means
from regauge.training.objectives import build_feed
from regauge.training.run_record import RUN
from regauge.training.settings import Training

if TYPE_CHECKING:
    import torch
    from torch import nn

    from regauge.accelerators import Accelerator
    from regauge.evaluation.settings import Evaluating
    from regauge.processes import World
    from regauge.tasks import Task

Row = dict[str, Any]
Subject = Model | Artifact


def measure(settings: Evaluating, world: World) -> dict[str, Any]:
    """Return the table of every model that was asked for; every process calls this."""
    dataset = Dataset(Path(settings.data.path))
    settings.evaluation.check(settings.task)
    there = len(dataset.split("heldout"))
    if there == 0:
        raise DataError(f"{settings.data.path} has no held-out rows", "raise split.heldout_share")
    models = {name: _checked(folder, dataset) for name, folder in settings.subjects.models.items()}
    tasks = {name: _task_of(settings, folder, dataset) for name, folder in models.items()}
    accelerator, execution = resolve_execution(settings.accelerator, settings.execution, world)
    device = take(accelerator, world.device, execution.threads or 1)
    join(accelerator, world, execution.timeout_seconds)
    place = partial(_heldout, settings, dataset, world, (accelerator, device))
    measured = {
        name: (_subject(models[name], accelerator.attention), place(task))
        for name, task in tasks.items()
    }
    rows, answers = _rows(settings, dataset, measured, dtype_of(execution.precision))
    if world.first and answers:
        _write_samples(Path(settings.output.folder) / FILE, answers)
    if dist.is_initialized():
        dist.barrier()
    own = settings.model_copy(update={"accelerator": accelerator, "execution": execution})
    count = min(there, settings.evaluation.rows or there)
    return _write(own, rows, world, count, dataset.manifest.identity)


def _subject(folder: Path, attention: Literal["sdpa", "chunked"]) -> Subject:
    """Return the model of a folder as it is made, or what answers in its place: an artifact."""
    if artifacts.is_one(folder):
        return artifacts.opened(folder)
    return Model(path=str(folder), attention=attention)


def _heldout(
    settings: Evaluating,
    dataset: Dataset,
    world: World,
    site: tuple[Accelerator, torch.device],
    task: Task,
) -> HeldoutSet:
    """Return the held-out rows as a task reads them; `site` is where they are computed."""
    accelerator, device = site
    microbatch = settings.evaluation.microbatch_rows or DEFAULT_MICROBATCH_ROWS
    ladder = task.ladder(dataset.manifest)
    share = build_feed(
        task, dataset, "heldout", world=world, rows=microbatch, ladder=ladder, seed=settings.seed
    )
    numbers = sample(len(share), settings.evaluation.rows, dataset.manifest.identity)
    return HeldoutSet(task, accelerator, accelerator.end_microbatch, device, share, numbers)


def _task_of(settings: Evaluating, folder: Path, dataset: Dataset) -> Task:
    """Return the task that a model is measured by."""
    given = settings.subjects.tasks == "given"
    found = settings.task if given else _trained_for(folder)
    if found.kind != settings.task.kind:
        problem = f"{folder.parent} is of task '{found.kind}', and not '{settings.task.kind}'"
        raise SettingsError(problem, "leave it out of subjects.models")
    found.check(dataset.manifest)
    found.check_weights(folder)
    return found


def _trained_for(folder: Path) -> Task:
    """Return the task that a run's final model was trained for."""
    above = folder.parent
    run = above if (above / RUN).is_file() else above.parent.parent
    if not (run / RUN).is_file():
        remedy = 'set subjects.tasks = "given"'
        raise SettingsError(f"{folder} is no run, and has no task of its own", remedy)
    aims = build(Training, read(run / RUN)).task_configs
    return next((aim.task for aim in aims if run != above and aim.name == above.name), aims[0].task)


def _checked(folder: str, dataset: Dataset) -> Path:
    """Return where a model lies; raises SettingsError for none, or one of another tokenizer."""
    if artifacts.is_one(Path(folder)):
        tokenizer.check_same(dataset.folder, artifacts.located(folder).tokenizer)
        return Path(folder)
    found = final(folder)
    if not (found / "config.json").is_file():
        remedy = "name a finished run's output folder, a transformers folder or an artifact"
        raise SettingsError(f"{folder} holds no trained model", remedy)
    tokenizer.check_same(dataset.folder, found)
    return found


def _rows(
    settings: Evaluating,
    dataset: Dataset,
    measured: dict[str, tuple[Subject, HeldoutSet]],
    dtype: torch.dtype,
) -> tuple[list[Row], list[Row]]:
    """Return the rows of the table, and what each model answers to held-out prompts.

    Models have names, and each has the held-out rows as its task reads them.
    """
    rows: list[Row] = []
    answers: list[Row] = []
    wanted = settings.evaluation.samples

    def placed(heldout: HeldoutSet, model: Subject) -> nn.Module:
        if not isinstance(model, Model):
            return answering(model)
        with META:
            module = heldout.task.module(model, dataset.manifest, settings.seed)
        materialize(module, initial_weights(module, model, settings.seed))
        module.compute_dtype = dtype
        for weight in module.parameters():
            weight.data = weight.data.to(dtype)
        move(module, heldout.device)
        heldout.accelerator.keep_memory()
        return heldout.accelerator.for_inference(module.eval())

    if settings.subjects.untrained == "yes":
        models = [(each, by) for each, by in measured.values() if isinstance(each, Model)]
        if not models:
            raise SettingsError("an artifact has no random weights", "leave subjects.untrained out")
        first, heldout = models[0]
        drawn = first.model_copy(update={"weights": "random"})
        rows.append({"name": "untrained", **heldout.metrics(placed(heldout, drawn))})
    outputs: dict[str, torch.Tensor] = {}
    for name, (model, heldout) in measured.items():
        module = placed(heldout, model)
        metrics, outputs = heldout.outputs(module)
        rows.append({"name": name, **metrics})
        found = generate_samples(heldout, module, wanted, dataset.folder)
        answers += [{"model": name, **each} for each in found]
    whole = dataset.texts("heldout")
    if settings.subjects.rivals == "yes" and whole and outputs:
        texts = [whole[number] for number in heldout.numbers.tolist()]
        others = heldout.task.rivals(outputs, outputs, texts)
        rows += [{"name": name, **compute_means(sums)} for name, sums in others.items()]
    return rows, answers


def _write_samples(path: Path, answers: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    for each in answers:
        jsonl.append(path, each)


def _write(
    settings: Evaluating, rows: list[Row], world: World, count: int, identity: str
) -> dict[str, Any]:
    folder = Path(settings.output.folder)
    table = {
        "format": FORMAT,
        "title": settings.subjects.title,
        "rows": rows,
        "notes": [f"{count} held-out rows of {settings.data.path}"],
        "settings": dump(settings),
        "facts": {"data_identity": identity},
    }
    if world.first:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / EVALUATION, table)
    return {"output": str(folder / EVALUATION), "rows": rows}
