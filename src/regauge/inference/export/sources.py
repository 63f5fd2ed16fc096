"""Models to export: a folder with a text model, or a custom module."""

from __future__ import annotations

import hashlib
import shutil
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from regauge.data.dataset import MANIFEST as DATASET
from regauge.data.dataset import read_manifest
from regauge.data.randomness import hash_keys
from regauge.data.tokenizer import LoadedTokenizer, copy_tokenizer_files
from regauge.inference.export.manifest import DATASET_FILE, MODEL, TOKENIZER
from regauge.inference.export.preprocess import Preprocessor
from regauge.inference.export.probe_texts import ProbeTexts, select_probe_texts
from regauge.inference.export.programs import build_folder_spec, build_module_spec, read_vocab_size
from regauge.inference.export.records import TensorRecords, TextRecords, TokenizedTexts
from regauge.inference.export.trained_programs import build_custom_spec, build_ranker_spec
from regauge.models.weight_files import find_weight_files
from regauge.system import choices
from regauge.system.errors import DataError, SettingsError, first_line
from regauge.system.files import sha256
from regauge.system.hub import CONFIG, GENERATION_CONFIG, is_custom_module

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from regauge.inference.export.export_settings import ExportSettings, TextSettings
    from regauge.inference.export.programs import ProgramSpec
    from regauge.inference.export.records import Records
    from regauge.inference.export.trained_task import TrainedTask
    from regauge.models.io_spec import TensorSpec

MAX_GENERATION_PROMPTS = 16
"""Maximum prompts for a generative model: each answer token is a forward pass."""
SYNTHETIC_WORDS = 1000
"""Synthetic texts consist of a vocabulary's last ids; none of these is a special token."""


def build_source_spec(folder: Path, text: TextSettings, trained: TrainedTask | None) -> ProgramSpec:
    """Return a folder's program; `trained` is the task of the run that wrote it."""
    input_spec = trained.input_spec if trained else None
    if trained is not None and is_custom_module(folder):
        return build_custom_spec(folder, trained.task, read_manifest(trained.dataset), text)
    if trained is not None and input_spec is not None and input_spec.ranking is not None:
        return build_ranker_spec(folder, trained.task, read_manifest(trained.dataset))
    return build_folder_spec(folder, text, input_spec)


class ModelFolder:
    """A text model in a folder: an encoder, classifier, causal model or ranker."""

    def __init__(self, folder: Path, settings: ExportSettings, trained: TrainedTask | None) -> None:
        self._folder = folder
        self._trained = trained
        self.spec = build_source_spec(folder, settings.text, trained)

    @cached_property
    def weights_sha256(self) -> str:
        """Hash of the weight file; for several files, hash of their hashes."""
        hashes = [sha256(path) for path in find_weight_files(self._folder)]
        return (
            hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
        )

    def copy_files(self, folder: Path) -> None:
        """Copy the configuration and tokenizer; raises SettingsError without a tokenizer."""
        (folder / MODEL).mkdir()
        for name in (CONFIG, GENERATION_CONFIG):
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / MODEL / name)
        if self._trained is not None and self.spec.entry.task is not None:
            shutil.copyfile(self._trained.dataset / DATASET, folder / MODEL / DATASET_FILE)
        if not (self._folder / "tokenizer.json").is_file():
            problem = f"{self._folder} has no tokenizer.json"
            raise SettingsError(problem, "save the tokenizer of the model there")
        (folder / TOKENIZER).mkdir()
        copy_tokenizer_files(self._folder, folder / TOKENIZER)

    def build_parity_records(self, settings: ExportSettings) -> tuple[Records, ProbeTexts]:
        """Return records from `parity.source`, else the run's held-out rows, else docstrings."""
        entry = self.spec.entry
        dataset = self._trained.dataset if self._trained else None
        count = settings.parity.num_texts
        if entry.fields.ranking is not None and settings.parity.source is None:
            records = self.synthetic_records(count, 1, self.spec.max_tokens)
            return records, ProbeTexts([], {}, "synthetic records of every length")
        if entry.output_kind == "text":
            count = min(count, MAX_GENERATION_PROMPTS)
        list_words = self._list_words if entry.output_kind == "vectors" else tuple
        probe = select_probe_texts(settings.parity.source, dataset, count, entry.fields, list_words)
        preprocessor = Preprocessor(self._folder, entry.required_tokenization, entry.fields)
        records = preprocessor.encode_records(probe.columns, values=probe.values).records
        return records, probe if preprocessor.is_stable else ProbeTexts([], {}, probe.origin)

    def _read_vocab_size(self) -> int:
        if self._trained is not None and self.spec.entry.task is not None:
            return read_manifest(self._trained.dataset).tokenizer.vocab_size
        return read_vocab_size(self._folder)

    def _list_words(self) -> Sequence[str]:
        return LoadedTokenizer(self._folder).list_words()

    def synthetic_records(self, count: int, min_length: int, max_length: int) -> Records:
        """Return texts of the vocabulary's last words, with lengths from long to short."""
        vocab_size = self._read_vocab_size()
        words = min(SYNTHETIC_WORDS, vocab_size)
        lengths = [max_length - index % (max_length - min_length + 1) for index in range(count)]
        positions = np.arange(max_length, dtype=np.uint64)
        ids = [
            (hash_keys(index, positions[:length]) % np.uint64(words)).astype(np.int32)
            + np.int32(vocab_size - words)
            for index, length in enumerate(lengths)
        ]
        texts = [TokenizedTexts.from_lists(ids)] * self.spec.entry.fields.num_separate_texts
        features = [_synthetic_feature(spec, count, lengths) for spec in self.spec.entry.inputs[2:]]
        return TextRecords(texts, features)


class CustomModuleSource:
    """A custom module, which takes tensors.

    The function at `path` returns (module, {argument name: example tensor}); the first dimension of
    an example is rows. Raises DataError if it does not.
    """

    def __init__(self, path: str) -> None:
        function = choices.load_function(path)
        try:
            result = function()
        except Exception as error:
            raise DataError(
                f"'{path}' fails: {first_line(error)}", "correct the function"
            ) from error
        try:
            module, examples = result
            self._examples: dict[str, Tensor] = dict(examples)
        except (TypeError, ValueError):
            problem = f"'{path}' returns {type(result).__name__}"
            raise DataError(problem, "return (module, {name: example tensor})") from None
        self._path = path
        self.spec = build_module_spec(path, module, self._examples)

    @cached_property
    def weights_sha256(self) -> str:
        """Hash of the names and values of all weights and buffers."""
        digest = hashlib.sha256()
        for name, value in sorted(self.spec.program.state_dict().items()):
            digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def copy_files(self, folder: Path) -> None:
        """Copy nothing: the module's code is imported when the artifact is loaded."""

    def build_parity_records(self, settings: ExportSettings) -> tuple[Records, ProbeTexts]:
        """Return the example rows, repeated up to the number of parity texts."""
        arrays = [value.numpy() for value in self._examples.values()]
        rows = np.arange(settings.parity.num_texts) % len(arrays[0])
        return TensorRecords(arrays).select(rows), ProbeTexts([], {}, f"examples of {self._path}")

    def synthetic_records(self, count: int, min_length: int, max_length: int) -> Records:
        """Return distinct rows: the examples with deterministic noise of 0.001."""
        del min_length, max_length
        rows = np.arange(count) % len(next(iter(self._examples.values())))
        arrays = [value.numpy()[rows] for value in self._examples.values()]
        return TensorRecords([_add_noise(values) for values in arrays])


ExportSource = ModelFolder | CustomModuleSource


def _synthetic_feature(spec: TensorSpec, count: int, lengths: list[int]) -> np.ndarray:
    """Return a synthetic feature, [records, …].

    `starts` is the middle of each text; floats are around 0; integers are 0 or 1.
    """
    if spec.name == "starts":
        return np.array([length // 2 for length in lengths], np.int32)
    shape = (count, *(size for size in spec.shape if isinstance(size, int)))
    draws = hash_keys(2, np.arange(np.prod(shape, dtype=int), dtype=np.uint64)).reshape(shape)
    if spec.dtype == "float32":
        return (draws / np.float64(2**64) - 0.5).astype(np.float32)
    return (draws % np.uint64(2)).astype(spec.dtype)


def _add_noise(values: np.ndarray) -> np.ndarray:
    """Return floats with deterministic noise, and integers unchanged."""
    if not np.issubdtype(values.dtype, np.floating):
        return values
    noise = hash_keys(1, np.arange(values.size, dtype=np.uint64)) / np.float64(2**64) - 0.5
    return (values + 1e-3 * noise.reshape(values.shape)).astype(values.dtype)
