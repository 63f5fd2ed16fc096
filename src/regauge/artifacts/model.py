"""The Python interface of an artifact: texts in, arrays out, with the numbers of `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regauge import accelerators, choices, config
from regauge.artifacts.artifact import is_artifact, open_artifact
from regauge.artifacts.buckets import Buckets, build_buckets
from regauge.artifacts.engine import Engine, load_engine
from regauge.artifacts.export_settings import BucketSettings, TextSettings
from regauge.artifacts.manifest import ProgramEntry
from regauge.artifacts.postprocess import build_columns, convert_vectors
from regauge.artifacts.preprocess import NO_VALUES, Preprocessor
from regauge.artifacts.records import TensorRecords
from regauge.backends import ExecutionContext, Payload, Shape, check_usable
from regauge.choices import did_you_mean
from regauge.data.sources import is_unicode
from regauge.errors import DataError, SettingsError
from regauge.models.hub import resolve_model
from regauge.models.inference_modules import named_tensors
from regauge.processes import available_threads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from regauge.accelerators import Accelerator
    from regauge.artifacts.manifest import Dtype
    from regauge.backends import Backend
    from regauge.data.values import Value
    from regauge.models.io_spec import TensorSpec


class LoadedModel:
    """A loaded artifact or model folder that computes outputs in this process."""

    def __init__(self, engine: Engine, program: ProgramEntry, tokenizer: Path) -> None:
        self.program = program
        """The `program` table of the manifest."""
        self._engine = engine
        self._preprocessor = (
            Preprocessor(tokenizer, program.tokenization, program.fields)
            if program.tokenization is not None
            else None
        )

    def encode(
        self, texts: str | Sequence[str], *, prompt: str | None = None, dtype: Dtype = "float32"
    ) -> np.ndarray:
        """Return the vectors of texts, [texts, width], or [width] for a single text.

        `prompt` is the name of one of the artifact's prompts. `dtype` is "float32", "float16",
        "int8" or "binary". An int8 vector is scaled to a largest magnitude of 127. A binary vector
        has uint8 bytes, [texts, width / 8], with one bit for the sign of each number.

        Raises SettingsError if the artifact returns no vectors or has no such prompt, and DataError
        if an element is not a valid text.
        """
        if self.program.output_kind != "vectors":
            problem = f"this artifact returns {self.program.output_kind}, not vectors"
            raise SettingsError(problem, "call predict() instead")
        batch = [texts] if isinstance(texts, str) else list(texts)
        columns = convert_vectors(self._compute([batch], prompt), dtype)
        vectors = np.asarray(columns["embedding"])
        encoded: np.ndarray = vectors[0] if isinstance(texts, str) else vectors
        return encoded

    def predict(
        self,
        *columns: str | Sequence[str],
        prompt: str | None = None,
        values: Mapping[str, Sequence[Value | None]] = NO_VALUES,
    ) -> dict[str, Any]:
        """Return the outputs of records, as the columns that `predict` writes.

        `columns` holds one sequence of texts for each text field of a record. A single record may
        be given as plain strings. `values` are the features of ranking candidates: a sequence for
        each field, with None for a missing value.

        The columns depend on the output kind of the artifact:

        - vectors: `embedding`, [records, width] fp32
        - classes: `predicted_label`, [records], and `probabilities`, [records, classes] fp32
        - values: `value`, [records] fp32
        - scores: `score`, [records] fp32
        - text: `generated_text`, a list of strings

        Raises SettingsError for a wrong number of columns, and DataError if an element is not a
        valid text or if columns have different lengths.
        """
        texts = [[column] if isinstance(column, str) else list(column) for column in columns]
        outputs = self._compute(texts, prompt, values)
        decode = self._preprocessor.decode if self._preprocessor else None
        return {
            name: column if isinstance(column, np.ndarray) else column.to_pylist()
            for name, column in build_columns(self.program, "float32", outputs, decode).items()
        }

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Return the output of a custom module, [rows, width] fp32 on the CPU.

        `program.inputs` describes the inputs. They are passed in this order or by name, with any
        number of rows. Raises DataError if a tensor has another name, dtype or shape, and
        SettingsError if the artifact reads texts.
        """
        if self._preprocessor is not None:
            raise SettingsError("this artifact reads texts", "call encode() or predict()")
        inputs = (*inputs, *_order_inputs(self.program.inputs[len(inputs) :], named))
        _check_tensors(self.program.inputs, inputs)
        arrays = [tensor.detach().cpu().numpy() for tensor in inputs]
        return torch.from_numpy(self._engine.compute(TensorRecords(arrays)))

    def _compute(
        self,
        columns: list[list[str]],
        prompt: str | None,
        values: Mapping[str, Sequence[Value | None]] = NO_VALUES,
    ) -> np.ndarray:
        """Return the outputs of records, [records, width] fp32."""
        if self._preprocessor is None:
            raise SettingsError("this artifact reads no texts", "call it with tensors")
        num_texts = max(1, len(self.program.fields.text_fields))
        if len(columns) != num_texts:
            problem = f"the artifact reads {num_texts} texts per record, got {len(columns)}"
            raise SettingsError(problem, "pass one sequence for each text field")
        _check_texts(columns)
        encoded = self._preprocessor.encode_records(columns, prompt, values)
        return self._engine.compute(encoded.records)


def load(
    path: str | Path,
    *,
    batch_invariant: bool = True,
    threads: int | None = None,
    backend: str | None = None,
    module: str | None = None,
    text: dict[str, Any] | None = None,
) -> LoadedModel:
    """Load an artifact; for development also a model's folder or a name on the hub.

    An artifact is verified first. Its payload may be code: load only artifacts that you or people
    you trust exported. A folder is not compiled ahead: `backend` runs it, by default "eager".
    "torch-compile" compiles it at the first call.

    With `batch_invariant`, the output of a text has the same bits in every batch. A folder has no
    proof of this. `threads` is the number of CPU threads; by default that of the artifact, or all
    cores for a folder. `module` allows the import of custom code that an artifact names. `text` is
    the table `text` of an export, such as `{"pair_fields": ("query", "document")}`; it is only for
    a folder.

    Raises SettingsError if there is no model or a setting is wrong, DataError if a file is damaged
    or changed, and PreflightError if this machine cannot run the artifact.
    """
    choices.allow_imports(module)
    if backend is None and is_artifact(Path(path)):
        if text is not None:
            problem = f"{path} is an artifact, whose text settings are fixed"
            raise SettingsError(problem, "remove `text`, or export the model again with it")
        artifact = open_artifact(path)
        engine = load_engine(artifact, batch_invariant=batch_invariant, threads=threads)
        return LoadedModel(engine, artifact.manifest.program, artifact.tokenizer_folder)
    settings = config.build(TextSettings, dict(text or {}))
    chosen_backend = config.parse_choice("backends", backend or "eager")
    return _load_folder(resolve_model(str(path)), settings, chosen_backend, threads)


def _check_texts(columns: list[list[Any]]) -> None:
    """Raise DataError if columns differ in length, or if an element is not valid Unicode text."""
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        problem = f"the columns have {', '.join(map(str, lengths))} texts"
        raise DataError(problem, "pass one text per record in every column")
    for column in columns:
        for index, text in enumerate(column):
            if not isinstance(text, str):
                problem = f"text {index} is of type {type(text).__name__}"
                raise DataError(problem, "pass a str")
            if not is_unicode(text):
                problem = f"text {index} is not valid Unicode (lone surrogate)"
                raise DataError(problem, "re-decode it as UTF-8")


def _order_inputs(specs: Sequence[TensorSpec], named: Mapping[str, Tensor]) -> list[Tensor]:
    """Return named tensors in the order of the specs; raises DataError for an unknown name."""
    names = tuple(spec.name for spec in specs)
    for name in named:
        if name not in names:
            problem = f"the program has no remaining input '{name}'"
            raise DataError(problem, did_you_mean(name, names))
    return [named[name] for name in names if name in named]


def _check_tensors(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
    """Raise DataError if tensors differ from their specs in number, dtype, shape or rows."""
    names = ", ".join(spec.name for spec in specs)
    if len(tensors) != len(specs):
        raise DataError(f"got {len(tensors)} tensors", f"pass {len(specs)}: {names}")
    for spec, tensor in zip(specs, tensors, strict=True):
        shape = ", ".join(map(str, spec.shape))
        if not isinstance(tensor, torch.Tensor):
            raise DataError(f"'{spec.name}' is of type {type(tensor).__name__}", "pass a tensor")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != spec.dtype or tuple(tensor.shape[1:]) != spec.shape[1:]:
            problem = f"'{spec.name}' is {dtype} [{', '.join(map(str, tensor.shape))}]"
            raise DataError(problem, f"pass {spec.dtype} [{shape}]")
    rows = {len(tensor) for tensor in tensors}
    if len(rows) > 1:
        problem = f"the tensors have {', '.join(map(str, sorted(rows)))} rows"
        raise DataError(problem, f"pass the same number of rows in each: {names}")


def _load_folder(
    folder: Path, settings: TextSettings, backend: Backend, threads: int | None
) -> LoadedModel:
    """Return a model's folder in fp32, loaded on the best accelerator of this machine."""
    from regauge.artifacts.programs import build_folder_spec

    accelerator: Accelerator = accelerators.choose()[0]
    check_usable(backend, accelerator)
    spec = build_folder_spec(folder, settings)
    num_threads = threads or available_threads()
    device = accelerators.claim_device(accelerator, 0, num_threads)
    context = ExecutionContext(accelerator, device, num_threads)
    is_dynamic = backend.has_dynamic_shapes
    shapes = build_buckets(BucketSettings(), spec.max_tokens, has_dynamic_shapes=is_dynamic)
    payload = Payload(
        folder,
        spec.inputs,
        [Shape(bucket.batch_sizes[0], bucket.length) for bucket in shapes],
        "fp32",
        lambda: {name: value.detach() for name, value in named_tensors(spec.program).items()},
        lambda: spec.program,
    )
    runner = backend.load(payload, context)
    buckets = Buckets(shapes, needs_row_padding=not is_dynamic)
    return LoadedModel(Engine(runner, buckets, spec.output_size), spec.manifest_entry, folder)
