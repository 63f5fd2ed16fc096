"""Attention over transformers' paged key-value cache, separately for each request.

transformers' `sdpa` attention computes one masked attention over the keys of all requests in a
batch. The work grows with the square of the number of requests, and one NaN reaches all rows. Here
each request attends to its own keys. Requests with one new token are padded to one batch.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

NAME = "regauge_paged"
"""Name in transformers' `attn_implementation`."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention layer arguments that change the formula."""


class BatchLayout:
    """Numbers of new and earlier tokens of each request in one step."""

    def __init__(self, counts: Sequence[tuple[int, int]], device: torch.device) -> None:
        """Take (new tokens, earlier tokens) for each request."""
        self._counts = list(counts)
        self._device = device
        self._plans: dict[int | None, AttentionPlan] = {}

    def plan(self, window: int | None) -> AttentionPlan:
        """Return the plan for layers with this sliding window, or without one."""
        if window not in self._plans:
            self._plans[window] = AttentionPlan(self._counts, window, self._device)
        return self._plans[window]


class AttentionPlan:
    """Which keys a step's queries read; equal for all layers with the same window."""

    def __init__(
        self, counts: Sequence[tuple[int, int]], window: int | None, device: torch.device
    ) -> None:
        self.prompts: list[tuple[slice, slice, Tensor | None]] = []
        """Queries, keys and mask of each request with several new tokens."""
        singles: list[tuple[int, int, int]] = []
        query = key = 0
        for new, earlier in counts:
            keys = new + (earlier if window is None else min(earlier, window - 1))
            if new == 1:
                singles.append((query, key, keys))
            else:
                mask = _build_mask(new, keys, window, device)
                self.prompts.append((slice(query, query + new), slice(key, key + keys), mask))
            query, key = query + new, key + keys
        rows = torch.tensor(singles, dtype=torch.int64, device=device).reshape(-1, 3)
        self.queries = rows[:, 0]
        """Queries of the requests with one new token, [requests]."""
        offsets = torch.arange(max((keys for _, _, keys in singles), default=0), device=device)
        last = rows[:, 2:] - 1
        self.keys = rows[:, 1:2] + torch.minimum(offsets, last)
        """Keys of these requests, [requests, keys]; shorter ones repeat the last key."""
        is_equal = len({keys for _, _, keys in singles}) <= 1
        self.mask = None if is_equal else (offsets <= last)[:, None, None]
        """True for the request's own keys, [requests, 1, 1, keys]; None if all are."""


def _build_mask(new: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a request's mask, [new, keys] bool: a token reads itself and earlier ones."""
    mask = torch.ones(new, keys, dtype=torch.bool, device=device).tril(keys - new)
    return mask if window is None else mask.triu(keys - new - window + 1)


class LayoutOfThread(threading.local):
    """Layout of the batch computed by the current thread."""

    layout: BatchLayout | None = None


CURRENT = LayoutOfThread()


def attend_paged(
    module: nn.Module,
    query: Tensor,  # [1, heads, queries, width]
    key: Tensor,  # [1, key heads, keys, width]
    value: Tensor,  # [1, key heads, keys, width]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention for a step's requests, [1, queries, heads, width], and None.

    The step's layout is `CURRENT.layout`. Raises NotImplementedError for a layer with another
    formula.
    """
    del module, attention_mask
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    if CURRENT.layout is None:
        raise TypeError("paged attention outside of a step")
    plan = CURRENT.layout.plan(sliding_window)
    has_groups = query.shape[1] != key.shape[1]
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": has_groups}
    output = torch.empty_like(query[..., : value.shape[-1]])
    for queries, keys, mask in plan.prompts:
        output[:, :, queries] = scaled_dot_product_attention(
            query[:, :, queries], key[:, :, keys], value[:, :, keys], attn_mask=mask, **options
        )
    if len(plan.queries):
        rows = scaled_dot_product_attention(
            query[0, :, plan.queries].transpose(0, 1)[:, :, None],
            key[0, :, plan.keys].transpose(0, 1),
            value[0, :, plan.keys].transpose(0, 1),
            attn_mask=plan.mask,
            **options,
        )
        output[0, :, plan.queries] = rows[:, :, 0].transpose(0, 1)
    return output.transpose(1, 2), None


AttentionInterface.register(NAME, attend_paged)
