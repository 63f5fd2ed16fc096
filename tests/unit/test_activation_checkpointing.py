"""Activation checkpointing: recomputed blocks have the same dropout masks."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.runs import BERT, LLAMA
from regauge.models.architectures import build_model, find_blocks
from regauge.models.dropout import CounterDropout, DropoutKeys, RowKeys
from regauge.models.settings import Model
from regauge.training import activation_checkpointing

Amount = Literal["none", "selective", "full"]


def compute_gradients(amount: Amount, *, native: bool) -> list[Tensor]:
    """Return the gradients of two microbatches; both forward passes come first."""
    torch.manual_seed(0)
    keys = DropoutKeys()
    drop = nn.Dropout(0.3) if native else CounterDropout(0.3, 0, keys)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), drop)
    activation_checkpointing.apply_checkpointing([block], amount, keys)
    torch.manual_seed(1)
    losses = []
    for number in (1, 2):
        keys.current = RowKeys(torch.arange(4, dtype=torch.int32) + 1000 * number)
        losses.append(block(torch.ones(4, 3, 8) * number).square().sum())
    for loss in losses:
        loss.backward()
    return [value.grad for value in block.parameters() if value.grad is not None]


@pytest.mark.parametrize("native", [False, True], ids=["counter", "native"])
@pytest.mark.parametrize("amount", ["selective", "full"])
def test_gradients_equal_those_without_checkpointing(amount: Amount, native: bool) -> None:  # noqa: FBT001 - a parameter
    expected = compute_gradients("none", native=native)
    checkpointed = compute_gradients(amount, native=native)
    assert len(checkpointed) == len(expected) == 2
    for one, other in zip(checkpointed, expected, strict=True):
        torch.testing.assert_close(one, other)


class OperationCounter(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        self.found["products" if func in activation_checkpointing.SAVED_OPERATIONS else name] += 1
        return func(*args, **(kwargs or {}))


def count_operations(model: dict[str, Any], head: Any, amount: Amount) -> tuple[int, int, int]:
    """Return the numbers of matmuls and of reductions of a forward and a backward pass."""
    inner, keys = build_model(Model(**{**model, "dropout": 0.0}), head, 300, 0)
    activation_checkpointing.apply_checkpointing(find_blocks(inner), amount, keys)
    tokens = torch.randint(5, 300, (2, 16))
    with OperationCounter() as forward:
        loss = inner.base_model(tokens, use_cache=False).last_hidden_state.square().sum()
    with OperationCounter() as backward:
        loss.backward()
    norms = backward.found["mean"] + backward.found["native_layer_norm"]
    return forward.found["products"], backward.found["products"], norms


@pytest.mark.parametrize(("model", "head"), [(BERT, "masked"), (LLAMA, "causal")])
def test_selective_mode_recomputes_all_but_matmuls_and_attention(
    model: dict[str, Any], head: Any
) -> None:
    """The blocks are those of transformers; their norms must be recomputed."""
    plain, some, every = (count_operations(model, head, mode) for mode in get_args(Amount))
    assert plain[0] == some[0] == every[0] > 10
    assert some[1] == plain[1]
    assert every[1] > plain[1] + 10
    assert plain[2] == 0
    assert some[2] == every[2] > 3


def test_only_blocks_with_native_dropout_restore_the_generator() -> None:
    """Saving and restoring an unused generator would only cost time."""
    for part, draws in ((nn.Dropout(0.1), True), (nn.Dropout(0.0), False), (nn.Tanh(), False)):
        block = nn.Sequential(nn.Linear(2, 2), part)
        activation_checkpointing.apply_checkpointing([block], "full", DropoutKeys())
        assert block.forward.keywords["preserve_rng_state"] is draws  # type: ignore[attr-defined]
