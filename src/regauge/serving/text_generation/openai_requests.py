"""OpenAI's API requests for text: schemas, and the options they stand for.

An unsupported key that would change the answer is refused. Keys without an effect are accepted.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field

from regauge.models.settings import Generation
from regauge.serving.request_body import RequestBody
from regauge.serving.request_errors import FieldError, TooLargeError

if TYPE_CHECKING:
    from regauge.serving.text_generation.text_version import TextVersion

MAX_STOP_TEXTS = 4
MAX_ANSWERS = 128
"""Maximum answers per request: prompts times `n`."""
SEED_BITS = 32
"""Bits in the seed drawn for a request without one."""
MAX_TOKEN_ID = 2**31
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
}
"""Unsupported field -> values without an effect; null is one as well."""
IGNORED_KEYS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Keys without an effect on the answer."""


class StreamOptions(RequestBody):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    """Whether the last chunk has the token counts."""


class AnswerOptions(RequestBody):
    """Fields of both routes."""

    model_config = ConfigDict(strict=True)

    ignored_keys = IGNORED_KEYS
    neutral_values = NEUTRAL_VALUES

    model: str | None = None
    """Model name; by default the first one that generates text."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens per answer."""
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    """0 generates the most likely tokens."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draws from the smallest set of tokens whose probabilities sum to this number."""
    top_k: int | None = Field(default=None, ge=-1)
    """Draws from this many most likely tokens; 0 or -1 for no limit."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Random seed; without one, answers differ from call to call."""
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP_TEXTS)]
        | None
    ) = None
    """Texts that end an answer."""
    n: int | None = Field(default=None, ge=1, le=MAX_ANSWERS)
    """Answers per prompt."""
    stream: bool | None = None
    """Whether the answer is sent as it is generated."""
    stream_options: StreamOptions | None = None
    """Options of a streamed answer."""

    @property
    def num_answers(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream's last chunk has the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens per answer, if the request limits them."""
        return self.max_tokens

    def build_generation(self, model: TextVersion, prompt: np.ndarray) -> Generation:
        """Return the options for a prompt; temperature 0 makes top_p and top_k ineffective."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens or model.limit_answer(len(prompt)),
            "stop": stop,
            "seed": secrets.randbits(SEED_BITS) if self.seed is None else self.seed % 2**63,
        }
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self.temperature != 0:
            top_k = None if self.top_k is None else max(self.top_k, 0)
            limits = {"top_p": self.top_p, "top_k": top_k}
            options |= {name: value for name, value in limits.items() if value is not None}
        return Generation(**options)


class CompletionRequest(AnswerOptions):
    """Body of `/v1/completions`."""

    prompt: str | list[Any]
    """A text, a list of texts, a list of token ids, or a list of these."""

    def encode_prompts(self, model: TextVersion) -> list[np.ndarray]:
        """Return the tokens of the prompts, each [tokens] int32.

        Raises InvalidRequestError, TooLargeError, or DataError.
        """
        items = [self.prompt] if _is_single(self.prompt) else self.prompt
        if not items:
            raise FieldError("prompt is an empty list", "prompt")
        if len(items) * self.num_answers > MAX_ANSWERS:
            raise TooLargeError(f"a request has at most {MAX_ANSWERS} answers")
        return [_encode_item(item, model) for item in items]


class ChatRequest(AnswerOptions):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """Messages in the conversation."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens per answer; it takes precedence over `max_tokens`."""
    tools: list[dict[str, Any]] | None = None
    """Tools described by the model's template."""
    functions: list[dict[str, Any]] | None = None
    """The older form of `tools`."""
    documents: list[dict[str, Any]] | None = None
    """Documents read by the model's template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Additional template variables."""

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens per answer, if the request limits them."""
        return self.max_completion_tokens or self.max_tokens

    def encode_prompts(self, model: TextVersion) -> list[np.ndarray]:
        """Return the conversation's tokens, [tokens] int32; raises DataError."""
        record: dict[str, Any] = {"messages": self.messages}
        for name in ("tools", "functions", "documents", "chat_template_kwargs"):
            if (value := getattr(self, name)) is not None:
                record[name] = value
        return [model.encode_chat(record)]


def _is_single(prompt: str | list[Any]) -> bool:
    return isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))


def _encode_item(item: Any, model: TextVersion) -> np.ndarray:
    if isinstance(item, str):
        return model.encode_prompt(item)
    if not isinstance(item, list):
        raise FieldError("prompt is not a text or a list of token ids", "prompt")
    for token in item:
        is_id = isinstance(token, int) and not isinstance(token, bool)
        if not is_id or not 0 <= token < MAX_TOKEN_ID:
            raise FieldError("prompt has a token id that is not a valid integer", "prompt")
    return np.array(item, np.int32)
