"""Blocks that are computed again in the backward pass drop what they dropped in the forward one."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from regauge.models.dropout import CounterDropout, DropoutKeys
from regauge.training import recompute

Amount = Literal["none", "selective", "full"]


def gradients(amount: Amount, *, native: bool) -> list[Tensor]:
    """Return the gradients of two microbatches whose backward passes come after both forwards."""
    torch.manual_seed(0)
    keys = DropoutKeys()
    drop = nn.Dropout(0.3) if native else CounterDropout(0.3, 0, keys)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), drop)
    recompute.install([block], amount, keys)
    torch.manual_seed(1)
    losses = []
    for number in (1, 2):
        keys.rows = torch.arange(4, dtype=torch.int32) + 1000 * number
        losses.append(block(torch.ones(4, 3, 8) * number).square().sum())
    for loss in losses:
        loss.backward()
    return [value.grad for value in block.parameters() if value.grad is not None]


@pytest.mark.parametrize("native", [False, True], ids=["counter", "native"])
@pytest.mark.parametrize("amount", ["selective", "full"])
def test_the_gradients_are_those_of_one_computation(amount: Amount, native: bool) -> None:  # noqa: FBT001 - a parameter
    expected = gradients("none", native=native)
    found = gradients(amount, native=native)
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_only_a_block_with_dropout_of_its_own_keeps_the_generator() -> None:
    """Where nothing draws from it, saving and setting it back would cost for nothing."""
    for part, draws in ((nn.Dropout(0.1), True), (nn.Dropout(0.0), False), (nn.Tanh(), False)):
        block = nn.Sequential(nn.Linear(2, 2), part)
        recompute.install([block], "full", DropoutKeys())
        assert block.forward.keywords["preserve_rng_state"] is draws  # type: ignore[attr-defined]
