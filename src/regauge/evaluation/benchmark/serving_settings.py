"""Settings of `benchmark --serve`: run file tables. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny, model_validator

from regauge.config import Settings, choice_of
from regauge.data.sources import Source
from regauge.evaluation.benchmark.settings import MachineSettings, Positive, Rate
from regauge.system.expectations import format_value
from regauge.training.settings import Output


class ServerTarget(Settings):
    """Server to measure: an address, or an artifact served for the benchmark."""

    exclusive_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "url": ("artifact", "options"),
        "artifact": ("url",),
    }

    url: str | None = None
    """Address of a running server, such as `http://127.0.0.1:8080`."""
    artifact: str | None = None
    """Artifact for which the benchmark starts `regauge serve`."""
    options: tuple[str, ...] = ()
    """Overrides of `regauge serve`, such as `"serve.workers=2"`."""
    protocol: Literal["auto", "openai", "tei", "completions"] = "auto"
    """Routes to call: OpenAI's `/v1/embeddings` (openai) or `/v1/completions`, or
    text-embeddings-inference's `/embed` (tei).

    The latency of a completion is the time to the first token. Its requests have one text.
    """
    model: str | None = None
    """Model name in requests; default: the first one listed by the server."""
    encoding_format: Literal["float", "base64"] = "float"
    """Vector encoding in answers from OpenAI's route."""
    api_key_variable: str | None = None
    """Environment variable with the server's API key."""
    max_tokens: int = Field(default=64, ge=1)
    """Maximum length of a generated text, in tokens."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Seconds after which a request counts as lost."""
    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """Seconds in which a started server must be ready."""

    @model_validator(mode="after")
    def _check_address(self) -> ServerTarget:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"{format_value(self.url)} is not an address; write it as http://host:port"
            )
        if self.url is not None and self.artifact is not None:
            raise ValueError("url and artifact exclude each other; set one of them")
        return self


class TraceSettings(Settings):
    """Request texts."""

    source: Annotated[SerializeAsAny[Source], choice_of("data/sources")] | None = None
    """Text source; default: docstrings from Python's standard library."""
    count: int = Field(default=2000, ge=1)
    """Number of texts; requests repeat them."""
    processes: int = Field(default=1, ge=1)
    """Sending processes; one sends about 2,000 requests per second."""


class ClientLoop(Settings):
    """Closed loop: each connection sends a request when the previous one is answered."""

    concurrency: tuple[Positive, ...] = Field(default=(1, 8, 64), min_length=1)
    """Connection counts to measure."""
    texts_per_request: tuple[Positive, ...] = Field(default=(1, 8, 32), min_length=1)
    """Texts per request to measure."""
    duration_seconds: float = Field(default=3.0, gt=0)
    """Duration per combination."""
    warmup_seconds: float = Field(default=1.0, ge=0)
    """Seconds of requests before the first measurement."""


class ArrivalSettings(Settings):
    """Open loop: requests arrive at a rate, whether or not earlier ones are answered."""

    arrivals: tuple[Literal["poisson", "burst"], ...] = ("poisson", "burst")
    """Kinds of arrivals: single, or several at once."""
    burst_size: int = Field(default=8, ge=2)
    """Requests per burst."""
    load_fractions: tuple[Rate, ...] = (0.1, 0.5, 0.9)
    """Arrival rates as fractions of the saturation rate."""
    requests_per_second: tuple[Rate, ...] = ()
    """Arrival rates in requests per second."""
    texts_per_request: int = Field(default=1, ge=1)
    """Texts per request, also in the saturation search."""
    duration_seconds: float = Field(default=5.0, gt=0)
    """Duration per rate; low rates need more to get enough requests."""


class SaturationSettings(Settings):
    """Search for the saturation rate: the largest rate that meets the latency objective (SLO)."""

    slo_ms: float = Field(default=100.0, gt=0)
    """Latency objective, and the goodput limit."""
    percentile: Literal[50, 90, 95, 99] = 99
    """Latency percentile to compare with the objective."""
    max_error_fraction: float = Field(default=0.001, ge=0, lt=1)
    """Largest fraction of unanswered requests that still meets the objective."""
    trial_seconds: float = Field(default=3.0, gt=0)
    """Minimum trial duration; slow servers need longer for enough requests."""
    max_trial_seconds: float = Field(default=20.0, gt=0)
    """Limit to which a trial or a slow open loop is extended."""
    precision: float = Field(default=0.1, gt=0, lt=1)
    """Stop the search when the last two rates differ by less than this fraction."""
    max_trials: int = Field(default=14, ge=0)
    """Maximum search trials; 0 skips the search."""


class RegressionGate(Settings):
    """Comparison with an earlier result."""

    baseline: str | None = None
    """An earlier `benchmark.json`, or its folder."""
    max_regression: float = Field(default=0.2, ge=0)
    """Largest permitted p99 latency increase and throughput decrease, as a fraction."""


class ServingBenchmarkSettings(Settings):
    """All server benchmark settings."""

    output: Output
    """Folder for the benchmark document, tables and chart."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed for the arrival times."""
    server: ServerTarget
    """Server to measure."""
    trace: TraceSettings = TraceSettings()
    """Request texts, and the processes that send them."""
    closed_loop: ClientLoop = ClientLoop()
    """Closed-loop connections and request sizes."""
    open_loop: ArrivalSettings = ArrivalSettings()
    """Open-loop arrivals."""
    saturation: SaturationSettings = SaturationSettings()
    """Search for the saturation rate."""
    regression: RegressionGate = RegressionGate()
    """Comparison with an earlier result."""
    execution: MachineSettings = MachineSettings()
    """The server's machine, for its price."""
