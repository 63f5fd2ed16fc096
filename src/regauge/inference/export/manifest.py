"""The manifest of an artifact, `manifest.json`; this module imports no torch.

    manifest.json        the manifest
    weights.safetensors  the program's weights and buffers, in the dtype of its computation
    model/config.json    the architecture
    model/dataset.json   the manifest of the dataset, for a trained custom module
    tokenizer/           the tokenizer
    payload/             the compiled program, as the backend wrote it
    parity.json          the row of the best candidate: its quality loss and its speed
    benchmark.json       the rows of all candidates
    parity_rows.*        a few records with the outputs of the compiled program
    bucket_times.json    the milliseconds of batches by their shapes

The manifest lists every other file with its size and hash.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, SerializeAsAny

from regauge.accelerators import Precision
from regauge.config import Settings, choice_of
from regauge.inference.backends import Backend, Quantization
from regauge.models.io_spec import InputSpec, OutputKind, TensorSpec, build_draws_spec
from regauge.models.sentence_transformers import HeadActivation, Pooling, Tokenization
from regauge.models.settings import GREEDY, Generation
from regauge.models.tokenizer_convention import MIN_TOKENS
from regauge.system.errors import SettingsError

MANIFEST, WEIGHTS, MODEL, TOKENIZER = "manifest.json", "weights.safetensors", "model", "tokenizer"
DATASET_FILE = "dataset.json"
PAYLOAD, PARITY = "payload", "parity.json"
BUCKET_TIMES = "bucket_times.json"
PARITY_ROWS, PARITY_TENSORS = "parity_rows.json", "parity_rows.safetensors"
ARTIFACT = "artifact"
"""Subfolder of an artifact in the output folder of a run."""
KIND: Final = "regauge artifact"
Dtype = Literal["float16", "float32", "int8", "binary"]
"""Types that output vectors can be converted to."""


class Bucket(Settings):
    """The batch shapes of one length."""

    length: int = Field(ge=1)
    """Tokens of each row, padding included."""
    batch_sizes: tuple[int, ...] = Field(min_length=1)
    """Allowed batch sizes, in descending order."""


class TargetMachine(Settings):
    """The machine that an artifact was compiled for."""

    accelerator: str
    """Kind of the accelerator."""
    required_features: tuple[str, ...] = ()
    """Features that a machine must have, such as CPU instruction sets."""
    chip: str
    """Name of the chip that it was exported on."""
    threads: int = Field(ge=1)
    """CPU threads of each process."""


class BatchInvariance(Settings):
    """The proof that an output is bitwise independent of the other rows of its batch."""

    chip: str
    """Name of the chip that it was checked on."""
    num_texts: int
    """Number of texts that were computed in several batch sizes and orders."""


class WeightsOrigin(Settings):
    """The origin of the weights."""

    path: str
    """The folder of the run or of the model, or the import path of a module."""
    step: str = "final"
    """The step of the run, or `final`."""
    sha256: str
    """Hash of the weights before the export."""


class FileDigest(Settings):
    """The size and hash of a file."""

    bytes: int
    """Size in bytes."""
    sha256: str
    """SHA-256 of the content, in hexadecimal."""


class ProgramEntry(Settings):
    """The program: its inputs, its outputs, and how texts become inputs."""

    output_kind: OutputKind
    """The kind of the outputs."""
    output_size: int
    """Numbers per output; tokens, if the program generates text."""
    inputs: tuple[TensorSpec, ...]
    """The tensors that the program takes."""
    tokenization: Tokenization | None = None
    """How texts become tokens; None if the program reads tensors."""
    fields: InputSpec = InputSpec()
    """The fields of a record that it reads."""
    pooling: Pooling | None = None
    """How tokens become a vector; None for programs that return no vectors."""
    labels: tuple[str, ...] = ()
    """Names of the classes, if they have any."""
    activation: HeadActivation | None = None
    """Function of the outputs of a classification head; None for other programs."""
    module: str | None = None
    """Import path of the function that returns a custom module."""
    task: dict[str, Any] | None = None
    """Table of the task that builds a trained custom module; None for any other program."""

    def with_generation(self, generation: Generation) -> ProgramEntry:
        """Return the program of a model that generates text as these options define.

        A longer answer leaves less room for the prompt. Raises SettingsError if no room is left, or
        if the model generates no text.
        """
        if generation == GREEDY:
            return self
        if self.output_kind != "text" or self.tokenization is None:
            problem = f"the model returns {self.output_kind}, not generated text"
            raise SettingsError(problem, "remove the table generation")
        count = generation.max_new_tokens or self.output_size
        total = self.tokenization.max_length + self.output_size
        max_length = min(self.tokenization.max_length, total - count)
        if max_length < MIN_TOKENS:
            problem = f"generation.max_new_tokens = {count} leaves no room for a prompt"
            raise SettingsError(problem, f"set at most {total - MIN_TOKENS}")
        draws = (build_draws_spec(count),) if generation.is_sampled else ()
        updates = {
            "output_size": count,
            "inputs": (*self.inputs, *draws),
            "tokenization": self.tokenization.model_copy(update={"max_length": max_length}),
        }
        return self.model_copy(update=updates)


class Compilation(Settings):
    """How the program was compiled."""

    precision: Precision
    """Precision of the computation."""
    quantization: Quantization = "none"
    """Quantization of weights and matrix products."""
    backend: Annotated[SerializeAsAny[Backend], choice_of("backends")]
    """The backend that compiled the program and runs it."""
    versions: dict[str, str]
    """Versions of the packages that compiled it."""


class ArtifactManifest(Settings):
    """The manifest of an artifact."""

    format: int
    """Version of this format."""
    kind: Literal["regauge artifact"] = KIND
    """Marks the folder as an artifact."""
    program: ProgramEntry
    """The program: its inputs, its outputs, and how texts become inputs."""
    compiled: Compilation
    """How the program was compiled."""
    target: TargetMachine
    """The machine that it was compiled for."""
    buckets: tuple[Bucket, ...]
    """The buckets, in ascending order of length."""
    batch_invariance: BatchInvariance | None = None
    """The proof of batch invariance in these buckets; None if it was not checked or failed."""
    origin: WeightsOrigin
    """The origin of the weights."""
    files: dict[str, FileDigest]
    """Every other file, by its path in the folder."""
