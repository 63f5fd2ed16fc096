"""Activation checkpointing: memory for time, by computing blocks again in the backward pass."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from regauge.models.dropout import DropoutKeys

Amount = Literal["none", "selective", "full"]

_ATEN = torch.ops.aten
KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
        _ATEN._scaled_dot_product_flash_attention.default,  # noqa: SLF001
        _ATEN._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
        _ATEN._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
        _ATEN._scaled_dot_product_attention_math.default,  # noqa: SLF001
    }
)
"""Operations whose results `selective` keeps: those that cost most to compute again."""


def install(blocks: Iterable[nn.Module], amount: Amount, keys: DropoutKeys) -> None:
    """Make each block compute itself again in the backward pass, with the same dropout.

    The framework's generator is set back only for a block that draws from it.
    """
    if amount == "none":
        return
    for block in blocks:
        draws = any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in block.modules())
        contexts = partial(_contexts, amount, keys)
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=draws,
            context_fn=contexts,
        )


def _contexts(
    amount: Amount, keys: DropoutKeys
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward pass and of its repetition."""
    forward: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if amount == "selective":
        forward, again = create_selective_checkpoint_contexts(_policy)
    return forward, _with_keys(again, keys, keys.rows)


@contextmanager
def _with_keys(
    inner: AbstractContextManager[Any], keys: DropoutKeys, rows: torch.Tensor | None
) -> Iterator[None]:
    """Repeat a block under the row keys that it was first computed with."""
    later, keys.rows = keys.rows, rows
    try:
        with inner:
            yield
    finally:
        keys.rows = later


def _policy(_context: Any, operation: Any, *_values: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
