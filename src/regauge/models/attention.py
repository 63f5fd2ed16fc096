"""Attention as matrix products, over as many rows at a time as have their scores in a cache.

Of rows where no token sees a later one, only what can be seen is computed, to a block of tokens.

For devices whose fused attention is slow: torch's own takes a CPU two to four times as long as the
products that it consists of (docs/performance.md). Rows that are longer are left to it, since what
is kept for the backward pass here grows with the square of the length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from transformers import PreTrainedModel

CHUNKED = "chunked"
LONGEST = 512
"""Tokens of a row."""
MOST_SCORES = 1 << 21
"""Scores at a time: 4 MB of bf16."""
QUERIES = 128
"""Tokens at a time, of rows where none sees a later one: half of the scores are not computed."""
NOT_HERE = ("softcap", "position_bias", "cache")
"""Arguments of transformers' fused attention that mean another computation."""


def chunk(model: PreTrainedModel) -> None:
    """Let a model that has fused attention compute it so, where its architecture can."""
    if model._supports_attention_backend:  # noqa: SLF001 - nothing public tells it
        inner = (getattr(model.config, name) for name in model.config.sub_configs)
        for config in (model.config, *filter(None, inner)):
            config._attn_implementation = CHUNKED  # noqa: SLF001 - as set_attn_implementation does


def chunked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return [rows, queries, heads, width] of queries, keys and values [rows, heads, …, width].

    The mask is added to the scores, [rows, 1 or heads, queries, keys]; softmax is in fp32.
    """
    longest = max(query.shape[2], key.shape[2])
    if longest > LONGEST or dropout or any(others.get(name) is not None for name in NOT_HERE):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **others
        )
    groups = getattr(module, "num_key_value_groups", 1)
    parts = query, repeat_kv(key, groups), repeat_kv(value, groups)
    query, key, value = (part.contiguous() for part in parts)
    rows, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    bias = query.new_zeros(1, 1, 1, 1) if attention_mask is None else attention_mask
    bias = bias.expand(rows, -1, queries, keys)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = attention_mask is not None and getattr(module, "is_causal", False)
    found = []
    for begin, end, seen in _spans(queries, keys, causal=causal):
        some = query[:, :, begin:end], key[:, :, :seen], value[:, :, :seen]
        found.append(_attended(*some, bias[:, :, begin:end, :seen], scale=scale))
    return torch.cat(found, 2).transpose(1, 2).contiguous(), None


def _spans(queries: int, keys: int, *, causal: bool) -> Iterator[tuple[int, int, int]]:
    """Yield where some queries begin and end, and the keys that they can see: 1 to the last."""
    size = QUERIES if causal and queries == keys else queries
    for begin in range(0, queries, size):
        end = min(begin + size, queries)
        yield begin, end, end if size < queries else keys


def _attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *, scale: float) -> Tensor:
    """Attend over as many rows at a time as may have scores."""
    size = max(1, MOST_SCORES // (query.shape[1] * query.shape[2] * key.shape[2]))
    chunks = zip(*(part.split(size) for part in (query, key, value, bias)), strict=True)
    return torch.cat([_of_chunk(*chunk, scale=scale) for chunk in chunks])


def _of_chunk(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *, scale: float) -> Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)) * scale + bias
    shares = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(shares, value)


AttentionInterface.register(CHUNKED, chunked)
AttentionMaskInterface.register(CHUNKED, eager_mask)
