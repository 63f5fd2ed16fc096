"""The largest difference between the weights of two model folders, without torch."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PATTERN = "*.safetensors"


def compute_max_difference(first: Path, second: Path) -> float:
    """Return the largest difference of a weight, relative to the largest weight of its tensor.

    The result is 0 if all weights are equal, and infinity if the folders have different tensors.
    """
    import numpy as np
    from safetensors.numpy import load_file

    models = [
        {
            name: tensor
            for path in sorted(folder.glob(PATTERN))
            for name, tensor in load_file(path).items()
        }
        for folder in (first, second)
    ]
    if not models[0] or models[0].keys() != models[1].keys():
        return math.inf
    largest = 0.0
    for name, tensor in models[0].items():
        other = models[1][name]
        if tensor.shape != other.shape:
            return math.inf
        if np.array_equal(tensor, other):
            continue
        scale = max(float(np.abs(tensor).max()), sys.float_info.min)
        largest = max(largest, float(np.abs(tensor - other).max()) / scale)
    return largest
