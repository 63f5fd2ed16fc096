"""Blocks that are computed again in the backward pass drop what they dropped in the forward one."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.runs import BERT, LLAMA
from regauge.models.architectures import blocks, build
from regauge.models.dropout import CounterDropout, DropoutKeys
from regauge.models.settings import Model
from regauge.training import activation_checkpointing

Amount = Literal["none", "selective", "full"]


def gradients(amount: Amount, *, native: bool) -> list[Tensor]:
    """Return the gradients of two microbatches whose backward passes come after both forwards."""
    torch.manual_seed(0)
    keys = DropoutKeys()
    drop = nn.Dropout(0.3) if native else CounterDropout(0.3, 0, keys)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), drop)
    activation_checkpointing.install([block], amount, keys)
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


class Counted(TorchDispatchMode):
    """Counts the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        self.found["products" if func in activation_checkpointing.KEPT else name] += 1
        return func(*args, **(kwargs or {}))


def operations(model: dict[str, Any], head: Any, amount: Amount) -> tuple[int, int, int]:
    """Return the matrix products of a forward and of its backward pass, and the reductions."""
    inner, keys = build(Model(**{**model, "dropout": 0.0}), head, 300, 0)
    activation_checkpointing.install(blocks(inner), amount, keys)
    tokens = torch.randint(5, 300, (2, 16))
    with Counted() as forward:
        loss = inner.base_model(tokens, use_cache=False).last_hidden_state.square().sum()
    with Counted() as backward:
        loss.backward()
    norms = backward.found["mean"] + backward.found["native_layer_norm"]
    return forward.found["products"], backward.found["products"], norms


@pytest.mark.parametrize(("model", "head"), [(BERT, "masked"), (LLAMA, "causal")])
def test_selective_computes_all_again_but_products_and_attention(
    model: dict[str, Any], head: Any
) -> None:
    """In transformers' own blocks; their norms are computed again, so something is."""
    plain, some, every = (operations(model, head, each) for each in get_args(Amount))
    assert plain[0] == some[0] == every[0] > 10
    assert some[1] == plain[1]
    assert every[1] > plain[1] + 10
    assert plain[2] == 0
    assert some[2] == every[2] > 3


def test_only_a_block_with_dropout_of_its_own_keeps_the_generator() -> None:
    """Where nothing draws from it, saving and setting it back would cost for nothing."""
    for part, draws in ((nn.Dropout(0.1), True), (nn.Dropout(0.0), False), (nn.Tanh(), False)):
        block = nn.Sequential(nn.Linear(2, 2), part)
        activation_checkpointing.install([block], "full", DropoutKeys())
        assert block.forward.keywords["preserve_rng_state"] is draws  # type: ignore[attr-defined]
