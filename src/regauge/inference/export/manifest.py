"""An artifact's manifest, `manifest.json`; does not import torch.

    manifest.json        the manifest
    weights.safetensors  the program's weights and buffers, in the compute dtype
    model/config.json    the architecture
    model/dataset.json   the dataset manifest, for a trained custom module
    tokenizer/           the tokenizer
    payload/             the compiled program, as the backend wrote it
    parity.json          the best candidate's row: quality loss and speed
    benchmark.json       all candidates' rows
    parity_rows.*        a few records with the compiled program's outputs
    bucket_times.json    milliseconds by batch shape

The manifest lists every other file with size and hash.
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
"""Artifact subfolder in a run folder."""
KIND: Final = "regauge artifact"
Dtype = Literal["float16", "float32", "int8", "binary"]
"""Types for converting output vectors."""


class Bucket(Settings):
    """Batch shapes with one length."""

    length: int = Field(ge=1)
    """Tokens per row, padding included."""
    batch_sizes: tuple[int, ...] = Field(min_length=1)
    """Allowed batch sizes, in descending order."""


class TargetMachine(Settings):
    """Machine that the artifact was compiled for."""

    accelerator: str
    """Accelerator kind."""
    required_features: tuple[str, ...] = ()
    """Features a machine must have, such as CPU instruction sets."""
    chip: str
    """Name of the chip during export."""
    threads: int = Field(ge=1)
    """CPU threads per process."""


class BatchInvariance(Settings):
    """Proof of outputs bitwise independent of the batch's other rows."""

    chip: str
    """Name of the checked chip."""
    num_texts: int
    """Texts computed in several batch sizes and orders."""


class WeightsOrigin(Settings):
    """Where the weights come from."""

    path: str
    """Run or model folder, or a module's import path."""
    step: str = "final"
    """The run's step, or `final`."""
    sha256: str
    """Hash of the weights before the export."""
    run_id: str | None = None
    """The run's id; None for other models, and in artifacts from earlier versions."""


class FileDigest(Settings):
    """A file's size and hash."""

    bytes: int
    """Size in bytes."""
    sha256: str
    """SHA-256 in hexadecimal."""


class ProgramEntry(Settings):
    """The program: inputs, outputs, and how texts become inputs."""

    output_kind: OutputKind
    """What the program returns."""
    output_size: int
    """Numbers per output; tokens, if the program generates text."""
    inputs: tuple[TensorSpec, ...]
    """Input tensors."""
    tokenization: Tokenization | None = None
    """How texts become tokens; None if the program reads tensors."""
    fields: InputSpec = InputSpec()
    """Record fields to read."""
    pooling: Pooling | None = None
    """How tokens become a vector; None for programs that do not return vectors."""
    answer_tokens: int | None = None
    """Maximum tokens per answer, if set at export or in generation_config.json."""
    labels: tuple[str, ...] = ()
    """Class names, if any."""
    activation: HeadActivation | None = None
    """Function applied to a classification head's outputs; None for other programs."""
    module: str | None = None
    """Import path of a function that returns a custom module."""
    task: dict[str, Any] | None = None
    """Task table to build a trained custom module; None for any other program."""

    @property
    def required_tokenization(self) -> Tokenization:
        """The tokenization; raises SettingsError if the program does not read texts."""
        if self.tokenization is None:
            problem = "this program does not read texts"
            raise SettingsError(problem, "name the folder of a text model")
        return self.tokenization

    def with_generation(self, generation: Generation) -> ProgramEntry:
        """Return the program for a text generator with these options.

        A longer answer leaves less room for the prompt. Raises SettingsError if no room is left, or
        if the model does not generate text.
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
    """Compute precision."""
    quantization: Quantization = "none"
    """Quantization of weights and matrix products."""
    backend: Annotated[SerializeAsAny[Backend], choice_of("backends")]
    """Backend that compiled the program and runs it."""
    versions: dict[str, str]
    """Versions of the compiler packages."""


class ArtifactManifest(Settings):
    """An artifact's manifest."""

    format: int
    """Format version."""
    kind: Literal["regauge artifact"] = KIND
    """Marks the folder as an artifact."""
    program: ProgramEntry
    """The program: inputs, outputs, and how texts become inputs."""
    compiled: Compilation
    target: TargetMachine
    """The machine it was compiled for."""
    buckets: tuple[Bucket, ...]
    """In ascending order of length."""
    batch_invariance: BatchInvariance | None = None
    """Proof of batch invariance in these buckets; None if not checked or failed."""
    origin: WeightsOrigin
    files: dict[str, FileDigest]
    """Every other file, by path in the folder."""
