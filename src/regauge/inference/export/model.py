"""Python interface to artifacts: texts in, arrays out, with the numbers from `predict`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge import config
from regauge.data.columns import encode_value
from regauge.data.sources import is_unicode
from regauge.inference.export.engine import check_finite, load_engine
from regauge.inference.export.export_settings import TextSettings
from regauge.inference.export.generator import Generator, is_single_prompt
from regauge.inference.export.postprocess import build_columns, convert_vectors
from regauge.inference.export.preprocess import NO_VALUES, TextWords, build_preprocessor
from regauge.inference.export.records import TensorRecords
from regauge.inference.export.uncompiled import open_model, recommend_export
from regauge.models.settings import GenerationTable
from regauge.system import choices
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError
from regauge.system.garbage import pause_collection
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from regauge.data.values import Value
    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.engine import Engine
    from regauge.inference.export.manifest import Dtype
    from regauge.models.io_spec import InputSpec, TensorSpec


class LoadedModel:
    """A loaded artifact or model folder that computes outputs in this process."""

    def __init__(self, artifact: Artifact, engine: Engine, *, batch_invariant: bool) -> None:
        self.program = artifact.program
        """The manifest's `program` table."""
        self._engine = engine
        self._preprocessor = build_preprocessor(artifact)
        self._generator = (
            Generator(artifact, engine.runner, self._preprocessor, batch_invariant=batch_invariant)
            if self._preprocessor is not None
            else None
        )

    def encode(
        self, texts: str | Sequence[str], *, prompt: str | None = None, dtype: Dtype = "float32"
    ) -> np.ndarray:
        """Return text vectors, [texts, width], or [width] for a single text.

        `prompt` names one of the artifact's prompts. `dtype` is "float32", "float16", "int8" or
        "binary". An int8 vector is scaled to a largest magnitude of 127. A binary vector has uint8
        bytes, [texts, width / 8], with one bit for each number's sign.

        Raises SettingsError if the artifact does not return vectors or have such a prompt, and
        DataError if an element is not a valid text.
        """
        if self.program.output_kind != "vectors":
            problem = f"this model returns {self.program.output_kind}, not vectors"
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

        `columns` holds one sequence of texts for each text field in a record. A single record may
        be given as plain strings. `values` are the ranking candidates' features: a sequence for
        each field, with None for a missing value. Absent fields have missing values.

        The columns depend on the artifact's output kind:

        - vectors: `embedding`, [records, width] fp32
        - classes: `predicted_label`, [records], and `probabilities`, [records, classes] fp32
        - values: `value`, [records] fp32
        - scores: `score`, [records] fp32
        - entities: `entities`, a list of dictionaries for each text, with `text`, `label`, `start`,
          `end` and `score`
        - text: `generated_text`, a list of strings

        Raises SettingsError for a wrong number of columns, and DataError if an element is not a
        valid text or feature, if columns have different lengths, or if an output is not finite.
        """
        texts = [[column] if isinstance(column, str) else list(column) for column in columns]
        outputs = self._compute(texts, prompt, values)
        check_finite(outputs)
        decode, words = None, list[TextWords]()
        if self._preprocessor is not None:
            decode = self._preprocessor.decode
            if self.program.output_kind == "entities":
                words = self._preprocessor.find_words(texts[0], prompt)
        answer = build_columns(self.program, "float32", outputs, decode, words)
        return {
            name: column if isinstance(column, np.ndarray) else column.to_pylist()
            for name, column in answer.items()
        }

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Any:
        """Return a causal model's answers: a list of texts, or one text for a single prompt.

        A prompt is a text, a list of messages (`{"role": …, "content": …}`), or a record with
        `messages` and perhaps `tools`, or with an `instruction` and perhaps an `input`.
        Conversations need a chat template; in a model with one, a text is a user message. `prompts`
        is one prompt or a list of prompts.

        The options are those in the `generation` table. At temperature 0 the answer has the most
        likely tokens. Otherwise tokens are drawn: a token's draw depends on `seed`, on the prompt's
        number in the list, and on the token's number in the answer. The default temperature is 1
        with `top_p` or `top_k`, else 0. `on_text` is called with each new part of the answer to a
        single prompt.

        Raises SettingsError if the model does not generate text or an option does not fit it, and
        DataError if a prompt is invalid or an output is not finite.
        """
        if self.program.output_kind != "text" or self._generator is None:
            problem = f"this model returns {self.program.output_kind}, not generated text"
            method = "encode" if self.program.output_kind == "vectors" else "predict"
            raise SettingsError(problem, f"call {method}() instead")
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "top_p": float(top_p),
            "top_k": top_k,
            "seed": seed,
            "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        }
        if temperature is not None:
            options["temperature"] = float(temperature)
        generation = config.build(GenerationTable, {"generation": options}).generation
        is_single = is_single_prompt(prompts)
        batch = [prompts] if is_single else list(prompts)
        _check_texts([[prompt for prompt in batch if isinstance(prompt, str)]])
        answers = self._generator.generate(batch, generation, on_text)
        return answers[0] if is_single else answers

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Return a custom module's output, [rows, width] fp32 on the CPU.

        `program.inputs` describes the inputs. Pass them in this order or by name, with any number
        of rows. Raises DataError if a tensor has another name, dtype or shape, and SettingsError if
        the artifact reads texts.
        """
        if self._preprocessor is not None:
            raise SettingsError("this artifact reads texts", "call encode() or predict()")
        inputs = (*inputs, *_order_inputs(self.program.inputs[len(inputs) :], named))
        _check_tensors(self.program.inputs, inputs)
        arrays = [tensor.detach().cpu().numpy() for tensor in inputs]
        import torch

        return torch.from_numpy(self._engine.compute(TensorRecords(arrays)))

    def _compute(
        self,
        columns: list[list[str]],
        prompt: str | None,
        values: Mapping[str, Sequence[Value | None]] = NO_VALUES,
    ) -> np.ndarray:
        """Return the outputs of records, [records, width] fp32."""
        if self._preprocessor is None:
            raise SettingsError("this artifact does not read texts", "call it with tensors")
        num_texts = max(1, len(self.program.fields.text_fields))
        if len(columns) != num_texts:
            texts = format_count(num_texts, "text")
            problem = f"the model reads {texts} per record, not {len(columns)}"
            raise SettingsError(problem, "pass one sequence for each text field")
        _check_texts(columns)
        _check_values(self.program.fields, values, len(columns[0]))
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
    """Load an artifact, or without an export the model in a run, a folder or on the hub.

    An artifact is verified first. The payload may be code: load only artifacts exported by you or
    people you trust. A run reads its task's fields. A run or a folder is not compiled ahead:
    `backend` runs it in fp32, by default "eager". "torch-compile" compiles it at the first call.

    With `batch_invariant`, a text's output has the same bits in every batch. A run or a folder has
    no proof of this. `threads` is the number of CPU threads; by default the artifact's, or all
    cores without an export. `module` allows the import of custom code named by an artifact. `text`
    is the `text` table of an export, such as `{"pair_fields": ("query", "document")}`; it is not
    for artifacts.

    Raises SettingsError for a missing model or a wrong setting, DataError if a file is damaged
    or changed, and PreflightError if this machine cannot run the artifact.

    For example:

        >>> model = regauge.load("out/artifact")
        >>> model.encode(["Open a file."]).shape
        (1, 384)
    """
    if not isinstance(path, str | os.PathLike):
        raise SettingsError(f"path is of type {type(path).__name__}", "pass the path of a model")
    choices.allow_imports(module)
    text_settings = None if text is None else config.build(TextSettings, dict(text))
    chosen_backend = None if backend is None else config.parse_choice("backends", backend)
    name = str(Path(path).expanduser())
    with pause_collection():
        artifact = open_model(name, text=text_settings, backend=chosen_backend, threads=threads)
        recommend_export(artifact)
        engine = load_engine(artifact, batch_invariant=batch_invariant, threads=threads)
    return LoadedModel(artifact, engine, batch_invariant=batch_invariant)


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


def _check_values(
    fields: InputSpec, values: Mapping[str, Sequence[Value | None]], count: int
) -> None:
    """Raise DataError for an unknown feature, or one without a valid value for each record."""
    names = (*fields.numeric_features, *fields.categorical_features)
    for name, column in values.items():
        if name not in names:
            remedy = did_you_mean(name, names) if names else "remove it from values"
            raise DataError(f"the model does not read the feature '{name}'", remedy)
        if len(column) != count:
            problem = f"the feature '{name}' has {len(column)} values for {count} records"
            raise DataError(problem, "pass one value per record, or None for a missing one")
        try:
            for value in column if name in fields.numeric_features else ():
                encode_value(value, "float")
        except TypeError as error:
            raise DataError(f"the feature '{name}' has {error}", "pass numbers or None") from None


def _order_inputs(specs: Sequence[TensorSpec], named: Mapping[str, Tensor]) -> list[Tensor]:
    """Return named tensors in spec order; raises DataError for an unknown name."""
    names = tuple(spec.name for spec in specs)
    for name in named:
        if name not in names:
            problem = f"'{name}' is not a remaining input of the program"
            raise DataError(problem, did_you_mean(name, names))
    return [named[name] for name in names if name in named]


def _check_tensors(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
    """Raise DataError if tensors differ from their specs in number, dtype, shape or rows."""
    import torch

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
