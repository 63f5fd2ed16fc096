"""Finds the newest loadable checkpoint, here or in an object store, and loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from regauge.accelerators import wait_for_all
from regauge.run_folders import checkpoint_files
from regauge.system.errors import NoCheckpointError, RegaugeError, TransientError
from regauge.system.log import logger
from regauge.training.checkpoint import tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from regauge.run_folders.remote_checkpoints import RemoteCheckpoints
    from regauge.system.processes import World


def find_newest(root: Path, world: World, remote: RemoteCheckpoints | None = None) -> Path | None:
    """Return the newest whole checkpoint, the same on every process; None if there is none.

    A checkpoint that is only in the object store is downloaded first. Raises NoCheckpointError if
    all checkpoints are damaged: a run never silently starts from scratch.
    """
    if world.is_main_process:
        checkpoint_files.recover(root)
    if world.size > 1:
        wait_for_all()
    damages = []
    for step in _list_candidates(root, world, remote):
        damage = find_damage(root, step, world, remote)
        if damage is None:
            return root / checkpoint_files.checkpoint_name(step)
        if damage:
            damages.append(damage)
            logger.warning("skipping a damaged checkpoint: %s", damage)
    if damages:
        raise NoCheckpointError(
            f"no checkpoint in {root} can be loaded: {damages[0]}",
            "restore one from a copy, or start a new run in another output.folder",
        )
    return None


def find_damage(
    root: Path, step: int, world: World, remote: RemoteCheckpoints | None = None
) -> str | None:
    """Return what is damaged in a step's checkpoint, equal on every process; None if it is whole.

    A damaged checkpoint is first downloaded again. Empty if neither this machine nor the object
    store has the checkpoint.
    """
    path = root / checkpoint_files.checkpoint_name(step)
    damage = _share_first_damage(verify_checkpoint(path, world), world)
    if damage is not None and remote is not None:
        download_checkpoint(remote, step, root, world)
        if not path.is_dir():
            return ""  # the store has files of it, but never had its manifest
        damage = _share_first_damage(verify_checkpoint(path, world), world)
    return damage


def _list_candidates(root: Path, world: World, remote: RemoteCheckpoints | None) -> list[int]:
    """Return steps that may have a checkpoint, newest first, equal on every process."""
    steps = set(checkpoint_files.list_steps(root))
    if remote and world.is_main_process:
        steps |= set(remote.list_steps())
    shared = [sorted(steps, reverse=True)]
    if world.size > 1:
        dist.broadcast_object_list(shared)
    return shared[0]


def download_checkpoint(
    remote: RemoteCheckpoints, step: int, root: Path, world: World, *, if_missing: bool = False
) -> None:
    """Download a checkpoint, if the store has it; every process calls this.

    `if_missing` does not replace a checkpoint on this machine.
    """
    problem: BaseException | None = None
    is_local = (root / checkpoint_files.checkpoint_name(step)).is_dir()
    if world.is_main_process and not (if_missing and is_local):
        try:
            remote.download(step, root)
        except (OSError, TransientError) as error:
            problem = error
    messages = [str(problem) if problem else ""]
    if world.size > 1:
        dist.broadcast_object_list(messages)
    if messages[0]:
        raise problem or TransientError(
            f"process 0 could not download a checkpoint: {messages[0]}", "see its log"
        )


def verify_checkpoint(path: Path, world: World) -> str | None:
    """Return what is damaged in a checkpoint, or None; each process hashes a share of the files.

    Headers are checked first, so no large file is hashed in vain.
    """
    damage = checkpoint_files.find_missing_file(path) or tensors.find_bad_header(path)
    return damage or checkpoint_files.find_damage(path, rank=world.rank, size=world.size)


def _share_first_damage(damage: str | None, world: World) -> str | None:
    """Return the first damage found by any process, equal on every process."""
    if world.size == 1:
        return damage
    damages: list[Any] = [None] * world.size
    dist.all_gather_object(damages, damage)
    return next((text for text in damages if text), None)


def load_checkpoint(path: Path, values: dict[str, Tensor]) -> dict[str, Any]:
    """Fill tensors from a checkpoint; return the state document.

    Raises NoCheckpointError if the checkpoint belongs to another model.
    """
    try:
        tensors.load_tensors(path, values)
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | RegaugeError):
            raise
        lines = str(error).strip().splitlines()
        raise NoCheckpointError(
            f"{path} does not fit this run: {lines[-1] if lines else repr(error)}",
            "move it away, or set output.folder to the folder of its run",
        ) from error
    return checkpoint_files.read_state(path)
