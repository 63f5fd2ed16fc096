"""The causal model program: text generation with transformers' `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria

from regauge.data.tokenizer import LoadedTokenizer
from regauge.models.attention_masks import detect_attention_spec, max_text_tokens
from regauge.models.generation.generation_config import list_token_ids, read_end_token_ids
from regauge.models.generation.sampling import FiniteCheck, TokenSampler
from regauge.models.settings import Generation
from regauge.system.errors import SettingsError, first_line
from regauge.system.hub import GENERATION_CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from regauge.models.sentence_transformers import Tokenization

NO_TOKEN = -1
"""Fills generated rows after the end of the text."""
PROMPT_OPTIONS: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
}
"""Generation options that also read padding, with their neutral values."""
ASSISTING_OPTIONS = ("prompt_lookup_num_tokens", "assistant_early_exit")
"""Generation options that guess tokens, for one prompt at a time; they do not change the answer."""
MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
"""Ways of generation that `generate` supports for batches."""


def find_generation_limit(model: PreTrainedModel) -> int | None:
    """Return the maximum tokens of a prompt with its answer; None if unlimited.

    Raises SettingsError if the model is not causal.
    """
    spec = detect_attention_spec(model, packs_texts=False)
    if not spec.is_causal:
        problem = f"architecture '{model.config.model_type}' is not causal"
        raise SettingsError(problem, "choose a causal one, such as llama or gpt2")
    return max_text_tokens(model, spec)


class GenerationProgram(nn.Module):
    """Generation with transformers' `generate` and a key-value cache.

    The other options in the model's generation configuration apply, such as a repetition penalty;
    beams apply only if no token is drawn. Options that only save time, such as prompt lookup, are
    ignored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_new_tokens: int,
        pad_id: int,
        end_ids: tuple[int, ...],
        *,
        has_token_types: bool = False,
        tokenizer: Path | None = None,
    ) -> None:
        """Take a model and its special tokens; `tokenizer` is the folder for stop texts.

        Raises SettingsError if the model declares a way of generation that is not supported.
        """
        super().__init__()
        self.model = model
        self.options = Generation(max_new_tokens=max_new_tokens)
        """How texts are generated; it may change between calls."""
        self.on_step: Callable[[list[int]], None] | None = None
        """Called after each step with the first row's new tokens."""
        self._has_token_types = has_token_types
        self.end_ids = end_ids
        """Tokens that end a text."""
        self._pad_id = pad_id
        self._tokenizer_folder = tokenizer
        self._tokenizer: LoadedTokenizer | None = None
        declared: Any = model.generation_config
        for name in ASSISTING_OPTIONS:
            setattr(declared, name, None)
        self._has_beams = (declared.num_beams or 1) > 1
        stops, declared.stop_strings = declared.stop_strings or (), None
        self._stop_strings = (stops,) if isinstance(stops, str) else tuple(stops)
        mode = declared.get_generation_mode()
        if mode not in MODES or (self._stop_strings and self._has_beams):
            problem = f"{GENERATION_CONFIG} asks for {mode.value.replace('_', ' ')}"
            problem += " with stop_strings" if mode in MODES else ""
            raise SettingsError(f"{problem}, which is not supported", "remove the option there")
        self._reads_prompts = any(
            getattr(declared, name, None) not in {None, neutral}
            for name, neutral in PROMPT_OPTIONS.items()
        )

    def forward(self, tokens: Tensor, lengths: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the generated tokens, [rows, max_new_tokens] fp32, NO_TOKEN after the end.

        A row is NaN if its largest logit is not finite before the end. `tokens` is [rows, length]
        int32 and `lengths` is [rows] int32. `draws`, [rows, max_new_tokens] fp32, has the numbers
        that select tokens, if they are drawn. Prompts are padded on the left, so that generation
        starts at the same position in all rows. If an option depends on the prompt tokens, rows of
        each length are computed separately, without padding. If tokens are also drawn, each of
        these rows is computed alone.
        """
        if not self._reads_prompts:
            return self._generate(tokens, lengths, draws)
        shape = (len(tokens), self._max_new_tokens)
        generated = torch.full(shape, float(NO_TOKEN), device=tokens.device)
        for rows in self._group_rows(lengths):
            length = max(int(lengths[rows][0]), 1)
            row_draws = None if draws is None else draws[rows]
            generated[rows] = self._generate(tokens[rows, :length], lengths[rows], row_draws)
        return generated

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model reads."""
        table: Any = self.model.get_input_embeddings()
        return int(table.weight.shape[0])

    @property
    def batching_obstacle(self) -> str | None:
        """The reason why rows cannot join and leave a batch at any step, or None."""
        if self._has_beams:
            return "the generation configuration has beams"
        return "the model reads token types" if self._has_token_types else None

    def build_processors(self, prompt: Tensor) -> Any | None:
        """Return `generate`'s logits processors for a prompt, [1, length] int64.

        They follow the generation configuration, without sampling; None if there are none.
        """
        model: Any = self.model  # `generate` has no public part that does this
        config, _ = model._prepare_generation_config(self._build_config())  # noqa: SLF001
        model._prepare_special_tokens(config, device=prompt.device)  # noqa: SLF001
        processors = model._get_logits_processor(  # noqa: SLF001
            config,
            input_ids_seq_length=prompt.shape[1],
            encoder_input_ids=prompt,
            device=prompt.device,
        )
        return processors or None

    @property
    def _max_new_tokens(self) -> int:
        return self.options.max_new_tokens or 1

    def _group_rows(self, lengths: Tensor) -> Iterator[Tensor]:
        if self.options.is_sampled:  # so that no other row changes the shape of the batch
            yield from torch.arange(len(lengths), device=lengths.device).split(1)
        else:
            yield from ((lengths == length).nonzero()[:, 0] for length in lengths.unique().tolist())

    def _generate(self, tokens: Tensor, lengths: Tensor, draws: Tensor | None) -> Tensor:
        length = tokens.shape[1]
        indices = torch.arange(length, device=tokens.device)[None] - (length - lengths)[:, None]
        real = (indices >= 0) | (lengths == 0)[:, None]
        prompts = tokens.long().gather(1, indices.clamp(min=0).long())
        prompts = torch.where(real, prompts, torch.full_like(prompts, self._pad_id))
        check = FiniteCheck(len(tokens))
        more: dict[str, Any] = {"logits_processor": [check]}
        if self._has_token_types:
            more["token_type_ids"] = torch.zeros_like(prompts)
        if self.options.is_sampled:
            if draws is None:
                raise TypeError("a program that samples needs draws")
            more["logits_processor"].append(TokenSampler(self.options, draws, length))
        monitor = self._build_monitor(lengths, length)
        if monitor is not None:
            more["stopping_criteria"] = [monitor]
        model: Any = self.model
        more |= {"attention_mask": real.long(), "generation_config": self._build_config()}
        try:
            rows = model.generate(prompts, **more)
        except (AssertionError, ImportError, ValueError) as error:
            problem = f"transformers cannot generate: {first_line(error)}"
            raise SettingsError(problem, f"correct the options in {GENERATION_CONFIG}") from error
        shape = (len(tokens), self._max_new_tokens)
        generated = torch.full(shape, NO_TOKEN, device=tokens.device)
        generated[:, : rows.shape[1] - length] = rows[:, length:]
        for row, count in (monitor.stop_lengths if monitor else {}).items():
            generated[row, count:] = NO_TOKEN
        generated = self._mask_after_end(generated)
        is_failed = check.find_failed(generated != NO_TOKEN)
        return generated.float().masked_fill(is_failed[:, None], torch.nan)

    def _build_config(self) -> GenerationConfig:
        beams = {"num_beams": 1} if self.options.is_sampled else {}
        return GenerationConfig(
            max_new_tokens=self._max_new_tokens,
            do_sample=False,  # `TokenSampler` draws
            num_return_sequences=1,
            return_dict_in_generate=False,
            pad_token_id=self._pad_id,
            eos_token_id=list(self.end_ids) or None,
            use_cache=True,
            **beams,
        )

    def _build_monitor(self, lengths: Tensor, prompt_length: int) -> GenerationMonitor | None:
        """Return the monitor of a batch; None if it would have nothing to do, or with beams."""
        has_stops = self.options.stop or self._stop_strings
        is_needed = has_stops or self.on_step or bool((lengths == 0).any())
        if not is_needed or (self._has_beams and not self.options.is_sampled):
            return None
        return GenerationMonitor(self, lengths, prompt_length)

    def is_stopped(self, tokens: list[int], stops: tuple[str, ...] = ()) -> bool:
        """Return whether an answer has one of some stop texts, or of the model's own.

        The model's own stop texts are part of an answer.
        """
        stops += self._stop_strings
        return bool(stops) and any(map(self.decode(tokens).__contains__, stops))

    def decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            if self._tokenizer_folder is None:
                raise TypeError("a program without a tokenizer has no stop texts")
            self._tokenizer = LoadedTokenizer(self._tokenizer_folder)
        return self._tokenizer.decode(tokens)

    def _mask_after_end(self, tokens: Tensor) -> Tensor:
        """Replace the first end token of each row, and all tokens after it, by NO_TOKEN."""
        end_ids = torch.tensor(self.end_ids, device=tokens.device, dtype=tokens.dtype)
        has_ended = torch.isin(tokens, end_ids).cumsum(1) > 0
        return tokens.masked_fill(has_ended, NO_TOKEN)


class GenerationMonitor(StoppingCriteria):
    """Ends rows at stop texts, and empty rows at once; reports the tokens of the first row."""

    def __init__(self, program: GenerationProgram, lengths: Tensor, prompt_length: int) -> None:
        self._program = program
        self._prompt_length = prompt_length
        self._has_ended = lengths == 0
        self._active = set((~self._has_ended).nonzero()[:, 0].tolist())
        self.stop_lengths: dict[int, int] = {}
        """Row -> new tokens up to the one that completes a stop text."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Return whether each row has ended, [rows] bool."""
        del scores
        generated = input_ids[:, self._prompt_length :]
        if self._program.on_step is not None and 0 in self._active:
            self._program.on_step(generated[0].tolist())
        for row in sorted(self._active):
            tokens = generated[row].tolist()
            if tokens[-1] in self._program.end_ids:
                self._active.discard(row)
            elif self._program.is_stopped(tokens, self._program.options.stop):
                self._active.discard(row)
                self.stop_lengths[row] = len(tokens)
                self._has_ended[row] = True
        return self._has_ended


def build_generation_program(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: Path,
    max_new_tokens: int,
    tokenization: Tokenization,
) -> GenerationProgram:
    """Return the text generation program for a folder's causal model.

    It stops at the end tokens in generation_config.json. Without them it stops at the model's, and
    for a folder from an older Regauge version at the separator, too.
    """
    tokens = LoadedTokenizer(tokenizer).info
    end_ids = read_end_token_ids(folder)
    if not end_ids:
        declared: Any = model.generation_config
        end_ids = list_token_ids(declared.eos_token_id)
        if tokenization.convention == "regauge" and tokens.sep_token_id is not None:
            end_ids = (*end_ids, tokens.sep_token_id)
    return GenerationProgram(
        model,
        max_new_tokens,
        tokens.pad_token_id,
        end_ids,
        has_token_types=bool(tokenization.has_token_types),
        tokenizer=tokenizer,
    )
