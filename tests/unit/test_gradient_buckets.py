"""Gradients of a step are its own: none is left of the step before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regauge.strategies._buckets import Bucket, Flat, Loose


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [Flat, Loose])
def test_each_step_sums_its_own_microbatches(kind: type[Bucket], dtype: torch.dtype) -> None:
    """In the second step one weight has no gradient, as that of a task without a turn."""
    weights = {name: nn.Parameter(torch.zeros(2, dtype=dtype)) for name in ("used", "idle")}
    shapes = {name: value.shape for name, value in weights.items()}
    bucket = Flat(shapes, None, torch.device("cpu")) if kind is Flat else Loose(shapes, None)
    for name, value in weights.items():
        bucket.attach(name, value, nn.Parameter(torch.zeros(2)))
    for names, wanted in ((("used", "idle"), [3.0] * 4), (("used",), [3.0, 3.0, 0.0, 0.0])):
        for slope in (1.0, 2.0):
            for name in names:
                (weights[name] * slope).sum().backward()
                bucket.add(name, weights[name])
        bucket.close()
        assert torch.cat([part.flatten() for part in bucket.parts]).tolist() == wanted
        bucket.clear()
