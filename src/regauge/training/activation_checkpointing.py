"""Activation checkpointing: blocks are recomputed in the backward pass to save memory."""

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

    from regauge.models.dropout import DropoutKeys, RowKeys

Mode = Literal["none", "selective", "full"]

_ATEN = torch.ops.aten
SAVED_OPERATIONS = frozenset(
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
"""Operations saved by `selective`: matrix products, the costliest to recompute."""


def apply_checkpointing(blocks: Iterable[nn.Module], mode: Mode, keys: DropoutKeys) -> None:
    """Make each block recompute its activations in the backward pass, with the same dropout masks.

    Torch's generator state is restored only for blocks with native dropout.
    """
    if mode == "none":
        return
    for block in blocks:
        has_native_dropout = any(
            isinstance(module, torch.nn.Dropout) and module.p > 0 for module in block.modules()
        )
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=has_native_dropout,
            context_fn=partial(_build_contexts, mode, keys),
        )


def _build_contexts(
    mode: Mode, keys: DropoutKeys
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward: AbstractContextManager[Any] = nullcontext()
    recompute: AbstractContextManager[Any] = nullcontext()
    if mode == "selective":
        forward, recompute = create_selective_checkpoint_contexts(_policy)
    return forward, _restore_dropout_keys(recompute, keys, keys.current)


@contextmanager
def _restore_dropout_keys(
    inner: AbstractContextManager[Any], keys: DropoutKeys, first: RowKeys | None
) -> Iterator[None]:
    """Reuse the first forward pass's dropout keys while recomputing a block."""
    current, keys.current = keys.current, first
    try:
        with inner:
            yield
    finally:
        keys.current = current


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if operation in SAVED_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
