"""Programs: the modules that backends compile, functions of a few plain tensors.

A program computes the batch of a trained module, such as masks and positions, inside the graph
from tokens and lengths. So few bytes are transferred to a device, and callers cannot pass a wrong
mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from regauge.data.tokenizer import LoadedTokenizer
from regauge.errors import SettingsError
from regauge.models.attention_masks import detect_attention_spec, max_text_tokens
from regauge.models.generation_config import list_token_ids, read_end_token_ids
from regauge.models.io_spec import LENGTH, ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from regauge.models.io_spec import TensorSpec
    from regauge.models.modules import TextModule
    from regauge.models.ranker import Ranker
    from regauge.models.sentence_transformers import Tokenization


MIN_TRACE_ROWS = 2
"""Rows of the example inputs of a dynamic graph; torch turns a dimension of 1 into a constant."""
DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
NO_TOKEN = -1
"""Fills generated rows after the end of the text."""
PROMPT_OPTIONS: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
}
"""Options of a generation configuration that also read padding, with their neutral values."""


class TextProgram(nn.Module):
    """Embeddings or class scores of texts, one text per row."""

    def __init__(self, module: TextModule, output: Literal["vectors", "scores"]) -> None:
        super().__init__()
        self.module = module
        self._output = output

    def forward(self, tokens: Tensor, lengths: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return [rows, width] fp32.

        `tokens` is [rows, length] int32 and `lengths` is [rows] int32. For pairs, `starts`, [rows]
        int32, is the index of the second text's first token.
        """
        positions = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)[None]
        real = positions < lengths[:, None]
        batch = {
            "tokens": tokens,
            "segments": real.to(torch.int32),
            "positions": positions.expand(tokens.shape[0], -1),
        }
        if starts is not None:
            batch["types"] = (real & (positions >= starts[:, None])).to(torch.int32)
        output: Tensor = self.module(batch)[self._output]
        return output


class TagProgram(nn.Module):
    """The best class of each token of a text, and its probability."""

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
    """Scores of queries with one candidate each."""

    def __init__(self, module: Ranker) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, tokens: Tensor, lengths: Tensor, numbers: Tensor, categories: Tensor
    ) -> Tensor:
        """Return [rows, 1] fp32.

        `tokens` is [rows, texts, length] int32 and `lengths` is [rows, texts] int32: texts of the
        query, then of the candidate. `numbers` is [rows, features] fp32 and `categories` is [rows,
        features] int64; both have at least one column, which is ignored if there is no feature.
        """
        shape = self.module.shape
        flat = tokens.flatten(0, 1)
        positions = torch.arange(flat.shape[1], dtype=torch.int32, device=flat.device)[None]
        batch = {
            "tokens": flat,
            "segments": (positions < lengths.flatten()[:, None]).to(torch.int32),
            "positions": positions.expand(flat.shape[0], -1),
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
    """Return the first tensor of a module's output: a tensor, a sequence or a mapping.

    Outputs of transformers are mappings.
    """
    outputs = tuple(output.values()) if isinstance(output, dict) else output
    tensor: Tensor = output if isinstance(output, Tensor) else outputs[0]
    return tensor


def example_inputs(inputs: Sequence[TensorSpec], rows: int, length: int) -> tuple[Tensor, ...]:
    """Return example inputs filled with 1, which is valid as a token id and as a length."""
    sizes: dict[Any, Any] = {ROWS: rows, LENGTH: length}
    return tuple(
        torch.ones([sizes.get(size, size) for size in spec.shape], dtype=DTYPES[spec.dtype])
        for spec in inputs
    )


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


def find_generation_limit(model: PreTrainedModel) -> int | None:
    """Return the maximum tokens of a prompt with its answer; None if there is no limit.

    Raises SettingsError if the model is not causal.
    """
    spec = detect_attention_spec(model, packs_texts=False)
    if not spec.is_causal:
        problem = f"architecture '{model.config.model_type}' is not causal"
        raise SettingsError(problem, "choose a causal one, such as llama or gpt2")
    return max_text_tokens(model, spec)


class GenerationProgram(nn.Module):
    """Greedy generation by transformers' `generate`, with a key-value cache.

    The other options of the model's generation configuration apply, such as a repetition penalty.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_new_tokens: int,
        pad_id: int,
        end_ids: tuple[int, ...],
        *,
        has_token_types: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._has_token_types = has_token_types
        self._end_ids = end_ids
        self._generation_config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_return_sequences=1,
            return_dict_in_generate=False,
            pad_token_id=pad_id,
            eos_token_id=list(end_ids) or None,
            use_cache=True,
        )
        self._max_new_tokens = max_new_tokens
        self._pad_id = pad_id
        declared: Any = model.generation_config
        self._reads_prompts = any(
            getattr(declared, name, None) not in {None, neutral}
            for name, neutral in PROMPT_OPTIONS.items()
        )

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the generated tokens, [rows, max_new_tokens] int64, NO_TOKEN after the end.

        `tokens` is [rows, length] int32 and `lengths` is [rows] int32. Prompts are padded on the
        left, so that generation starts at the same position in all rows. If an option depends on
        the tokens of a prompt, rows of each length are computed separately, without padding.
        """
        if not self._reads_prompts:
            return self._generate(tokens, lengths)
        generated = tokens.new_empty((len(tokens), self._max_new_tokens), dtype=torch.int64)
        for length in lengths.unique().tolist():
            rows = lengths == length
            generated[rows] = self._generate(tokens[rows, : max(length, 1)], lengths[rows])
        return generated

    def _generate(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        length = tokens.shape[1]
        indices = torch.arange(length, device=tokens.device)[None] - (length - lengths)[:, None]
        real = (indices >= 0) | (lengths == 0)[:, None]
        prompts = tokens.long().gather(1, indices.clamp(min=0).long())
        prompts = torch.where(real, prompts, torch.full_like(prompts, self._pad_id))
        model: Any = self.model
        types = {"token_type_ids": torch.zeros_like(prompts)} if self._has_token_types else {}
        rows = model.generate(
            prompts, attention_mask=real.long(), generation_config=self._generation_config, **types
        )
        shape = (len(tokens), self._max_new_tokens)
        generated = torch.full(shape, NO_TOKEN, device=tokens.device)
        generated[:, : rows.shape[1] - length] = rows[:, length:]
        return self._mask_after_end(generated)

    def _mask_after_end(self, tokens: Tensor) -> Tensor:
        """Replace the first end token of each row, and all tokens after it, by NO_TOKEN."""
        end_ids = torch.tensor(self._end_ids, device=tokens.device, dtype=tokens.dtype)
        has_ended = torch.isin(tokens, end_ids).cumsum(1) > 0
        return tokens.masked_fill(has_ended, NO_TOKEN)


def build_generation_program(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: Path,
    max_new_tokens: int,
    tokenization: Tokenization,
) -> GenerationProgram:
    """Return the program that generates text with the causal model of a folder.

    It stops at the end tokens of the folder's generation_config.json. Without them it stops at
    those of the model, and a folder of an older version of Regauge at the separator, too.
    """
    tokens = LoadedTokenizer(tokenizer).info
    end_ids = read_end_token_ids(folder)
    if not end_ids:
        declared: Any = model.generation_config
        end_ids = list_token_ids(declared.eos_token_id)
        if tokenization.convention == "regauge" and tokens.sep_token_id is not None:
            end_ids = (*end_ids, tokens.sep_token_id)
    has_types = bool(tokenization.has_token_types)
    pad_id = tokens.pad_token_id
    return GenerationProgram(model, max_new_tokens, pad_id, end_ids, has_token_types=has_types)
