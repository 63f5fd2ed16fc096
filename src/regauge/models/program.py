"""A model as compilers take it: a function of a few plain tensors, with its weights outside.

What a module that is trained reads in a batch is made inside of the graph out of two tensors, so
that little crosses to a device, and a mask cannot be a wrong one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from regauge.models.inputs import LENGTH, ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.models.inputs import Input
    from regauge.models.text import TextModule

FEWEST_ROWS = 2
"""Rows that a graph for any number of them is traced with: of one, torch makes a constant."""
TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


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
