"""A causal model as a program that goes on with texts: the likeliest token, again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOTHING = -1
"""Stands where an answer has ended."""


class WriteProgram(nn.Module):
    """Greedy answers by transformers' `generate`, which keeps keys and values of earlier tokens."""

    def __init__(self, model: PreTrainedModel, most: int, pad: int, ends: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        self._ends = ends
        self._how = GenerationConfig(
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=pad,
            eos_token_id=list(ends) or None,
            use_cache=True,
        )
        self._most = most
        self._pad = pad

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the tokens that follow, [rows, most] int64, and NOTHING behind an end.

        `tokens` are [rows, length] int32 and `lengths` [rows] int32; a prompt is moved to the end
        of its row, so that what follows it stands at one place in all rows.
        """
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device)[None] - (length - lengths)[:, None]
        real = (places >= 0) | (lengths == 0)[:, None]
        moved = tokens.long().gather(1, places.clamp(min=0).long())
        moved = torch.where(real, moved, torch.full_like(moved, self._pad))
        inner: Any = self.model
        whole = inner.generate(moved, attention_mask=real.long(), generation_config=self._how)
        found = torch.full((len(tokens), self._most), NOTHING, device=tokens.device)
        found[:, : whole.shape[1] - length] = whole[:, length:]
        return self._cut(found)

    def _cut(self, found: Tensor) -> Tensor:
        """Return tokens up to the first that ends an answer, without it."""
        ends = torch.tensor(self._ends, device=found.device, dtype=found.dtype)
        ended = torch.isin(found, ends).cumsum(1) > 0
        return found.masked_fill(ended, NOTHING)
