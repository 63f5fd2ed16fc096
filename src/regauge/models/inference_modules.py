"""Programs: the modules that backends compile, functions of a few plain tensors.

A program builds its module's batch, such as masks and positions, inside the graph from tokens and
lengths. So few bytes are transferred to the device, and callers cannot pass a wrong mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from regauge.models.io_spec import build_example_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.models.io_spec import TensorSpec
    from regauge.models.losses import Batch
    from regauge.models.modules import TextModule
    from regauge.models.ranker import Ranker


MIN_TRACE_ROWS = 2
"""Rows in a dynamic graph's example inputs; torch turns a dimension of 1 into a constant."""
DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class TextProgram(nn.Module):
    """Text embeddings or class scores, one text per row."""

    def __init__(self, module: TextModule, output: Literal["vectors", "scores"]) -> None:
        super().__init__()
        self.module = module
        self._output = output

    def forward(self, tokens: Tensor, lengths: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return [rows, width] fp32.

        `tokens` is [rows, length] int32 and `lengths` is [rows] int32. For pairs, `starts`, [rows]
        int32, is the index of the second text's first token.
        """
        output: Tensor = self.module(_build_batch(tokens, lengths, starts))[self._output]
        return output

    def token_vectors(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the last hidden states before the pooling, [rows, length, width] fp32."""
        batch = _build_batch(tokens, lengths, None)
        return self.module.hidden_states(batch, packed=False).float()


def _build_batch(tokens: Tensor, lengths: Tensor, starts: Tensor | None) -> Batch:
    """Return a text module's batch for rows with one text or one pair."""
    positions = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)[None]
    real = positions < lengths[:, None]
    batch = {
        "tokens": tokens,
        "segments": real.to(torch.int32),
        "positions": positions.expand(tokens.shape[0], -1),
    }
    if starts is not None:
        batch["types"] = (real & (positions >= starts[:, None])).to(torch.int32)
    return batch


class TagProgram(nn.Module):
    """Each token's best class and its probability."""

    NUMBERS_PER_TOKEN = 2

    def __init__(self, scores: TextProgram) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return [rows, 2 x length] fp32: a class and its probability for each token.

        `tokens` is [rows, length] int32 and `lengths` is [rows] int32. Padding has zeros.
        """
        positions = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)[None]
        real = (positions < lengths[:, None]).float()
        probabilities, classes = self.scores(tokens, lengths).softmax(2).max(2)
        return torch.stack([classes.float() * real, probabilities * real], 2).flatten(1)


class RankProgram(nn.Module):
    """Scores for queries with one candidate each."""

    def __init__(self, module: Ranker) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, tokens: Tensor, lengths: Tensor, numbers: Tensor, categories: Tensor
    ) -> Tensor:
        """Return [rows, 1] fp32.

        `tokens` is [rows, texts, length] int32 and `lengths` is [rows, texts] int32: the query's
        texts, then the candidate's. `numbers` is [rows, features] fp32 and `categories` is [rows,
        features] int64; both have at least one column, which is ignored without features.
        """
        shape = self.module.shape
        flat = tokens.flatten(0, 1)
        batch = {
            **_build_batch(flat, lengths.flatten(), None),
            "keys": flat[:, 0],  # dropout keys, which are not used
            "numbers": numbers[:, None, : shape.numeric_features],
            "categories": categories[:, None, : shape.categorical_features],
        }
        scores: Tensor = self.module(batch)["scores"]
        return scores


class CustomProgram(nn.Module):
    """The first output of a custom module, flattened to one vector per row.

    The inputs are separate arguments, because compilers do not support variadic ones.
    """

    MAX_INPUTS = 4

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
        """Return [rows, width] fp32; each input is [rows, …]."""
        dtype = next((value.dtype for value in self.module.parameters()), torch.float32)
        inputs = [value for value in (first, second, third, fourth) if value is not None]
        inputs = [value.to(dtype) if value.is_floating_point() else value for value in inputs]
        return first_tensor(self.module(*inputs)).flatten(1).float()


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor in a module's output: a tensor, a sequence or a mapping.

    transformers outputs are mappings.
    """
    outputs = tuple(output.values()) if isinstance(output, dict) else output
    tensor: Tensor = output if isinstance(output, Tensor) else outputs[0]
    return tensor


def example_inputs(inputs: Sequence[TensorSpec], rows: int, length: int) -> tuple[Tensor, ...]:
    """Return the arrays of `build_example_arrays` as tensors, for a trace."""
    return tuple(map(torch.from_numpy, build_example_arrays(inputs, rows, length)))


def cast_program(program: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights of a program to a dtype, and compute attention masks in it."""
    program.to(dtype)
    modules: Any = program.modules()
    for module in modules:
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = dtype


def named_tensors(program: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a program by name; tied weights have their first name."""
    weights: dict[str, Tensor] = dict(program.named_parameters())
    return {**weights, **dict(program.named_buffers())}
