"""What an artifact says of itself, as `manifest.json`; nothing here imports torch.

manifest.json        this, with the hash of every other file
weights.safetensors  the program's weights and buffers, in the type that it computes in
model/config.json    its architecture
tokenizer/           how texts become tokens
payload/             what the backend compiled
parity.json          how far its answers are from those of fp32
benchmark.json       how fast each candidate was
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, SerializeAsAny

from regauge.accelerators import Precision
from regauge.backends import Backend, Quantized
from regauge.config import Settings, chosen
from regauge.models.io_spec import Answers, Fields, Input
from regauge.models.sentence_transformers import Pooling, Reads

MANIFEST, WEIGHTS, MODEL, TOKENIZER = "manifest.json", "weights.safetensors", "model", "tokenizer"
PAYLOAD, PARITY, ROWS = "payload", "parity.json", "benchmark.json"
ARTIFACT = "artifact"
"""Folder of an artifact inside of a run's."""
KIND: Final = "regauge artifact"


class Rung(Settings):
    """The batches of one length."""

    length: int = Field(ge=1)
    """Tokens of each row."""
    rows: tuple[int, ...] = Field(min_length=1)
    """How many rows a batch may have, the most first."""


class Target(Settings):
    """The machine that an artifact is for."""

    accelerator: str
    """Kind of its device."""
    needs: tuple[str, ...] = ()
    """Features that it must have."""
    chip: str
    """Name of the device that it was exported on."""
    threads: int = Field(ge=1)
    """Threads of the host for each process."""


class Identity(Settings):
    """The proof that a text's answer does not depend on what it is computed with, bit for bit."""

    chip: str
    """On which device it was shown."""
    texts: int
    """How many texts were computed in every batch size and order."""


class Origin(Settings):
    """Where the weights come from."""

    path: str
    """The run's folder, or the model's."""
    step: str = "final"
    """Which moment of a run."""
    sha256: str
    """Of the weights as they were read."""


class Stored(Settings):
    """A file of an artifact."""

    bytes: int
    """Its size."""
    sha256: str
    """Of its content."""


class Program(Settings):
    """What is computed."""

    answers: Answers
    """What comes out."""
    width: int
    """Numbers of each answer."""
    inputs: tuple[Input, ...]
    """What the program takes."""
    reads: Reads | None = None
    """How texts become tokens, where it reads any."""
    fields: Fields = Fields()
    """What it reads of a record."""
    pooling: Pooling | None = None
    """How tokens become a vector, where they do."""
    labels: tuple[str, ...] = ()
    """Names of the classes, where they have any."""
    module: str | None = None
    """Import path of what makes a module of one's own."""


class Compiled(Settings):
    """How it is computed."""

    precision: Precision
    """In which type."""
    quantized: Quantized = "no"
    """Whether weights and products are integers."""
    backend: Annotated[SerializeAsAny[Backend], chosen("backends")]
    """What compiled it, and computes it."""
    versions: dict[str, str]
    """Of what compiled it."""


class Manifest(Settings):
    """Everything that an artifact says of itself."""

    format: int
    """Version of this document."""
    kind: Literal["regauge artifact"] = KIND
    """What the folder is."""
    program: Program
    """What is computed."""
    compiled: Compiled
    """How it is computed."""
    target: Target
    """Where it may run."""
    shapes: tuple[Rung, ...]
    """The ladder, the shortest first."""
    identity: Identity | None = None
    """The proof that batches of these shapes give equal bits; None where they do not."""
    origin: Origin
    """Where its weights come from."""
    files: dict[str, Stored]
    """Every other file, by its path in the folder."""
