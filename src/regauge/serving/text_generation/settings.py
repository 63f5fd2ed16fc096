"""Settings for the server's text generation: the table `serve.generation`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from regauge.config import Settings


class TextServing(Settings):
    """How the server generates text."""

    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """Library that generates. `auto` is vllm if it is installed and supports the device, else
    transformers."""
    max_running_requests: int = Field(default=32, ge=1)
    """Maximum answers generated together; an eighth is kept for other clients."""
    max_queued_requests: int = Field(default=256, ge=0)
    """Maximum waiting requests; more are refused with status 429."""
    first_token_seconds: float = Field(default=60.0, gt=0)
    """Time limit for the first token of an answer, queueing included; a request that is expected to
    take longer is refused with status 429."""
    token_seconds: float = Field(default=30.0, gt=0)
    """Time limit for each further token. Only the header `Regauge-Timeout-Ms` limits the whole
    answer."""
    kv_cache_tokens: int | None = Field(default=None, ge=16)
    """Maximum key-value cache size in tokens. By default enough for all running requests, but at
    most half of the free memory. Host memory is taken when tokens first need it."""
    max_batch_tokens: int = Field(default=512, ge=16)
    """Maximum tokens per step; a longer prompt is computed in several steps."""
    max_step_seconds: float = Field(default=0.25, gt=0)
    """Time that a step with a part of a prompt should take while answers are generated. Prompts are
    read in slices of this time, or of twice a step without prompts if that is longer."""
    share_prefixes: bool = True
    """Compute equal prompt prefixes once."""
