"""A model as compilers take it: a function of a few plain tensors, with its weights outside.

What a module that is trained reads in a batch is made inside of the graph out of two tensors, so
that little crosses to a device, and a mask cannot be a wrong one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from regauge.models.io_spec import LENGTH, ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from regauge.models.io_spec import Input
    from regauge.models.modules import TextModule
    from regauge.models.ranker import Ranker


FEWEST_ROWS = 2
"""Rows that a graph for any number of them is traced with: of one, torch makes a constant."""
TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


NOTHING = -1
"""Stands where an answer has ended."""


class TextProgram(nn.Module):
    """What a trained module answers to texts, of which each has a row of its own."""

    def __init__(self, module: TextModule, output: Literal["vectors", "scores"]) -> None:
        super().__init__()
        self.module = module
        self._output = output

    def forward(self, tokens: Tensor, lengths: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return [rows, width] fp32.

        `tokens` are [rows, length] int32, `lengths` [rows] int32, and `starts` [rows] int32 where
        the second half of each text begins, if it has one.
        """
        places = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)[None]
        real = places < lengths[:, None]
        batch = {
            "tokens": tokens,
            "segments": real.to(torch.int32),
            "positions": places.expand(tokens.shape[0], -1),
        }
        if starts is not None:
            batch["types"] = (real & (places >= starts[:, None])).to(torch.int32)
        output: Tensor = self.module(batch)[self._output]
        return output


class RankProgram(nn.Module):
    """What a trained ranker answers to a query with one candidate."""

    def __init__(self, module: Ranker) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, tokens: Tensor, lengths: Tensor, numbers: Tensor, categories: Tensor
    ) -> Tensor:
        """Return [rows, 1] fp32.

        `tokens` are [rows, texts, length] int32 and `lengths` [rows, texts] int32, of the query's
        texts and then of the candidate's; `numbers` [rows, numbers] fp32 and `categories` [rows,
        categories] int64, each with one at least.
        """
        form = self.module.form
        flat = tokens.flatten(0, 1)
        places = torch.arange(flat.shape[1], dtype=torch.int32, device=flat.device)[None]
        batch = {
            "tokens": flat,
            "segments": (places < lengths.flatten()[:, None]).to(torch.int32),
            "positions": places.expand(flat.shape[0], -1),
            "keys": flat[:, 0],  # of dropout, which there is none of
            "numbers": numbers[:, None, : form.numbers],
            "categories": categories[:, None, : form.categories],
        }
        scores: Tensor = self.module(batch)["scores"]
        return scores


class OwnProgram(nn.Module):
    """A module of one's own, whose first output is taken, flat.

    Its inputs are named one by one, since compilers do not take any number of them.
    """

    MOST = 4

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self,
        first: Tensor,
        second: Tensor | None = None,
        third: Tensor | None = None,
        fourth: Tensor | None = None,
    ) -> Tensor:
        """Return [rows, numbers] fp32 of tensors that each begin with rows."""
        dtype = next((value.dtype for value in self.module.parameters()), torch.float32)
        given = [each for each in (first, second, third, fourth) if each is not None]
        typed = [each.to(dtype) if each.is_floating_point() else each for each in given]
        return first_of(self.module(*typed)).flatten(1).float()


def first_of(output: Any) -> Tensor:
    """Return a tensor, or the first of several, be it one that has a name.

    What transformers returns has others behind it.
    """
    several = tuple(output.values()) if isinstance(output, dict) else output
    found: Tensor = output if isinstance(output, Tensor) else several[0]
    return found


def examples(inputs: Sequence[Input], rows: int, length: int) -> tuple[Tensor, ...]:
    """Return inputs of one shape: every number is one, so that each is a word and a length."""
    sizes: dict[Any, Any] = {ROWS: rows, LENGTH: length}
    return tuple(
        torch.ones([sizes.get(size, size) for size in each.shape], dtype=TYPES[each.dtype])
        for each in inputs
    )


def cast(program: nn.Module, dtype: torch.dtype) -> None:
    """Let a program compute in a type: its weights, and the masks of what reads texts."""
    program.to(dtype)
    every: Any = program.modules()
    for module in every:
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = dtype


def tensors(program: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a program by name; what is tied has its first name."""
    weights: dict[str, Tensor] = dict(program.named_parameters())
    return {**weights, **dict(program.named_buffers())}


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
