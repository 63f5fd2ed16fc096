"""Generation from held-out prompts.

The module in training computes the completions, in batches of the evaluation shape. So nothing new
is compiled, and weights stay sharded. Every token needs a forward pass over whole rows, without a
cache: one microbatch per token.
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
from regauge.data.randomness import draw_uniform
from regauge.data.tokenizer import LoadedTokenizer
from regauge.models.modules import CausalLanguageModel
from regauge.models.multitask import modules_by_task, set_active_task
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from regauge.training.heldout import HeldoutSet
    from regauge.training.settings import Samples


@dataclass
class GeneratedSample:
    """Token ids: a held-out row's prompt, its reference, and the model's completion."""

    prompt: np.ndarray
    reference: np.ndarray
    """The tokens after the prompt in its row."""
    completion: list[int] = field(default_factory=list)
    is_complete: bool = False
    """Whether an end token or a stop text ended the completion."""


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
    generator = _SampleGenerator(heldout, module, options, tokenizer, end_ids)
    size, _ = heldout.loader.largest_shape
    set_active_task(module, heldout.task_name)
    module.eval()
    with torch.no_grad():
        for start in range(0, len(samples), size):
            generator.generate(samples[start : start + size], start)
    return [
        {
            "prompt": tokenizer.decode(sample.prompt.tolist()),
            "completion": options.cut_text(tokenizer.decode(sample.completion)),
            "is_complete": sample.is_complete,
            "reference": tokenizer.decode(sample.reference[: options.max_new_tokens].tolist()),
        }
        for sample in samples
    ]


def _read_prompts(
    heldout: HeldoutSet, options: Samples, tokenizer: LoadedTokenizer
) -> Iterator[GeneratedSample]:
    """Yield the first held-out rows with a prompt, as samples without a completion."""
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


class _SampleGenerator:
    def __init__(
        self,
        heldout: HeldoutSet,
        module: nn.Module,
        options: Samples,
        tokenizer: LoadedTokenizer,
        end_ids: tuple[int, ...],
    ) -> None:
        self._heldout = heldout
        self._module = module
        self._options = options
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        part: Any = modules_by_task(module).get(heldout.task_name, module)
        if options.is_sampled and not isinstance(part, CausalLanguageModel):
            problem = f"module {type(part).__name__} cannot draw tokens"
            raise SettingsError(problem, "remove evaluation.samples.temperature")
        part.generation = options

    def generate(self, samples: list[GeneratedSample], first: int) -> None:
        """Complete samples in place; `first` is the number of the first one."""
        size, length = self._heldout.loader.largest_shape
        arrays = self._heldout.loader.build_empty_batch(size, length)
        for row, sample in enumerate(samples):
            arrays["tokens"][row, : len(sample.prompt)] = sample.prompt
        active = dict(enumerate(samples))
        last = np.zeros(size, np.int64)
        for step in range(self._options.max_new_tokens):
            for row, sample in active.items():
                last[row] = len(sample.prompt) + len(sample.completion) - 1
                arrays["segments"][row, : last[row] + 1] = 1
            arrays["positions"][:] = build_position_ids(arrays["segments"])
            tokens = self._predict_tokens(arrays, last, self._draw(size, first, step))
            for row, sample in list(active.items()):
                if self._append(sample, int(tokens[row])) or last[row] + 2 >= length:
                    del active[row]
                else:
                    arrays["tokens"][row, last[row] + 1] = tokens[row]
            if not active:
                break

    def _append(self, sample: GeneratedSample, token: int) -> bool:
        """Add a token to a completion, unless it is an end token; return whether it is whole."""
        sample.is_complete = token in self._end_ids
        if sample.is_complete:
            return True
        sample.completion.append(token)
        if self._options.stop:
            text = self._tokenizer.decode(sample.completion)
            sample.is_complete = self._options.find_stop(text) is not None
        return sample.is_complete

    def _draw(self, rows: int, first: int, step: int) -> np.ndarray | None:
        """Return the random numbers that select each row's next token; None if greedy."""
        if not self._options.is_sampled:
            return None
        return draw_uniform(self._options.seed, 0, first + np.arange(rows), step)

    def _predict_tokens(
        self, arrays: dict[str, np.ndarray], last: np.ndarray, draws: np.ndarray | None
    ) -> np.ndarray:
        """Predict each row's next token, [rows]; `last` are the positions of the last tokens.

        Every process gets process 0's tokens. Devices of different kinds might predict different
        tokens, but all processes must finish together.
        """
        if draws is not None:
            arrays = {**arrays, "draws": draws, "last": last[:, None]}
        heldout = self._heldout
        host = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
        with closing(heldout.accelerator.wrap_loader(iter([[host]]), heldout.device)) as batches:
            (batch,) = next(batches)
        outputs = self._module(batch)
        tokens = outputs["predicted" if draws is None else "drawn"]
        heldout.end_microbatch()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(tokens, src=0)
        values: np.ndarray = tokens.cpu().numpy()
        return values[np.arange(len(last)), last] if draws is None else values
