"""What can be known of a run before anything is allocated; no torch here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import processes
from regauge.data import mixture, tokenizer
from regauge.data.dataset import MANIFEST
from regauge.errors import SettingsError
from regauge.models.hub import at
from regauge.planning.catalog import rate
from regauge.supervision.nodes.topology import several
from regauge.training import objectives, run_record, warm_start
from regauge.training.defaults import check_shares

if TYPE_CHECKING:
    from regauge.data.dataset import Manifest
    from regauge.training.settings import Aim, Training


def plan(settings: Training) -> dict[str, Any]:
    """Return the shape of a run: steps, rows, lengths, processes."""
    aims = settings.aims
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
    manifests = check(settings)
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
    epoch = objectives.Turns(weights).steps_per_epoch(own.steps_per_epoch)
    rows = [_found(aim, manifest) for aim, manifest in zip(aims, manifests, strict=True)]
    return {
        **answer,
        "steps": settings.stop.total_steps(epoch),
        "steps_per_epoch": epoch,
        **_apart(aims, rows),
    }


def _apart(aims: tuple[Aim, ...], told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is told of the only task, or of each under its name."""
    if len(aims) == 1:
        return told[0]
    names = [f"{aim.name}_{key}" for aim, each in zip(aims, told, strict=True) for key in each]
    return dict(zip(names, (value for each in told for value in each.values()), strict=True))


def _asked(aim: Aim) -> dict[str, Any]:
    left = aim.batch.microbatch_rows == "auto"
    return {
        "task": aim.task.kind,
        **({"turns": aim.weight} if aim.name else {}),
        "global_batch_rows": aim.batch.rows,
        "microbatches": "left to the finder" if left else aim.batch.microbatches,
    }


def _found(aim: Aim, manifest: Manifest) -> dict[str, Any]:
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
    (aim,) = settings.aims
    shapes, size = len(aim.task.ladder(manifest)), settings.execution.processes
    own = -(-aim.batch.microbatches // (size if isinstance(size, int) else 1))
    training = min(2, own) * shapes + (shapes + 1 if aim.task.coupled else 0)
    writes = settings.evaluation.samples.prompts > 0 and aim.task.writes
    heldout = manifest.splits["heldout"].rows > 0
    return 2 + training + 1 + ((shapes + aim.task.whole + writes) if heldout else 0)


def uncountable(settings: Training) -> str | None:
    """Return why a run's model cannot be made yet, so that its weights cannot be counted; or None.

    Nothing is fetched to know it.
    """
    model = settings.model
    if model.path is not None:
        try:
            at(model.path, fetch=False)
        except SettingsError as error:
            return error.problem
        return None
    data = Path(settings.aims[0].data.path)
    if not (data / MANIFEST).exists() and "vocab_size" not in model.config:
        return "its vocabulary is that of the prepared data, or model.config.vocab_size"
    return None


def check(settings: Training) -> list[Manifest]:
    """Return what each task trains on.

    Raises the error of a run that cannot start: data, task, output folder, shares.
    """
    begun = warm_start.begun(settings)
    if begun is settings and settings.model.init_from is not None:
        warm_start.check(settings.model.init_from)
    settings = begun
    manifests = objectives.manifests(settings)
    for aim, manifest in zip(settings.aims, manifests, strict=True):
        if manifest.splits["train"].rows == 0:
            raise SettingsError(f"{aim.data.path} has no training rows", "prepare more text")
    identity = objectives.identity(manifests)
    output, start = Path(settings.output.folder), settings.model.path
    run_record.check_same_run(output, settings, identity)
    if start and settings.model.weights == "saved" and run_record.read_run(output) is None:
        tokenizer.check_same(Path(settings.aims[0].data.path), at(start))
        for aim in settings.aims:
            aim.task.check_weights(at(start))
    if not processes.launched() and isinstance(settings.execution.processes, int):
        local = settings.execution.processes
        found = several(settings.execution.nodes, output)
        size = local * (found.most if found else 1)
        check_shares(settings, processes.World(rank=1, size=size, local_size=local))
    return manifests


def check_cache(settings: Training) -> None:
    """Raise SettingsError for a run that keeps no compiled graphs."""
    if settings.execution.compile_cache is None:
        raise SettingsError(
            "the run keeps no compiled graphs", "set execution.compile_cache to a folder for them"
        )
