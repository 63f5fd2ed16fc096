"""Finding what can be loaded, here or in an object store, and loading it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from regauge.checkpoint import layout, tensors
from regauge.errors import NoCheckpointError, RegaugeError, TransientError
from regauge.log import logger

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from regauge.checkpoint.remote import Remote
    from regauge.processes import World


def newest(root: Path, world: World, remote: Remote | None = None) -> Path | None:
    """Return the newest checkpoint that is whole, the same on every process; None without any.

    One that only the object store has is fetched first. Raises NoCheckpointError when there are
    some and all are damaged: a run never starts again from nothing in silence.
    """
    if world.first:
        layout.recover(root)
    if world.size > 1:
        dist.barrier()
    damages = []
    for step in _candidates(root, world, remote):
        path = root / layout.name_of(step)
        damage = _first_damage(damage_of(path, world), world)
        if damage is not None and remote is not None:
            _fetch(remote, step, root, world)
            if not path.is_dir():
                continue  # its files are in the store, and its manifest never was
            damage = _first_damage(damage_of(path, world), world)
        if damage is None:
            return path
        damages.append(damage)
        logger.warning("checkpoint passed over: %s", damage)
    if damages:
        raise NoCheckpointError(
            f"no checkpoint in {root} can be loaded: {damages[0]}",
            "restore one from a copy, or start a new run in another output.folder",
        )
    return None


def _candidates(root: Path, world: World, remote: Remote | None) -> list[int]:
    """Return the steps to look at, newest first, the same on every process."""
    found = set(layout.steps(root)) | set(remote.steps() if remote and world.first else ())
    shared = [sorted(found, reverse=True)]
    if world.size > 1:
        dist.broadcast_object_list(shared)
    return shared[0]


def _fetch(remote: Remote, step: int, root: Path, world: World) -> None:
    """Copy a checkpoint here, where the store has it; every process calls this."""
    problem: BaseException | None = None
    if world.first:
        try:
            remote.fetch(step, root)
        except (OSError, TransientError) as error:
            problem = error
    told = [str(problem) if problem else ""]
    if world.size > 1:
        dist.broadcast_object_list(told)
    if told[0]:
        raise problem or TransientError(f"the first process says: {told[0]}", "see its log")


def damage_of(path: Path, world: World) -> str | None:
    """Return what is wrong with a checkpoint, or None; each process hashes a share of it.

    Headers come first: what nobody can load is not read as a whole.
    """
    cheap = layout.gap(path) or tensors.damage(path)
    return cheap or layout.damage(path, rank=world.rank, size=world.size)


def _first_damage(damage: str | None, world: World) -> str | None:
    if world.size == 1:
        return damage
    everywhere: list[Any] = [None] * world.size
    dist.all_gather_object(everywhere, damage)
    return next((found for found in everywhere if found), None)


def load(path: Path, values: dict[str, Tensor]) -> dict[str, Any]:
    """Fill tensors from a checkpoint and return its state.

    Raises NoCheckpointError for one of another model.
    """
    try:
        tensors.read_into(path, values)
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | RegaugeError):
            raise
        said = str(error).strip().splitlines()
        raise NoCheckpointError(
            f"{path} does not fit this run: {said[-1] if said else repr(error)}",
            "move it away, or name the run that it is of",
        ) from error
    return layout.read_state(path)
