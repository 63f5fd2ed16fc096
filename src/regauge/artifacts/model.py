"""An artifact in a Python program: texts in, arrays out, the same numbers as `predict` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regauge import accelerators, choices, config
from regauge.artifacts import artifact as artifacts
from regauge.artifacts import engine as engines
from regauge.artifacts import postprocess
from regauge.artifacts.buckets import Ladder, ladder
from regauge.artifacts.engine import Engine
from regauge.artifacts.export_settings import Shapes, Text
from regauge.artifacts.manifest import Program
from regauge.artifacts.preprocess import NOTHING, Reader
from regauge.artifacts.rows import Tensors
from regauge.backends import Payload, Shape, Site, require
from regauge.choices import did_you_mean
from regauge.data.sources import is_unicode
from regauge.errors import DataError, SettingsError
from regauge.models import hub
from regauge.models.inference_modules import tensors
from regauge.processes import available_cores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from regauge.accelerators import Accelerator
    from regauge.artifacts.output_settings import Dtype
    from regauge.backends import Backend
    from regauge.data.sources import Value
    from regauge.models.io_spec import Input


class Loaded:
    """A model that answers."""

    def __init__(self, engine: Engine, program: Program, tokenizer: Path) -> None:
        self.program = program
        """What it says of itself."""
        self._engine = engine
        self._reader = (
            Reader(tokenizer, program.reads, program.fields) if program.reads is not None else None
        )

    def encode(
        self, texts: str | Sequence[str], *, prompt: str | None = None, dtype: Dtype = "float32"
    ) -> np.ndarray:
        """Return the vectors of texts, [texts, width], or [width] for a single one.

        `prompt` is the name of one of the artifact's. Raises SettingsError for an artifact that
        makes no vectors, and DataError for what is no text.
        """
        if self.program.answers != "vectors":
            problem = f"this artifact answers with {self.program.answers}, and not with vectors"
            raise SettingsError(problem, "call answer() instead")
        several = [texts] if isinstance(texts, str) else list(texts)
        found = np.asarray(postprocess.vectors(self._answers([several], prompt), dtype)["vector"])
        vectors: np.ndarray = found[0] if isinstance(texts, str) else found
        return vectors

    def answer(
        self,
        *columns: str | Sequence[str],
        prompt: str | None = None,
        values: Mapping[str, Sequence[Value | None]] = NOTHING,
    ) -> dict[str, Any]:
        """Return the answers to records, given as a sequence for each of their texts.

        A single record may be given by its texts alone. `values` are the features of candidates, by
        name. The columns are those that `predict` writes: of classes `class` and `probabilities`.
        Raises DataError for what is no text, and for columns of different lengths.
        """
        several = [[each] if isinstance(each, str) else list(each) for each in columns]
        found = self._answers(several, prompt, values)
        decode = self._reader.decoded if self._reader else None
        made = postprocess.columns(self.program, "float32", found, decode)
        return {
            name: column if isinstance(column, np.ndarray) else column.to_pylist()
            for name, column in made.items()
        }

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Return what the program gives for its own inputs, [rows, width] fp32 on the CPU.

        `program.inputs` describes them: they are given in this order, or by their names, with any
        number of rows. Raises DataError for tensors that are not these.
        """
        if self._reader is not None:
            raise SettingsError("this artifact reads texts", "call encode() or answer()")
        inputs = (*inputs, *_ordered(self.program.inputs[len(inputs) :], named))
        _check_tensors(self.program.inputs, inputs)
        arrays = [each.detach().cpu().numpy() for each in inputs]
        return torch.from_numpy(self._engine.answers(Tensors(arrays)))

    def _answers(
        self,
        columns: list[list[str]],
        prompt: str | None,
        values: Mapping[str, Sequence[Value | None]] = NOTHING,
    ) -> np.ndarray:
        if self._reader is None:
            raise SettingsError("this artifact reads no texts", "call it with tensors")
        wanted = max(1, len(self.program.fields.texts))
        if len(columns) != wanted:
            problem = f"the artifact reads {wanted} texts of a record, and {len(columns)} are given"
            raise SettingsError(problem, "give a sequence for each of them")
        _check_texts(columns)
        read = self._reader.read(columns, prompt, values)
        return self._engine.answers(read.rows)


def load(
    path: str | Path,
    *,
    invariant: bool = True,
    threads: int | None = None,
    backend: str | None = None,
    module: str | None = None,
) -> Loaded:
    """Return an artifact at work, or for development a model's folder or hub name.

    An artifact is verified first, and a payload may be code: load what you or people you trust
    exported. Of a folder the named backend, by default "eager", computes what was never exported;
    "lazy" compiles it when it is first called. With `invariant` a text's vector has the same bits
    whatever is computed beside it; of a folder nothing was shown. `module` names the code of your
    own that an artifact may run. Raises what `artifact.opened` does.
    """
    choices.allow(module)
    if backend is None and artifacts.is_one(Path(path)):
        artifact = artifacts.opened(path)
        engine = engines.loaded(artifact, invariant=invariant, threads=threads)
        return Loaded(engine, artifact.manifest.program, artifact.tokenizer)
    folder = hub.at(str(path))
    return _of_folder(folder, config.choose("backends", backend or "eager"), threads)


def _check_texts(columns: list[list[Any]]) -> None:
    """Raise DataError for columns of different lengths, and for what is no text."""
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        problem = f"the columns have {', '.join(map(str, lengths))} texts"
        raise DataError(problem, "give one of each for every record")
    for column in columns:
        for number, text in enumerate(column):
            if not isinstance(text, str):
                problem = f"text {number} is of type {type(text).__name__}"
                raise DataError(problem, "give each as a str")
            if not is_unicode(text):
                raise DataError(f"text {number} holds half a character", "decode it again")


def _ordered(wanted: Sequence[Input], named: Mapping[str, Tensor]) -> list[Tensor]:
    """Return tensors that are given by their names, in order; DataError for an unknown name."""
    names = tuple(each.name for each in wanted)
    for name in named:
        if name not in names:
            raise DataError(f"there is no input '{name}' left to give", did_you_mean(name, names))
    return [named[name] for name in names if name in named]


def _check_tensors(wanted: Sequence[Input], given: Sequence[Tensor]) -> None:
    """Raise DataError for tensors that are not those that a program takes."""
    names = ", ".join(each.name for each in wanted)
    if len(given) != len(wanted):
        raise DataError(f"{len(given)} tensors are given", f"give {len(wanted)}: {names}")
    for each, tensor in zip(wanted, given, strict=True):
        shape = ", ".join(map(str, each.shape))
        if not isinstance(tensor, torch.Tensor):
            raise DataError(f"'{each.name}' is of type {type(tensor).__name__}", "give a tensor")
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind != each.dtype or tuple(tensor.shape[1:]) != each.shape[1:]:
            problem = f"'{each.name}' is {kind} [{', '.join(map(str, tensor.shape))}]"
            raise DataError(problem, f"give {each.dtype} [{shape}]")
    rows = {len(tensor) for tensor in given}
    if len(rows) > 1:
        problem = f"the tensors have {', '.join(map(str, sorted(rows)))} rows"
        raise DataError(problem, f"give one row of each for every record: {names}")


def _of_folder(folder: Path, backend: Backend, threads: int | None) -> Loaded:
    """Return a model's folder at work in fp32, on the fittest device of this machine."""
    from regauge.artifacts import programs

    accelerator: Accelerator = accelerators.choose()[0]
    require(backend, accelerator)
    described = programs.of_folder(folder, Text())
    count = threads or available_cores()
    site = Site(accelerator, accelerators.take(accelerator, 0, count), count)
    rungs = ladder(Shapes(), described.longest, symbolic=backend.symbolic)
    payload = Payload(
        folder,
        described.inputs,
        [Shape(rung.rows[0], rung.length) for rung in rungs],
        "fp32",
        lambda: {name: value.detach() for name, value in tensors(described.program).items()},
        lambda: described.program,
    )
    runner = backend.load(payload, site)
    engine = Engine(runner, Ladder(rungs, filled=not backend.symbolic), described.width)
    return Loaded(engine, described.told, folder)
