"""The table `serve` of a run file; this module does not import torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from regauge.config import Settings
from regauge.serving.ray_cluster.ray_settings import RayServing
from regauge.serving.search.search_settings import SearchSettings
from regauge.serving.text_generation.settings import TextServing

MODEL_NAME = re.compile(r"[\w][\w.+-]*(/[\w][\w.+-]*)?")
"""Model name pattern: words, and at most one slash as on the hub."""
Overflow = Literal["refuse", "truncate", "split"]


class HttpSettings(Settings):
    """Connection and request limits."""

    api_keys_file: str | None = None
    """File with one API key per line. Requests must then send `Authorization: Bearer KEY` with one
    of them. Without a file, the variable `REGAUGE_API_KEYS` may hold keys between commas."""
    access_log: bool = False
    """Whether to log each request, and begin each log line with time and level."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests, such as `https://app.example.com`; `*` allows
    all. By default a server on a loopback address also refuses requests to other host names."""
    max_body_bytes: int = Field(default=16 << 20, ge=1)
    """Maximum request body in bytes."""
    max_total_body_bytes: int = Field(default=256 << 20, ge=1)
    """Maximum total of all request bodies in flight, in bytes."""
    max_connections: int = Field(default=4096, ge=1)
    """Maximum open connections; another one closes the oldest idle one, or gets status 503 except
    for health routes."""
    max_address_connections: int = Field(default=1024, ge=1)
    """Maximum open connections per client address, such as that of a proxy."""
    header_timeout_seconds: float = Field(default=10.0, gt=0)
    """Time limit for a connection to send request headers."""
    body_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit for a connection to send a request body."""
    keep_alive_seconds: int = Field(default=75, ge=1)
    """How long an idle connection stays open."""
    drain_seconds: float = Field(default=30.0, gt=0)
    """Time to complete accepted requests after SIGTERM."""


class QueueSettings(Settings):
    """Request admission."""

    timeout_seconds: float = Field(default=30.0, gt=0)
    """Time limit for an accepted request; the header `Regauge-Timeout-Ms` lowers it."""
    max_wait_seconds: float = Field(default=2.0, gt=0)
    """Maximum expected wait; requests that would wait longer are answered with status 429. A longer
    request is computed in slices, within half of its time limit."""
    interactive_records: int = Field(default=4, ge=0)
    """A request with at most this many records is interactive, a larger one is bulk. The header
    `Regauge-Priority` overrides this."""
    max_request_records: int = Field(default=2048, ge=1)
    """Maximum records per request; fewer for a slow model, as `/info` says."""


class WorkerSettings(Settings):
    """Processes that compute batches."""

    count: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", union_mode="left_to_right"
    )
    """Worker processes per model; `auto` starts one per device, or on a CPU as many as the cores
    allow at `threads` each. A CPU generates text with one worker."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads per worker; by default as measured for the artifact. Fewer threads raise CPU
    throughput, and single-record latency."""
    pin_cores: bool = True
    """Whether to bind each of several workers on a CPU to separate cores."""
    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """Time for a worker to load the artifact, warm up and verify the parity rows."""
    hang_timeout_seconds: float = Field(default=20.0, gt=0)
    """Time limit for a batch; a worker that takes longer is replaced, and if time is left, another
    one answers."""
    ray: RayServing | None = None
    """Server replicas on a Ray cluster; each has these workers."""


class ModelSettings(Settings):
    """Loading and replacing a server's artifacts."""

    max_loaded: int | None = Field(default=None, ge=1)
    """Maximum models in memory. Models are then loaded on first request, and the least recently
    used one is unloaded. By default all models are loaded at the start."""
    max_memory_gb: float | None = Field(default=None, gt=0)
    """Maximum memory of all worker processes, in gigabytes; another model replaces unused ones."""
    min_loaded_seconds: float = Field(default=10.0, ge=0)
    """Minimum time for which a model stays loaded before another one replaces it; requests for the
    other one wait."""
    snapshot: bool = True
    """Whether artifact files are copied to the temporary folder before loading, so that overwriting
    them does not change the version that answers. Registry versions are not copied."""
    poll_seconds: float = Field(default=2.0, gt=0)
    """How often an artifact folder or stage is checked for a new version."""
    allow_other_contract: bool = False
    """Whether a new version may have another output kind, width, tokenizer or labels than the one
    that answers, which can break clients."""
    canary_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of requests sent to a new version before it replaces the old one."""
    canary_seconds: float = Field(default=60.0, gt=0)
    """How long a new version must answer requests without an error."""
    canary_requests: int = Field(default=10, ge=1)
    """Minimum requests to answer in this time, or later; until then it only gets its share."""
    custom_modules: tuple[str, ...] = ()
    """Import paths of custom code that artifacts may load, such as `models.py:build`."""


class Serve(Settings):
    """A server for artifacts."""

    artifacts: dict[str, str] = Field(min_length=1)
    """Artifact folders by client-facing name; requests without a name get the first one for their
    route. A value such as `registry/qa@production` follows a model registry stage."""
    host: str = "127.0.0.1"
    """Address to listen on; the default accepts only local clients."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on; 0 selects a free port."""
    overflow: Overflow = "refuse"
    """For a text longer than the model reads: answer with status 413, truncate it, or split it and
    return the mean vector of the parts."""
    item_errors: bool = False
    """Whether to report a failed record in place, in an answer with status 200. Otherwise the whole
    request fails."""
    batch_invariant: bool = False
    """Whether outputs have the same bits in every batch, as computed by `predict`; needs an
    artifact with a proof. Otherwise texts of different lengths share batches, which is faster."""
    http: HttpSettings = HttpSettings()
    """Connection and request limits."""
    queue: QueueSettings = QueueSettings()
    """Request admission."""
    workers: WorkerSettings = WorkerSettings()
    """Processes that compute batches."""
    models: ModelSettings = ModelSettings()
    """Loading and replacing a server's artifacts."""
    search: SearchSettings | None = None
    """The search page at `/`: nearest neighbors among vectors written by `predict`."""
    generation: TextServing = TextServing()
    """How causal models generate text."""

    @field_validator("artifacts")
    @classmethod
    def _check_names(cls, artifacts: dict[str, str]) -> dict[str, str]:
        for name in artifacts:
            if not MODEL_NAME.fullmatch(name):
                raise ValueError(f"invalid model name '{name}'; use letters, digits and . + - _")
        return artifacts


class ServeSettings(Settings):
    """All server settings."""

    serve: Serve
    """A server for artifacts."""
