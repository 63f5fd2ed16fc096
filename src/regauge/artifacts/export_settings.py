"""The tables of a run file that `export` reads; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, model_validator

from regauge.accelerators import Accelerator, Precision
from regauge.backends import Backend, Level, Quantized
from regauge.config import Settings, chosen
from regauge.data.sources import Source
from regauge.models.sentence_transformers import Mode
from regauge.models.tokenizer_convention import FEWEST

Format = Literal["artifact", "hf", "peft", "torch", "sentence-transformers"]
Goal = Literal["throughput", "latency", "usd"]


class Target(Settings):
    """What is exported, and as what."""

    run: str | None = None
    """Output folder of the run whose model is written."""
    model: str | None = None
    """Or a folder of transformers or sentence-transformers, or a hub name."""
    module: str | None = None
    """Or a function of yours, `module:name`, that returns a module and an example of each input."""
    path: str
    """Folder to write; for the format torch a file."""
    format: Format = "artifact"
    """`artifact`: compiled, with its evidence; `hf`: a transformers folder; or another form."""
    step: Literal["final", "latest", "best"] | int = "final"
    """Which moment of the run: its final model, or a checkpoint."""

    @model_validator(mode="after")
    def _one_origin(self) -> Target:
        if sum(each is not None for each in (self.run, self.model, self.module)) != 1:
            raise ValueError("an export has one origin: set one of run, model and module")
        if self.run is None and self.format != "artifact":
            raise ValueError("format is of a run's model: a folder has a form already")
        return self


class Candidates(Settings):
    """What is tried; the best of what keeps the quality becomes the artifact."""

    backends: tuple[Annotated[SerializeAsAny[Backend], chosen("backends")], ...] = ()
    """Names of backends, or tables with a kind; by default all that are usable here."""
    precisions: tuple[Precision, ...] = ()
    """What they compute in; by default what the device is fast in."""
    quantized: tuple[Quantized, ...] = ("no",)
    """Whether weights and products may be integers."""
    threads: tuple[int, ...] = ()
    """CPU threads of each process; by default all cores."""
    portable: Level | None = None
    """Instruction set to compile for; by default all that is here."""
    goal: Goal = "throughput"
    """What the best one has: most texts a second, least wait for one text, least dollars."""
    seconds: float = Field(default=2.0, gt=0)
    """How long each is timed."""


class Text(Settings):
    """How the model reads a text, where its folder does not say it."""

    pooling: tuple[Mode, ...] = ()
    """What is taken of the last hidden states."""
    normalized: bool | None = None
    """Whether vectors have length 1."""
    tokens: int | None = Field(default=None, ge=FEWEST)
    """Most tokens of a text; what is beyond is cut off, and counted."""
    prompts: dict[str, str] = {}
    """Texts to put before a text, by name."""
    prompt: str | None = None
    """Name of the one that is used unless another is named."""
    pair: tuple[str, str] | None = None
    """Two fields that a classifier's folder reads as one text; by default a record is one."""
    answer_tokens: int = Field(default=64, ge=1)
    """Most tokens that a model writes, where it goes on with a text."""

    @model_validator(mode="after")
    def _two_fields(self) -> Text:
        if self.pair is not None and len(set(self.pair)) < len(self.pair):
            raise ValueError(f"pair names '{self.pair[0]}' twice")
        return self


class Shapes(Settings):
    """The batches that an artifact is made for."""

    tokens: int = Field(default=4096, ge=8)
    """Tokens of a batch, about: its length times its rows."""
    lengths: tuple[int, ...] = ()
    """Lengths that texts are padded to; by default chosen for the backend."""
    rows: int = Field(default=256, ge=1)
    """Most rows of a batch."""


class Proof(Settings):
    """What answers are compared on, and how much they may lose."""

    bound: float = Field(default=0.001, ge=0)
    """Share of the quality that may be lost against fp32."""
    texts: int = Field(default=512, ge=16)
    """Texts that are compared."""
    source: Annotated[SerializeAsAny[Source], chosen("data/sources")] | None = None
    """Where they come from; by default the held-out rows of the run's dataset."""
    metrics: Literal["auto", "no"] = "auto"
    """Whether the run's own metrics are measured on its held-out rows; of what writes, never."""
    invariant: bool = True
    """Whether it is found out in which batches a text keeps its bits."""


class Exporting(Settings):
    """Everything about an export."""

    target: Target
    """What is exported, and as what."""
    candidates: Candidates = Candidates()
    """What is tried."""
    text: Text = Text()
    """How the model reads a text."""
    shapes: Shapes = Shapes()
    """The batches that it is made for."""
    proof: Proof = Proof()
    """What it has to keep."""
    accelerator: Annotated[SerializeAsAny[Accelerator], chosen("accelerators")] | None = None
    """The device; by default the fittest of this machine."""
