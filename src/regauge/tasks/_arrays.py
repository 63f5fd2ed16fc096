"""Token arrays for record texts, and their order in a global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regauge.data.batches import MicrobatchPlan, build_dropout_keys, pad_sequences
from regauge.data.buckets import find_bucket_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.data.batches import Arrays, RandomKey
    from regauge.data.loader import CollatorConfig

Texts = list[np.ndarray | None]
"""Token ids per text, each [length]; None in padding rows."""


def plan_sorted_slots(
    row_numbers: np.ndarray,  # [global batch]
    lengths: Sequence[int],  # [slots], by text number first, then by row
    batch_slots: int,
    bucket_lengths: tuple[int, ...],
) -> list[MicrobatchPlan]:
    """Sort slots by length, and split them into microbatches with `batch_slots` slots."""
    sizes = np.array(lengths)
    longest_first = np.argsort(-sizes, kind="stable")
    plans = []
    for slots in longest_first.reshape(-1, batch_slots):
        numbers, indices = np.divmod(slots, len(row_numbers))
        length = find_bucket_length(int(sizes[slots].max()), bucket_lengths)
        plans.append(MicrobatchPlan(row_numbers[indices], numbers, slots, length))
    return plans


def build_row_arrays(
    texts: Texts, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
) -> Arrays:
    """Build token arrays for rows with several texts, [rows x texts, length].

    A row's texts are consecutive.
    """
    count = len(texts) // len(plan.row_numbers)
    row_numbers = np.repeat(plan.row_numbers, count)
    text_numbers = np.tile(np.arange(count), len(plan.row_numbers))
    text_plan = MicrobatchPlan(row_numbers, text_numbers, np.zeros_like(row_numbers), plan.length)
    return build_text_arrays(texts, text_plan, key, config)


def build_slot_arrays(
    texts: Texts, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
) -> Arrays:
    """Build token arrays for texts, with their `slots` and whether they are `real`, [batch]."""
    return {
        **build_text_arrays(texts, plan, key, config),
        "slots": plan.slots,
        "real": (plan.row_numbers >= 0).astype(np.float32),
    }


def build_text_arrays(
    texts: Texts, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
) -> Arrays:
    """Build tokens, segments and positions, [batch, length] int32, and dropout keys, [batch]."""
    positions = np.arange(plan.length, dtype=np.int32)
    return {
        "tokens": pad_sequences(texts, plan.length, config.pad_id),
        "segments": (positions < np.array(count_tokens(texts))[:, None]).astype(np.int32),
        "positions": np.broadcast_to(positions, (len(texts), plan.length)).copy(),
        "keys": build_dropout_keys(plan, key),
    }


def build_token_types(arrays: Arrays, starts: Sequence[int]) -> np.ndarray:
    """Return token types, [batch, length]: 1 from the start of a text's second half, else 0."""
    is_second = arrays["positions"] >= np.array(starts)[:, None]
    return (is_second & (arrays["segments"] > 0)).astype(np.int32)


def count_tokens(texts: Texts) -> list[int]:
    """Return text lengths; 0 for a missing one."""
    return [0 if text is None else len(text) for text in texts]
