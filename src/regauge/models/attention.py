"""Chunked attention: matrix products over few rows at a time, so that scores stay in the cache.

For devices on which fused attention is slow: on a CPU, torch's takes two to four times as long as
plain matrix products (docs/explanation/performance.md). Causal attention skips the scores of later
keys in blocks of queries.

Longer rows use fused attention, because the scores kept for the backward pass grow with the square
of the length.
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
MAX_ROW_TOKENS = 512
"""Longest row computed here, in tokens."""
MAX_SCORES = 1 << 21
"""Attention scores per chunk: 4 MB in bf16."""
QUERY_BLOCK = 128
"""Queries per block in causal attention; skips about half of the scores."""
UNSUPPORTED_ARGUMENTS = ("softcap", "position_bias", "cache")
"""Arguments to transformers' fused attention that change the computation."""


def enable_chunked_attention(model: PreTrainedModel) -> None:
    """Switch a model from fused to chunked attention, if its architecture supports it."""
    if model._supports_attention_backend:  # noqa: SLF001 - there is no public attribute
        sub_configs = (getattr(model.config, name) for name in model.config.sub_configs)
        for config in (model.config, *filter(None, sub_configs)):
            config._attn_implementation = CHUNKED  # noqa: SLF001 - as set_attn_implementation does


def chunked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output, [rows, queries, heads, width].

    Query, key and value are [rows, heads, tokens, width]. The mask is added to the scores and is
    [rows, 1 or heads, queries, keys]. The softmax is in fp32. Falls back to fused attention for
    dropout, unsupported arguments and rows of more than MAX_ROW_TOKENS.
    """
    length = max(query.shape[2], key.shape[2])
    is_unsupported = any(kwargs.get(name) is not None for name in UNSUPPORTED_ARGUMENTS)
    if length > MAX_ROW_TOKENS or dropout or is_unsupported:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    groups = getattr(module, "num_key_value_groups", 1)
    tensors = query, repeat_kv(key, groups), repeat_kv(value, groups)
    query, key, value = (tensor.contiguous() for tensor in tensors)
    rows, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    bias = query.new_zeros(1, 1, 1, 1) if attention_mask is None else attention_mask
    bias = bias.expand(rows, -1, queries, keys)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    is_causal = attention_mask is not None and getattr(module, "is_causal", False)
    outputs = []
    for start, stop, num_keys in _query_spans(queries, keys, is_causal=is_causal):
        block = query[:, :, start:stop], key[:, :, :num_keys], value[:, :, :num_keys]
        outputs.append(_attend_in_chunks(*block, bias[:, :, start:stop, :num_keys], scale=scale))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _query_spans(queries: int, keys: int, *, is_causal: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the start and stop of each query block, and how many keys it attends to."""
    size = QUERY_BLOCK if is_causal and queries == keys else queries
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        yield start, stop, stop if size < queries else keys


def _attend_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *, scale: float
) -> Tensor:
    """Compute attention over row chunks with at most MAX_SCORES scores each."""
    size = max(1, MAX_SCORES // (query.shape[1] * query.shape[2] * key.shape[2]))
    chunks = zip(*(tensor.split(size) for tensor in (query, key, value, bias)), strict=True)
    return torch.cat([_attend(*chunk, scale=scale) for chunk in chunks])


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *, scale: float) -> Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)) * scale + bias
    probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(probabilities, value)


AttentionInterface.register(CHUNKED, chunked_attention)
AttentionMaskInterface.register(CHUNKED, eager_mask)
