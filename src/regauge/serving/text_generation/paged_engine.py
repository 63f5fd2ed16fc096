"""Continuous batching with transformers: requests join and leave a batch at every step.

transformers schedules the requests, manages the key-value cache pages and runs the model. It is
driven step by step here, without the thread it would start. Attention and sampling come from
`paged_attention` and `request_sampler`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.model_runner import (
    infer_max_single_request_tokens,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
    get_device_and_memory_breakdown,
)

from regauge.inference.export.engine import NON_FINITE
from regauge.models.generation.text_generation import find_generation_limit
from regauge.serving.text_generation.kv_memory import MappedZeros, count_blocks, limit_prefixes
from regauge.serving.text_generation.paged_attention import NAME
from regauge.serving.text_generation.prompt_slices import PromptSlices
from regauge.serving.text_generation.request_sampler import (
    RequestSampler,
    SampledRequest,
    list_tokens,
)
from regauge.serving.text_generation.text_requests import EngineLimits, TextEngine, TokenEvent
from regauge.system.errors import first_line

if TYPE_CHECKING:
    from regauge.models.generation.text_generation import GenerationProgram
    from regauge.serving.text_generation.settings import TextServing
    from regauge.serving.text_generation.text_requests import FinishReason, TextRequest

PAGE_TOKENS = 32
"""Tokens per key-value cache page."""
UNLIMITED_TOKENS = 4096
"""Tokens per request that the cache is sized for if the model does not set a limit."""
MEMORY_SHARE = 0.5
"""Maximum share of the free memory for a cache of default size."""
MAX_FAILURES = 3
"""How many requests may fail in a row before the engine itself counts as broken."""
STEP_ERRORS = (RuntimeError, MemoryError, ValueError, IndexError)
"""Step errors that a single request may have caused."""
PLAIN_ATTENTION = "eager"
"""Attention without graph capture in transformers, as the sampler runs Python at each step."""
LIBRARY_LOGGER = "ContinuousBatchingLogger"
"""A transformers logger with a separate handler, which reports each start."""


class NoOutputs:
    """Takes the results reported by transformers; tokens are read from the batch instead."""

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Do nothing."""


class PagedTextEngine(TextEngine):
    """A text engine on transformers' continuous batching."""

    def __init__(self, program: GenerationProgram, settings: TextServing) -> None:
        """Take an artifact's program on the device, and build the cache.

        Raises ValueError or RuntimeError if transformers does not support the architecture.
        """
        self._program = program
        self._model: Any = program.model
        self._end_ids = frozenset(program.end_ids)
        self._max_running = settings.max_running_requests
        self.sampler = RequestSampler(self._model.device)
        """Selects the tokens; it holds the running requests."""
        max_tokens = max(settings.max_batch_tokens, settings.max_running_requests)
        self._slices = PromptSlices(max_tokens, settings.max_step_seconds)
        self._suspects: deque[Any] = deque()
        self._trial: str | None = None
        self._num_failures = 0
        limit = find_generation_limit(self._model)
        self._attention = self._model.config._attn_implementation  # noqa: SLF001 - no public name
        self._processor: Any = self._build_processor(settings, limit)
        capacity = infer_max_single_request_tokens(self._processor.cache)
        self._max_tokens = min(capacity, limit or capacity)
        super().__init__(EngineLimits(self._max_tokens, program.vocabulary, self._max_running))

    def _build_processor(self, settings: TextServing, limit: int | None) -> Any:
        """Return transformers' batch processor with Regauge's attention and sampler."""
        logging.getLogger(LIBRARY_LOGGER).setLevel(logging.WARNING)
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=-(-self._count_cache_tokens(settings, limit) // PAGE_TOKENS),
            max_batch_tokens=max(settings.max_batch_tokens, settings.max_running_requests),
            max_requests_per_batch=settings.max_running_requests,
            max_blocks_per_request=0,
            allow_block_sharing=settings.share_prefixes,
            use_async_batching=False,
            auto_switch_to_flash=False,
        )
        options = GenerationConfig(do_sample=False, eos_token_id=list(self._end_ids) or -1)
        self._model.set_attn_implementation(PLAIN_ATTENTION)
        manager = self._model.init_continuous_batching(options, config)
        manager.logit_processor = self.sampler
        manager.output_router = NoOutputs()
        self._model.set_attn_implementation(NAME)
        with MappedZeros():
            return manager._create_batch_processor()  # noqa: SLF001 - the loop without its thread

    def _count_cache_tokens(self, settings: TextServing, limit: int | None) -> int:
        """Return the cache size in tokens: as set, or for all requests within half the memory."""
        if settings.kv_cache_tokens is not None:
            return settings.kv_cache_tokens
        config = self._model.config.get_text_config()
        heads, width = find_num_key_value_heads(config), find_head_dim(config)
        token_bytes = 2 * config.num_hidden_layers * heads * width * self._model.dtype.itemsize
        _, total, reserved, allocated = get_device_and_memory_breakdown()
        fitting = int((total - max(reserved, allocated)) * MEMORY_SHARE / token_bytes)
        needed = settings.max_running_requests * ((limit or UNLIMITED_TOKENS) + PAGE_TOKENS)
        return max(PAGE_TOKENS, min(fitting, needed))

    @property
    def num_running(self) -> int:
        return len(self.sampler.requests)

    @property
    def cache_blocks(self) -> tuple[int, int]:
        return (0, 0) if self._processor is None else count_blocks(self._processor.cache)

    @property
    def prompt_token_seconds(self) -> float:
        return self._slices.token_seconds

    def _cancel_running(self, request_id: str) -> None:
        if request_id in self.sampler.requests:
            self._end_running(request_id, "cancelled")

    def _compute(self) -> None:
        """Compute the running requests' next token.

        If a request's computation fails, the others are recomputed. Raises the error if several
        requests in a row fail.
        """
        self._admit()
        if self._processor.scheduler.has_pending_requests():
            try:
                self._compute_batch()
            except STEP_ERRORS as error:
                self._isolate(error)

    def close(self) -> None:
        """Release the cache and restore the model's attention."""
        super().close()
        self.sampler.requests.clear()
        self._processor = None
        self._model.set_attn_implementation(self._attention)

    @torch.no_grad()
    def compute_logits(self, tokens: list[int]) -> torch.Tensor:
        """Return a text's logits, computed without a cache, [tokens, vocabulary] fp32."""
        self._model.set_attn_implementation(self._attention)
        try:
            ids = torch.tensor([tokens], device=self._model.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self._model.set_attn_implementation(NAME)
        return logits

    def _admit(self) -> None:
        """Start waiting requests while there is room; suspects are recomputed one by one."""
        scheduler = self._processor.scheduler
        if self._trial is None and self._suspects:
            state = self._suspects.popleft()
            self._trial = state.request_id
            scheduler.add_waiting_request(state)
        while self._waiting and self._trial is None and self.num_running < self._max_running:
            request = self._waiting.pop(next(iter(self._waiting)))
            self.sampler.requests[request.request_id] = self._prepare(request)
            state = RequestState(
                request_id=request.request_id,
                initial_tokens=request.prompt.tolist(),
                max_new_tokens=request.max_new_tokens,
                eos_token_id=list(self._end_ids),
            )
            scheduler.add_waiting_request(state)

    def _prepare(self, request: TextRequest) -> SampledRequest:
        draws = request.draw() if request.generation.is_sampled else None
        prompt = torch.from_numpy(request.prompt.astype("int64"))[None].to(self._model.device)
        return SampledRequest(request, draws, self._program.build_processors(prompt))

    def _compute_batch(self) -> None:
        start = time.perf_counter()
        active = self._processor.scheduler.active_requests.values()
        num_answers = sum(state.status == RequestStatus.DECODING for state in active)
        self._processor.max_batch_tokens = self._slices.count_tokens(num_answers)
        if not self._processor.prepare_next_batch():
            return
        self._processor._generation_step(self._model)  # noqa: SLF001 - the loop without its thread
        failed = {self.sampler.states[row].request_id for row in self.sampler.failed_rows}
        self._processor.update_batch()
        for state in self.sampler.states:
            self._record(state, is_failed=state.request_id in failed)
        limit_prefixes(self._processor.cache, self._max_tokens)
        num_prompt_tokens = self._processor.inputs_and_outputs.num_q_tokens - num_answers
        self._slices.record_step(num_answers, num_prompt_tokens, time.perf_counter() - start)

    def _record(self, state: Any, *, is_failed: bool) -> None:
        request_id, token = state.request_id, state.generated_tokens[-1]
        if request_id == self._trial:
            self._trial = None
        if is_failed:
            self._end_running(request_id, "error", NON_FINITE)
            return
        self._num_failures = 0
        is_end = token in self._end_ids
        if not is_end:
            self._events.append(TokenEvent(request_id, token))
        prompt = self.sampler.requests[request_id].request.prompt
        is_end = is_end or self._program.is_stopped(list_tokens(state)[len(prompt) :])
        if is_end or state.status == RequestStatus.FINISHED:
            self._end_running(request_id, "stop" if is_end else "length")

    def _end_running(self, request_id: str, reason: FinishReason, message: str = "") -> None:
        """Forget a running request and free its memory."""
        del self.sampler.requests[request_id]
        if request_id == self._trial:
            self._trial = None
        self._suspects = deque(state for state in self._suspects if state.request_id != request_id)
        self._remove([request_id])
        self._end(request_id, reason, message)

    def _remove(self, request_ids: list[str]) -> list[Any]:
        """Remove requests from the scheduler; return the states of those it had."""
        scheduler = self._processor.scheduler
        for request_id in request_ids:
            scheduler.set_request_cancellation(request_id)
        states: list[Any] = scheduler.clear_cancelled_requests()
        scheduler.block_new_requests = False  # it is set until a request ends by itself
        return states

    def _isolate(self, error: Exception) -> None:
        """Find the request that made a step fail, by recomputing the requests one by one.

        The answers so far become parts of the prompts. A request that fails alone, or on joining
        others that did not fail before, ends with an error.
        """
        states = self._remove(list(self.sampler.requests))
        blamed = self._trial or (states[0].request_id if len(states) == 1 else None)
        self._suspects.extend(
            state.create_equivalent_initial_request()
            for state in states
            if state.request_id != blamed
        )
        if blamed is None:
            return
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            raise error
        self._end_running(blamed, "error", first_line(error))
