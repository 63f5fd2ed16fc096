"""Gradient buckets keep no gradient of the previous step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regauge.training.strategies._replica import FlatBucket, GradientBucket, PerParameterBucket


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [FlatBucket, PerParameterBucket])
def test_each_step_sums_only_its_microbatches(
    kind: type[GradientBucket], dtype: torch.dtype
) -> None:
    """In step 2 one weight has no gradient, like the head of a task that is not trained."""
    weights = {name: nn.Parameter(torch.zeros(2, dtype=dtype)) for name in ("used", "idle")}
    shapes = {name: value.shape for name, value in weights.items()}
    bucket = (
        FlatBucket(shapes, None, torch.device("cpu"))
        if kind is FlatBucket
        else PerParameterBucket(shapes, None)
    )
    for name, value in weights.items():
        bucket.attach(name, value, nn.Parameter(torch.zeros(2)))
    for names, expected in ((("used", "idle"), [3.0] * 4), (("used",), [3.0, 3.0, 0.0, 0.0])):
        for factor in (1.0, 2.0):
            for name in names:
                (weights[name] * factor).sum().backward()
                bucket.add(name, weights[name])
        bucket.close()
        assert torch.cat([buffer.flatten() for buffer in bucket.buffers]).tolist() == expected
        bucket.clear()
