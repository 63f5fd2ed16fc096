"""What can be known of a run before anything is allocated; no torch here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import processes
from regauge.data import mixture, tokenizer
from regauge.data.dataset import MANIFEST
from regauge.data.unprepared import NOTHING, find_rows, is_prepared
from regauge.errors import SettingsError, find_refusal
from regauge.models.hub import at, local_only
from regauge.planning.catalog import rate
from regauge.supervision.nodes.topology import several
from regauge.training import run_record, task_schedule, warm_start
from regauge.training.defaults import check_world_size

if TYPE_CHECKING:
    from regauge.data.dataset import Manifest
    from regauge.data.unprepared import Described
    from regauge.training.settings import TaskConfig, Training


def plan(settings: Training) -> dict[str, Any]:
    """Return the shape of a run: steps, rows, lengths, processes."""
    aims = settings.task_configs
    answer: dict[str, Any] = {
        "output": settings.output.folder,
        **_apart(aims, [_asked(aim) for aim in aims]),
        "processes": settings.execution.processes,
        "price": price.told if (price := rate(settings.execution.price)) else "unknown",
    }
    found = several(settings.execution.nodes, Path(settings.output.folder))
    if found is not None:
        nodes = f"{found.fewest} to {found.most}" if found.most > found.fewest else found.most
        answer["nodes"] = f"{nodes}, meeting at {found.endpoint} ({found.kind})"
    absent = [aim.data.path for aim in aims if not (Path(aim.data.path) / MANIFEST).exists()]
    if absent:
        return {**answer, "data": f"{absent[0]} is not prepared yet"}
    manifests, refusal = check_local(settings)
    left = any(aim.batch.microbatch_rows == "auto" for aim in aims)
    lazy = settings.accelerator is not None and settings.accelerator.lazy
    if lazy and not left and len(aims) == 1:
        answer["graphs"] = graphs(settings, manifests[0])
    elif settings.execution.compile == "blocks":
        pairs = zip(aims, manifests, strict=True)
        lengths = sum(len(aim.task.ladder(manifest)) for aim, manifest in pairs)
        answer["graphs_per_block"] = 2 * lengths
    own = mixture.order(aims[0].data, manifests[0], aims[0].batch.rows, settings.seed)
    weights = [aim.weight for aim in aims]
    epoch = task_schedule.TaskSchedule(weights).steps_per_epoch(own.steps_per_epoch)
    rows = [_found(aim, manifest) for aim, manifest in zip(aims, manifests, strict=True)]
    return {
        **answer,
        "steps": settings.stop.total_steps(epoch),
        "steps_per_epoch": epoch,
        **_apart(aims, rows),
        **refusal,
    }


@local_only()
def check_local(settings: Training) -> tuple[list[Manifest], dict[str, str]]:
    """Return what each task trains on, and why a run would not take its output folder, if so.

    Raises as `check` does for anything else. Nothing is fetched: weights that are not on this
    machine are not checked.
    """
    settings, manifests = _check_data(settings)
    output = Path(settings.output.folder)
    identity = task_schedule.data_identity(manifests)
    refusal = find_refusal(lambda: run_record.check_same_run(output, settings, identity))
    if not refusal and uncountable(settings) is None:
        _check_weights(settings)
    _check_size(settings)
    return manifests, refusal


def _apart(aims: tuple[TaskConfig, ...], told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is told of the only task, or of each under its name."""
    if len(aims) == 1:
        return told[0]
    names = [f"{aim.name}_{key}" for aim, each in zip(aims, told, strict=True) for key in each]
    return dict(zip(names, (value for each in told for value in each.values()), strict=True))


def _asked(aim: TaskConfig) -> dict[str, Any]:
    left = aim.batch.microbatch_rows == "auto"
    return {
        "task": aim.task.kind,
        **({"turns": aim.weight} if aim.name else {}),
        "global_batch_rows": aim.batch.rows,
        "microbatches": "left to the finder" if left else aim.batch.microbatches,
    }


def _found(aim: TaskConfig, manifest: Manifest) -> dict[str, Any]:
    each, left = aim.task.texts_per_row(manifest), aim.batch.microbatch_rows == "auto"
    texts = f"(microbatch_rows x {each})" if left else str(aim.batch.microbatch * each)
    return {
        "rows": manifest.splits["train"].rows,
        "heldout_rows": manifest.splits["heldout"].rows,
        "shapes": [f"{texts} x {length}" for length in aim.task.ladder(manifest)],
        "real_token_share": round(aim.task.real_share(manifest), 4),
    }


def graphs(settings: Training, manifest: Manifest) -> int:
    """Return how many graphs a lazy device makes for a run of one task that was not resumed.

    The state of the optimizer is made in one and settled in another. A microbatch is one for each
    shape, and another where a process adds to the gradients of an earlier one; a coupled loss has
    one between the outputs, of a graph for each shape, and the gradients. An update is one. An
    evaluation is one for each shape, and one more over all that a `whole` task keeps or for the
    texts that a model goes on with.
    """
    (aim,) = settings.task_configs
    shapes, size = len(aim.task.ladder(manifest)), settings.execution.processes
    own = -(-aim.batch.microbatches // (size if isinstance(size, int) else 1))
    training = min(2, own) * shapes + (shapes + 1 if aim.task.coupled else 0)
    writes = settings.evaluation.samples.prompts > 0 and aim.task.writes
    heldout = manifest.splits["heldout"].rows > 0
    return 2 + training + 1 + ((shapes + aim.task.whole + writes) if heldout else 0)


def uncountable(settings: Training, described: Described = NOTHING) -> str | None:
    """Return why a run's model cannot be made yet, so that its weights cannot be counted; or None.

    `described` has the rows of datasets that are not prepared yet. Nothing is fetched to know it.
    """
    for aim in settings.task_configs:
        unknown = not is_prepared(Path(aim.data.path)) and not describes(described, aim)
        if aim.task.module_needs_fields and unknown:
            return "its inputs are the fields of the prepared data, or of [rows]"
    model = settings.model
    if model.path is not None:
        try:
            at(model.path, fetch=False)
        except SettingsError as error:
            return error.problem
        return None
    data = Path(settings.task_configs[0].data.path)
    if not (data / MANIFEST).exists() and "vocab_size" not in model.config:
        return "its vocabulary is that of the prepared data, or model.config.vocab_size"
    return None


def describes(described: Described, aim: TaskConfig) -> bool:
    """Return whether rows of the layout that a task reads are described for its dataset."""
    rows = find_rows(described, aim.data.path)
    return rows is not None and rows.layout == aim.task.reads()


def check(settings: Training) -> list[Manifest]:
    """Return what each task trains on.

    Raises the error of a run that cannot start: data, task, output folder, shares.
    """
    settings, manifests = _check_data(settings)
    identity = task_schedule.data_identity(manifests)
    run_record.check_same_run(Path(settings.output.folder), settings, identity)
    _check_weights(settings)
    _check_size(settings)
    return manifests


def _check_data(settings: Training) -> tuple[Training, list[Manifest]]:
    """Return settings with the weights that a run begins from, and what each task trains on."""
    begun = warm_start.use_copied_weights(settings)
    if begun is settings and settings.model.init_from is not None:
        warm_start.check(settings.model.init_from)
    settings = begun
    manifests = task_schedule.read_manifests(settings)
    for aim, manifest in zip(settings.task_configs, manifests, strict=True):
        if manifest.splits["train"].rows == 0:
            raise SettingsError(f"{aim.data.path} has no training rows", "prepare more text")
    return settings, manifests


def _check_weights(settings: Training) -> None:
    """Raise SettingsError for weights that a new run cannot begin from."""
    output, start = Path(settings.output.folder), settings.model.path
    if start and settings.model.weights == "saved" and run_record.read_run(output) is None:
        tokenizer.check_same(Path(settings.task_configs[0].data.path), at(start))
        for aim in settings.task_configs:
            aim.task.check_weights(at(start))


def _check_size(settings: Training) -> None:
    """Raise SettingsError for more processes than microbatches."""
    if not processes.launched() and isinstance(settings.execution.processes, int):
        local = settings.execution.processes
        found = several(settings.execution.nodes, Path(settings.output.folder))
        size = local * (found.most if found else 1)
        check_world_size(settings, processes.World(rank=1, size=size, local_size=local))


def check_cache(settings: Training) -> None:
    """Raise SettingsError for a run that keeps no compiled graphs."""
    if settings.execution.compile_cache is None:
        raise SettingsError(
            "the run keeps no compiled graphs", "set execution.compile_cache to a folder for them"
        )
