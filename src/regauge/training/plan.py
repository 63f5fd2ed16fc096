"""What can be known of a run before anything is allocated; no torch here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import processes
from regauge.data.order import Order
from regauge.data.shards import MANIFEST, read_manifest
from regauge.errors import SettingsError
from regauge.planning.catalog import rate
from regauge.supervision.nodes.several import several
from regauge.training import records
from regauge.training.decisions import check_shares

if TYPE_CHECKING:
    from regauge.training.settings import Training


def plan(settings: Training) -> dict[str, Any]:
    """Return the shape of a run: steps, rows, lengths, processes."""
    batch = settings.batch
    answer: dict[str, Any] = {
        "output": settings.output.folder,
        "task": settings.task.kind,
        "global_batch_rows": batch.rows,
        "microbatches": batch.microbatches,
        "processes": settings.execution.processes,
        "price": price.told if (price := rate(settings.execution.price)) else "unknown",
    }
    found = several(settings.execution.nodes, Path(settings.output.folder))
    if found is not None:
        nodes = f"{found.fewest} to {found.most}" if found.most > found.fewest else found.most
        answer["nodes"] = f"{nodes}, meeting at {found.endpoint} ({found.kind})"
    if not (Path(settings.data.path) / MANIFEST).exists():
        return {**answer, "data": f"{settings.data.path} is not prepared yet"}
    check(settings)
    manifest = read_manifest(Path(settings.data.path))
    rows = manifest.splits["train"].rows
    order = Order(rows, batch.rows, settings.seed, manifest.identity)
    texts = batch.microbatch_rows * settings.task.texts_per_row()
    ladder = settings.task.ladder(manifest)
    if settings.accelerator is not None and settings.accelerator.lazy:
        heldout = manifest.splits["heldout"].rows > 0
        answer["graphs"] = graphs(settings, len(ladder), heldout=heldout)
    elif settings.execution.compile != "no":
        answer["graphs_per_block"] = 2 * len(ladder)
    return {
        **answer,
        "rows": rows,
        "heldout_rows": manifest.splits["heldout"].rows,
        "steps": settings.stop.total_steps(order.steps_per_epoch),
        "steps_per_epoch": order.steps_per_epoch,
        "shapes": [f"{texts} x {length}" for length in ladder],
        "real_token_share": round(settings.task.real_share(manifest), 4),
    }


def graphs(settings: Training, shapes: int, *, heldout: bool) -> int:
    """Return how many graphs a lazy device makes for a run that was not resumed.

    The state of the optimizer is made in one and settled in another. A microbatch is one for each
    shape, and another where a process adds to the gradients of an earlier one; a coupled loss has
    one between the outputs, of a graph for each shape, and the gradients. An update is one. An
    evaluation is one for each shape, and one more over all outputs of a coupled task.
    """
    coupled, size = settings.task.coupled, settings.execution.processes
    own = -(-settings.batch.microbatches // (size if isinstance(size, int) else 1))
    training = min(2, own) * shapes + (shapes + 1 if coupled else 0)
    evaluation = (shapes + coupled) if heldout else 0
    return 2 + training + 1 + evaluation


def check(settings: Training) -> None:
    """Raise the error of a run that cannot start: data, task, output folder, shares."""
    manifest = read_manifest(Path(settings.data.path))
    settings.task.check(manifest)
    if manifest.splits["train"].rows == 0:
        raise SettingsError(f"{settings.data.path} has no training rows", "prepare more text")
    records.check_same_run(Path(settings.output.folder), settings, manifest.identity)
    if not processes.launched() and isinstance(settings.execution.processes, int):
        local = settings.execution.processes
        found = several(settings.execution.nodes, Path(settings.output.folder))
        size = local * (found.most if found else 1)
        check_shares(settings, processes.World(rank=1, size=size, local_size=local))


def check_cache(settings: Training) -> None:
    """Raise SettingsError for a run that keeps no compiled graphs."""
    if settings.execution.compile_cache is None:
        raise SettingsError(
            "the run keeps no compiled graphs", "set execution.compile_cache to a folder for them"
        )
