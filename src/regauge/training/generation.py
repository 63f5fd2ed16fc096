"""Greedy generation from held-out prompts.

The module that trains computes the completions, in batches of the shape of an evaluation. So
nothing new is compiled, and weights stay sharded. Every token needs a forward pass over whole
rows, without a cache: one microbatch per token.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from regauge.data.batches import build_position_ids
from regauge.data.chat_templates import find_end_token_ids
from regauge.data.tokenizer import LoadedTokenizer
from regauge.models.multitask import set_active_task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from regauge.training.heldout import HeldoutSet
    from regauge.training.settings import Samples

SAMPLES = "samples.jsonl"
"""The file of the output folder with the completions."""


@dataclass
class GeneratedSample:
    """A prompt of a held-out row, the reference and the completion by the model, as token ids."""

    prompt: np.ndarray
    reference: np.ndarray
    """The tokens that follow the prompt in its row."""
    completion: list[int] = field(default_factory=list)
    is_complete: bool = False
    """Whether the model ended the completion with an end token."""


def generate_samples(
    heldout: HeldoutSet, module: nn.Module, options: Samples, dataset: Path
) -> list[dict[str, Any]]:
    """Return prompts, completions and references as texts.

    Every process calls this and gets the same values. `dataset` is the folder with the tokenizer.
    """
    if not options.prompts:
        return []
    tokenizer = LoadedTokenizer(dataset / "tokenizer")
    samples = list(_read_prompts(heldout, options, tokenizer))
    end_ids = find_end_token_ids(dataset / "tokenizer")
    size, _ = heldout.loader.largest_shape
    set_active_task(module, heldout.task_name)
    module.eval()
    with torch.no_grad():
        for start in range(0, len(samples), size):
            batch = samples[start : start + size]
            _generate_batch(heldout, module, batch, options, end_ids)
    return [
        {
            "prompt": tokenizer.decode(sample.prompt.tolist()),
            "completion": tokenizer.decode(sample.completion),
            "is_complete": sample.is_complete,
            "reference": tokenizer.decode(sample.reference[: options.max_new_tokens].tolist()),
        }
        for sample in samples
    ]


def _read_prompts(
    heldout: HeldoutSet, options: Samples, tokenizer: LoadedTokenizer
) -> Iterator[GeneratedSample]:
    """Yield the first held-out rows that have a prompt, as samples without a completion."""
    count = 0
    for row_number in heldout.row_numbers.tolist():
        if count == options.prompts:
            return
        row = heldout.loader.read_row(row_number)
        texts = heldout.task.prompt_and_reference(row, options.prompt_tokens)
        if texts is not None:
            count += 1
            prompt, reference = texts
            if not heldout.task.has_marked_prompts:
                prompt = tokenizer.drop_partial_word(prompt)
            yield GeneratedSample(prompt, reference)


def _generate_batch(
    heldout: HeldoutSet,
    module: nn.Module,
    samples: list[GeneratedSample],
    options: Samples,
    end_ids: tuple[int, ...],
) -> None:
    """Generate the completions of at most one microbatch of samples, in place."""
    size, length = heldout.loader.largest_shape
    arrays = heldout.loader.build_empty_batch(size, length)
    for row, sample in enumerate(samples):
        arrays["tokens"][row, : len(sample.prompt)] = sample.prompt
    active = dict(enumerate(samples))
    while active:
        for row, sample in active.items():
            arrays["segments"][row, : len(sample.prompt) + len(sample.completion)] = 1
        arrays["positions"][:] = build_position_ids(arrays["segments"])
        next_tokens = _predict_next_tokens(heldout, module, arrays)
        for row, sample in list(active.items()):
            position = len(sample.prompt) + len(sample.completion)
            token = int(next_tokens[row, position - 1])
            sample.is_complete = token in end_ids
            if not sample.is_complete:
                sample.completion.append(token)
            is_full = len(sample.completion) == options.max_new_tokens or position + 1 >= length
            if sample.is_complete or is_full:
                del active[row]
            else:
                arrays["tokens"][row, position] = token


def _predict_next_tokens(
    heldout: HeldoutSet, module: nn.Module, arrays: dict[str, np.ndarray]
) -> np.ndarray:
    """Return the most likely next token at every position, [rows, length].

    Every process gets the tokens of process 0. Devices of different kinds might predict different
    tokens, but all processes must finish together.
    """
    host = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    with closing(heldout.accelerator.wrap_loader(iter([[host]]), heldout.device)) as batches:
        (batch,) = next(batches)
    predicted = module(batch)["predicted"]
    heldout.end_microbatch()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(predicted, src=0)
    return np.asarray(predicted.cpu().numpy())
