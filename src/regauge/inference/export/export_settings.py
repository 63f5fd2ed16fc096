"""The run file tables for `export`; does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny, model_validator

from regauge.accelerators import Accelerator, Precision
from regauge.config import Settings, choice_of
from regauge.data.sources import Source
from regauge.inference.backends import Backend, IsaLevel, Quantization
from regauge.models.sentence_transformers import PoolingMode
from regauge.models.tokenizer_convention import MIN_TOKENS

Format = Literal["artifact", "hf", "peft", "torch", "sentence-transformers"]
Goal = Literal["throughput", "latency", "cost"]


class ExportTarget(Settings):
    """The model to export, and the format to write."""

    exclusive_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "run": ("model", "module"),
        "model": ("run", "module"),
        "module": ("run", "model"),
    }

    run: str | None = None
    """Run folder with the model to export."""
    model: str | None = None
    """A transformers or sentence-transformers folder, or a hub name, instead of a run."""
    module: str | None = None
    """Function `module:name` that returns a torch module and example inputs."""
    to: str
    """Folder to write; for the format `torch` a file."""
    format: Format = "artifact"
    """`artifact` compiles the model; `hf` writes a transformers folder; others write weights."""
    step: Literal["final", "latest", "best"] | int = "final"
    """The run's final model, latest or best checkpoint, or the checkpoint at a step."""

    @model_validator(mode="after")
    def _one_origin(self) -> ExportTarget:
        if sum(origin is not None for origin in (self.run, self.model, self.module)) != 1:
            raise ValueError(
                "an export has one origin; set one of export.run, export.model and export.module"
            )
        if self.run is None and self.format != "artifact":
            raise ValueError(
                "only the model of a run has other formats; set export.run, or remove export.format"
            )
        return self


class Candidates(Settings):
    """Candidates to compile; the best one with sufficient quality becomes the artifact."""

    backends: tuple[Annotated[SerializeAsAny[Backend], choice_of("backends")], ...] = ()
    """Backend names, or tables with a kind; by default all usable ones. On CPUs, machine code is
    compiled only if no usable backend writes a graph."""
    precisions: tuple[Precision, ...] = ()
    """Precisions to try; by default fp32, and this machine's faster ones."""
    quantization: tuple[Quantization, ...] = ()
    """Quantizations to try, `none` or `int8`; by default all that a backend supports."""
    threads: tuple[int, ...] = ()
    """CPU threads per process to try; by default `execution.threads`, else the number of cores, or
    OMP_NUM_THREADS if smaller."""
    portable: IsaLevel | None = None
    """Instruction set level to compile for; by default all instructions of this machine."""
    optimize_for: Goal = "throughput"
    """Select by texts per second, by single-text latency, or by cost per text."""
    timing_seconds: float = Field(default=1.0, gt=0)
    """How long to time each candidate's throughput."""
    fast: bool = False
    """Compile one candidate for six lengths; quality and batch invariance are still proved."""


class TextSettings(Settings):
    """How the model reads a text; these override the files in the model folder."""

    pooling: tuple[PoolingMode, ...] = ()
    """Pooling modes for the last hidden states; several are concatenated."""
    normalize: bool | None = None
    """Whether vectors are L2-normalized."""
    max_seq_length: int | None = Field(default=None, ge=MIN_TOKENS)
    """Longest text in tokens; longer texts are truncated and counted."""
    prompts: dict[str, str] = {}
    """Prompts, by name; a prompt is prepended to each text."""
    default_prompt: str | None = None
    """Prompt to use if a caller names none."""
    pair_fields: tuple[str, str] | None = None
    """Two fields for a classifier to read as a text pair; by default it reads a single text."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens per generated text, also in the server; by default that in
    generation_config.json, else 64, and at most half the context."""

    @model_validator(mode="after")
    def _two_fields(self) -> TextSettings:
        if self.pair_fields is not None and len(set(self.pair_fields)) < len(self.pair_fields):
            raise ValueError(f"pair_fields names '{self.pair_fields[0]}' twice; name two fields")
        return self


class BucketSettings(Settings):
    """Batch x length shapes to compile an artifact for."""

    max_batch_tokens: int | None = Field(default=None, ge=8)
    """Maximum tokens per batch (rows times length); by default 2048 on CPUs, else 4096."""
    lengths: tuple[int, ...] = ()
    """Lengths to pad texts to; by default the backend decides."""
    max_batch_size: int = Field(default=256, ge=1)
    """Maximum rows per batch."""


class ParitySettings(Settings):
    """How to compare outputs with fp32, and how much quality they may lose."""

    max_loss: float = Field(default=0.001, ge=0)
    """Largest quality loss against fp32, as a fraction."""
    num_texts: int = Field(default=512, ge=16)
    """Number of texts to compare."""
    source: Annotated[SerializeAsAny[Source], choice_of("data/sources")] | None = None
    """Text source; by default the held-out rows in the run's dataset."""
    metrics: bool = True
    """Whether to compare the run's held-out metrics, too; never for language models."""
    batch_invariance: bool = True
    """Whether to check batch invariance: bitwise equal outputs in every batch."""
    stored_rows: int = Field(default=8, ge=0)
    """How many compared records the artifact stores with their outputs, for a server to reproduce;
    0 stores none."""


class ExportSettings(Settings):
    """All export settings."""

    export: ExportTarget
    """The model to export, and the format to write."""
    candidates: Candidates = Candidates()
    """The candidates to compile."""
    text: TextSettings = TextSettings()
    """How the model reads a text."""
    buckets: BucketSettings = BucketSettings()
    """The shapes to compile."""
    parity: ParitySettings = ParitySettings()
    """Required quality of candidates."""
    accelerator: Annotated[SerializeAsAny[Accelerator], choice_of("accelerators")] | None = None
    """The accelerator; by default this machine's best one."""
