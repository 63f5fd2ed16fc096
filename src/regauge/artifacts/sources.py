"""What can be exported: a model that reads records, or a module of one's own that takes tensors."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from regauge import choices
from regauge.artifacts import programs
from regauge.artifacts.manifest import MODEL, TOKENIZER
from regauge.artifacts.preprocess import Reader
from regauge.artifacts.probe_texts import samples
from regauge.artifacts.rows import Rows, Tensors, Texts
from regauge.data import tokenizer
from regauge.data.dataset import read_manifest
from regauge.data.randomness import keyed
from regauge.errors import DataError, SettingsError, plain
from regauge.files import sha256
from regauge.models import weights as folders
from regauge.models.hub import CONFIG
from regauge.models.io_spec import Fields

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from regauge.artifacts.export_settings import Exporting
    from regauge.artifacts.programs import Described
    from regauge.artifacts.rows import Records
    from regauge.models.io_spec import Input
    from regauge.tasks import Task

PROMPTS = 16
"""Most texts that are gone on with: each is a pass of the model for every token."""
WORDS = 1000
"""Ids that made texts consist of, the last ones of a vocabulary: none of them is special."""


@dataclass(frozen=True)
class Trained:
    """What a run trained for."""

    task: Task
    dataset: Path
    """The one that it was trained on."""

    @property
    def fields(self) -> Fields:
        """What its model reads of a record."""
        return self.task.fields(read_manifest(self.dataset))


class Subject(Protocol):
    """What is exported."""

    @property
    def described(self) -> Described:
        """The program, and what an artifact says of it."""
        ...

    @property
    def sha256(self) -> str:
        """Of the weights as they were read."""
        ...

    def keep(self, folder: Path) -> None:
        """Write into an artifact what is needed to make the program again."""
        ...

    def records(self, settings: Exporting) -> tuple[Records, str]:
        """Return real records to prove and time it on, and where they are from."""
        ...

    def made(self, count: int, shortest: int, longest: int) -> Records:
        """Return so many keyed records whose longest texts have from so many to so many tokens."""
        ...


class OfFolder:
    """The model of a folder, which reads texts."""

    def __init__(self, folder: Path, settings: Exporting, trained: Trained | None) -> None:
        self._folder = folder
        self._trained = trained
        if trained is not None and trained.fields.ranking is not None:
            manifest = read_manifest(trained.dataset)
            self.described = programs.of_ranker(folder, trained.task, manifest)
        else:
            fields = trained.fields if trained else None
            self.described = programs.of_folder(folder, settings.text, fields)

    @cached_property
    def sha256(self) -> str:
        """Of the weights' files, one behind the other where there are several."""
        each = [sha256(path) for path in folders.weight_files(self._folder)]
        return each[0] if len(each) == 1 else hashlib.sha256("".join(each).encode()).hexdigest()

    def keep(self, folder: Path) -> None:
        """Write the architecture and the tokenizer; SettingsError where there is no tokenizer."""
        (folder / MODEL).mkdir()
        shutil.copyfile(self._folder / CONFIG, folder / MODEL / CONFIG)
        found = tokenizer.files(self._folder)
        if not any(path.name == "tokenizer.json" for path in found):
            problem = f"{self._folder} has no tokenizer.json"
            raise SettingsError(problem, "add one, or name its folder")
        (folder / TOKENIZER).mkdir()
        for path in found:
            shutil.copyfile(path, folder / TOKENIZER / path.name)

    def records(self, settings: Exporting) -> tuple[Records, str]:
        """Return texts of the source that is named, or that were held out of training."""
        dataset = self._trained.dataset if self._trained else None
        fields = self.described.fields
        if fields.ranking is not None and settings.proof.source is None:
            longest = self.described.longest
            return self.made(settings.proof.texts, 1, longest), "made records of every length"
        count = settings.proof.texts
        if self.described.answers == "text":
            count = min(count, PROMPTS)
        words = self._words if self.described.answers == "vectors" else tuple
        found = samples(settings.proof.source, dataset, count, fields, words)
        reader = Reader(self._folder, self.described.texts, fields)
        return reader.read(found.columns, values=found.values).rows, found.origin

    def _words(self) -> Sequence[str]:
        return tokenizer.Encoder(self._folder).plain_words()

    def made(self, count: int, shortest: int, longest: int) -> Records:
        """Return texts of every length in turn, of the last words of the vocabulary."""
        vocabulary = programs.vocabulary(self._folder)
        words = min(WORDS, vocabulary)
        lengths = [longest - number % (longest - shortest + 1) for number in range(count)]
        places = np.arange(longest, dtype=np.uint64)
        ids = [
            (keyed(number, places[:length]) % np.uint64(words)).astype(np.int32)
            + np.int32(vocabulary - words)
            for number, length in enumerate(lengths)
        ]
        texts = [Texts.of(ids)] * self.described.fields.apart
        features = [_values(each, count, lengths) for each in self.described.inputs[2:]]
        return Rows(texts, features)


class OfModule:
    """A module of one's own, which takes tensors.

    The function at `path` returns it with an example of each tensor that it takes, by the names of
    its arguments; their first dimension is rows. Raises DataError for a function that does not.
    """

    def __init__(self, path: str) -> None:
        function = choices.function(path)
        try:
            found = function()
        except Exception as error:
            raise DataError(f"'{path}' fails: {plain(error)}", "correct it there") from error
        try:
            module, examples = found
            self._examples: dict[str, Tensor] = dict(examples)
        except (TypeError, ValueError):
            problem = f"'{path}' returns {type(found).__name__}"
            raise DataError(problem, "let it return (module, {name: example tensor})") from None
        self._path = path
        self.described = programs.of_module(path, module, self._examples)

    @cached_property
    def sha256(self) -> str:
        """Of all weights and buffers, by their names."""
        digest = hashlib.sha256()
        for name, value in sorted(self.described.program.state_dict().items()):
            digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def keep(self, folder: Path) -> None:
        """Write nothing: its code stays where it is."""

    def records(self, settings: Exporting) -> tuple[Records, str]:
        """Return the examples, each row as often as records are wanted."""
        arrays = [value.numpy() for value in self._examples.values()]
        rows = np.arange(settings.proof.texts) % len(arrays[0])
        return Tensors(arrays).some(rows), f"examples of {self._path}"

    def made(self, count: int, shortest: int, longest: int) -> Records:
        """Return rows that all differ: the examples with keyed noise of a thousandth."""
        del shortest, longest
        rows = np.arange(count) % len(next(iter(self._examples.values())))
        some = [value.numpy()[rows] for value in self._examples.values()]
        return Tensors([_shaken(each) for each in some])


def _values(wanted: Input, count: int, lengths: list[int]) -> np.ndarray:
    """Return made features, [records, …]: where halves meet, numbers around 0, first buckets."""
    if wanted.name == "starts":
        return np.array([length // 2 for length in lengths], np.int32)
    shape = (count, *(size for size in wanted.shape if isinstance(size, int)))
    drawn = keyed(2, np.arange(np.prod(shape, dtype=int), dtype=np.uint64)).reshape(shape)
    if wanted.dtype == "float32":
        return (drawn / np.float64(2**64) - 0.5).astype(np.float32)
    return (drawn % np.uint64(2)).astype(wanted.dtype)


def _shaken(values: np.ndarray) -> np.ndarray:
    """Return real numbers with some noise, and integers as they are."""
    if not np.issubdtype(values.dtype, np.floating):
        return values
    noise = keyed(1, np.arange(values.size, dtype=np.uint64)) / np.float64(2**64) - 0.5
    return (values + 1e-3 * noise.reshape(values.shape)).astype(values.dtype)
