"""Text generation by vLLM, for the devices it supports.

Written from vLLM's documentation. Draws come from vLLM's own generators, so answers sampled with a
seed differ from those of `regauge generate`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from regauge.serving.text_generation.text_requests import EngineLimits, TextEngine, TokenEvent
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.accelerators import Accelerator
    from regauge.models.generation.text_generation import GenerationProgram
    from regauge.serving.text_generation.settings import TextServing
    from regauge.serving.text_generation.text_requests import TextRequest

PACKAGE = "vllm"


def find_obstacle(accelerator: Accelerator) -> str | None:
    """Return why vLLM cannot generate on an accelerator, or None."""
    if PACKAGE not in accelerator.generation_engines:
        return f"it does not run on the accelerator '{accelerator.kind}'"
    if importlib.util.find_spec(PACKAGE) is None:
        return "the package vllm is not installed"
    return None


def check_usable(accelerator: Accelerator) -> None:
    """Raise SettingsError if vLLM cannot generate on an accelerator."""
    if obstacle := find_obstacle(accelerator):
        remedy = 'set serve.generation.engine = "transformers"'
        raise SettingsError(f'serve.generation.engine = "vllm": {obstacle}', remedy)


class VllmTextEngine(TextEngine):
    """A text engine on vLLM's `LLMEngine`, which schedules and samples by itself."""

    def __init__(self, program: GenerationProgram, folder: Path, settings: TextServing) -> None:
        """Load a model saved in transformers format."""
        vllm: Any = importlib.import_module(PACKAGE)
        options = vllm.EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=str(program.model.dtype).removeprefix("torch."),
            max_num_seqs=settings.max_running_requests,
            enable_prefix_caching=settings.share_prefixes,
        )
        self._vllm = vllm
        self._engine: Any = vllm.LLMEngine.from_engine_args(options)
        self._end_ids = frozenset(program.end_ids)
        self._running: set[str] = set()
        config = self._engine.model_config
        super().__init__(
            EngineLimits(
                config.max_model_len, config.get_vocab_size(), settings.max_running_requests
            )
        )

    @property
    def num_running(self) -> int:
        """Number of requests in vLLM."""
        return len(self._running)

    def _start(self, request: TextRequest) -> None:
        generation = request.generation
        parameters = self._vllm.SamplingParams(
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k or -1,
            seed=generation.seed + request.number if generation.is_sampled else None,
            max_tokens=request.max_new_tokens,
            stop_token_ids=list(self._end_ids),
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request.prompt.tolist()}
        self._engine.add_request(request.request_id, prompt, parameters)
        self._running.add(request.request_id)

    def _cancel_running(self, request_id: str) -> None:
        if request_id in self._running:
            self._engine.abort_request([request_id])
            self._running.discard(request_id)
            self._end(request_id, "cancelled")

    def _compute(self) -> None:
        while self._waiting:
            self._start(self._waiting.pop(next(iter(self._waiting))))
        for output in self._engine.step() if self._running else []:
            if output.request_id not in self._running:
                continue
            completion = output.outputs[0]
            tokens = [token for token in completion.token_ids if token not in self._end_ids]
            self._events += [TokenEvent(output.request_id, token) for token in tokens]
            if output.finished:
                self._running.discard(output.request_id)
                is_length = completion.finish_reason == "length"
                self._end(output.request_id, "length" if is_length else "stop")

    def close(self) -> None:
        """Release vLLM's engine."""
        super().close()
        self._engine = None
