"""Settings of `benchmark --serve`: tables of a run file. This module imports no torch."""

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
    """The server to measure: an address, or an artifact that is served for the benchmark."""

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
    protocol: Literal["auto", "openai", "tei"] = "auto"
    """Routes that are called: OpenAI's `/v1/embeddings` or text-embeddings-inference's `/embed`."""
    model: str | None = None
    """Model name in requests; by default the first one that the server lists."""
    encoding_format: Literal["float", "base64"] = "float"
    """Vector encoding in answers from OpenAI's route."""
    api_key_variable: str | None = None
    """Environment variable with the key of the server."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Time after which a request is counted as lost."""
    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """Time in which a started server must be ready."""

    @model_validator(mode="after")
    def _check_address(self) -> ServerTarget:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"{format_value(self.url)} is no address; write it as http://host:port"
            )
        if self.url is not None and self.artifact is not None:
            raise ValueError("url and artifact exclude each other; set one of them")
        return self


class TraceSettings(Settings):
    """The texts of the requests."""

    source: Annotated[SerializeAsAny[Source], choice_of("data/sources")] | None = None
    """Text source; by default docstrings from Python's standard library."""
    count: int = Field(default=2000, ge=1)
    """Number of texts; requests repeat them."""
    processes: int = Field(default=1, ge=1)
    """Processes that send the requests; one sends about 2,000 requests per second."""


class ClientLoop(Settings):
    """Closed loop: each of some connections sends a request when its last one is answered."""

    concurrency: tuple[Positive, ...] = Field(default=(1, 8, 64), min_length=1)
    """Connection counts to measure."""
    texts_per_request: tuple[Positive, ...] = Field(default=(1, 8, 32), min_length=1)
    """Texts per request to measure."""
    duration_seconds: float = Field(default=3.0, gt=0)
    """Duration per combination."""
    warmup_seconds: float = Field(default=1.0, ge=0)
    """Duration of the requests before the first measurement."""


class ArrivalSettings(Settings):
    """Open loop: requests arrive at a rate, whether or not earlier ones are answered."""

    arrivals: tuple[Literal["poisson", "burst"], ...] = ("poisson", "burst")
    """Kinds of arrivals: single ones, or several at the same time."""
    burst_size: int = Field(default=8, ge=2)
    """Requests per burst."""
    load_fractions: tuple[Rate, ...] = (0.1, 0.5, 0.9)
    """Arrival rates as fractions of the saturation rate."""
    requests_per_second: tuple[Rate, ...] = ()
    """Rates in requests per second."""
    texts_per_request: int = Field(default=1, ge=1)
    """Texts per request, also in the saturation search."""
    duration_seconds: float = Field(default=5.0, gt=0)
    """Duration per rate; low rates need more to get enough requests."""


class SaturationSettings(Settings):
    """Search of the saturation rate: the largest rate that meets the latency objective (SLO)."""

    slo_ms: float = Field(default=100.0, gt=0)
    """Latency objective; also the limit of the goodput."""
    percentile: Literal[50, 90, 95, 99] = 99
    """Latency percentile that must meet the objective."""
    max_error_fraction: float = Field(default=0.001, ge=0, lt=1)
    """Largest fraction of unanswered requests at a rate that meets the objective."""
    trial_seconds: float = Field(default=3.0, gt=0)
    """Shortest duration of a trial; slow servers need more for enough requests."""
    max_trial_seconds: float = Field(default=20.0, gt=0)
    """Longest duration that a trial or an open loop at a low rate is extended to."""
    precision: float = Field(default=0.1, gt=0, lt=1)
    """Difference between the last two rates of the search, as a fraction."""
    max_trials: int = Field(default=14, ge=0)
    """Maximum search trials; 0 skips the search."""


class RegressionGate(Settings):
    """Comparison with an earlier result."""

    baseline: str | None = None
    """An earlier `benchmark.json`, or its folder."""
    max_regression: float = Field(default=0.2, ge=0)
    """Largest permitted p99 latency increase and throughput decrease, as a fraction."""


class ServingBenchmarkSettings(Settings):
    """All settings of a benchmark of a server."""

    output: Output
    """Folder of the benchmark document, its tables and its chart."""
    seed: int = Field(default=0, ge=0)
    """Seed for the arrival times."""
    server: ServerTarget
    """The server to measure."""
    trace: TraceSettings = TraceSettings()
    """The texts of the requests, and the processes that send them."""
    closed_loop: ClientLoop = ClientLoop()
    """Connections and request sizes of the closed loop."""
    open_loop: ArrivalSettings = ArrivalSettings()
    """Arrivals of the open loop."""
    saturation: SaturationSettings = SaturationSettings()
    """Search of the saturation rate."""
    regression: RegressionGate = RegressionGate()
    """Comparison with an earlier result."""
    execution: MachineSettings = MachineSettings()
    """Machine of the server, for its price."""
