"""The run's file of reference values, and their exchange between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from regauge.system.log import logger

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

REFERENCES = "references.safetensors"
"""File in the run folder with all rows' values; NaN for a row that was not needed."""
WEIGHTS_KEY = "weights_checksum"


def share_values(stored: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Share process 0's values with all processes, [rows, columns] fp32.

    Missing values, and values with another shape, are NaN.
    """
    values = torch.full(shape, torch.nan)
    if stored is not None and stored.shape == shape:
        values = stored
    if dist.is_initialized() and dist.get_world_size() > 1:
        shared = values.to(device)
        dist.broadcast(shared, src=0)
        values = shared.cpu()
    return values


def read_values(path: Path, identity: dict[str, str]) -> dict[str, Tensor]:
    """Read a file with this identity; empty if it is another, or damaged."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata() == identity:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        reason = "belongs to other weights or rows"
    except (OSError, SafetensorError) as error:
        reason = f"cannot be read: {error}"
    logger.warning("%s %s; its values are computed again", path, reason)
    return {}
