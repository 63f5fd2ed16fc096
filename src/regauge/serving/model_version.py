"""A loaded artifact version: tokenizer, scheduler and workers.

The server process tokenizes and never imports torch. The workers compute.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from regauge.inference.export.artifact import is_artifact, open_unchecked
from regauge.inference.export.bucket_times import BucketTimes
from regauge.inference.export.buckets import select_buckets
from regauge.inference.export.preprocess import NO_VALUES, Preprocessor
from regauge.serving.batch_planner import BatchPlanner
from regauge.serving.dispatcher import QUEUED_BATCHES, Dispatcher
from regauge.serving.loaded_version import LoadedVersion
from regauge.serving.request_errors import (
    ContextLengthError,
    FieldError,
    InferenceError,
    InvalidRequestError,
    TooLargeError,
    TooManyRecordsError,
)
from regauge.serving.scheduler import Scheduler
from regauge.serving.workers.batch_worker import BatchWorker
from regauge.serving.workers.model_description import describe_model
from regauge.serving.workers.worker_pool import WorkerPool
from regauge.serving.workers.worker_process import COMMAND
from regauge.system.errors import DataError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from regauge.data.tokenizer import Side
    from regauge.data.values import Value
    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.preprocess import EncodedRecords, TextWords
    from regauge.inference.export.records import Records
    from regauge.serving.dispatcher import ComputedRequest, RequestOptions
    from regauge.serving.server_metrics import ServerMetrics
    from regauge.serving.settings import Serve

T = TypeVar("T")
BATCH_SIZE = "max_client_batch_size"
"""Key in a description: records per request that an idle server answers, at the maximum length."""
TYPICAL_TOKENS = 32
INLINE_CHARACTERS = 4000
"""Shorter texts are tokenized at once, longer ones in a thread."""

MAX_VECTOR_TOKENS = 1 << 14
"""Maximum tokens in a request for all token vectors; their JSON is large."""
MAX_DESCRIBED_CHARACTERS = 1 << 17
"""Maximum characters in a request for tokens; their JSON is up to 70 times as long."""


class Inputs(NamedTuple):
    """A request's records, before they are tokenized."""

    columns: Sequence[Sequence[str]] = ()
    """One sequence per text field."""
    token_ids: Sequence[Sequence[int]] = ()
    """Instead of texts: each record's token ids."""
    prompt: str | None = None
    """Name of one of the artifact's prompts."""
    values: Mapping[str, Sequence[Value | None]] = NO_VALUES
    """Field -> features of ranking candidates."""
    truncate: bool = False
    """Whether texts may be truncated, whatever the settings."""
    truncation_side: Side | None = None
    """Side on which texts are truncated; by default the model's."""

    @classmethod
    def from_field(
        cls, name: str, value: Any, prompt: str | None, *, truncate: bool = False
    ) -> Inputs:
        """Build single-text records from a body field with texts or tokens.

        `value` is a text, a list of texts, the ids of a text, or a list of these. Raises
        InvalidRequestError if it is empty.
        """
        items: Any = [value] if isinstance(value, str) else value
        if not items:
            raise InvalidRequestError(f"{name} is empty")
        if isinstance(items[0], str):
            return cls([items], prompt=prompt, truncate=truncate)
        lists = [items] if isinstance(items[0], int) else items
        if not all(lists):
            raise InvalidRequestError(f"{name} has an empty list of tokens")
        if prompt is not None:
            raise FieldError("prompt_name is for texts, not for tokens", "prompt_name")
        return cls(token_ids=lists, truncate=truncate)

    @property
    def num_records(self) -> int:
        return len(self.token_ids) or len(self.columns[0])


@dataclass(frozen=True)
class Outputs:
    """A request's outputs."""

    values: np.ndarray
    """[records, width] fp32; zeros for a failed record."""
    num_tokens: np.ndarray
    """Tokens per record, special tokens included, [records] int64."""
    is_truncated: np.ndarray
    """Whether some text of a record was truncated, [records] bool."""
    failures: Mapping[int, str]
    """Record index -> failure."""

    def check_failures(self) -> None:
        """Raise InferenceError if a record has failed."""
        if self.failures:
            index = min(self.failures)
            raise InferenceError(f"record {index} failed: {self.failures[index]}")


class ModelVersion(LoadedVersion):
    """An artifact version whose requests are computed in batches."""

    pool: WorkerPool[BatchWorker]

    def __init__(
        self,
        artifact: Artifact,
        settings: Serve,
        metrics: ServerMetrics,
        executor: Executor,
    ) -> None:
        """Take the artifact; `executor` provides threads that tokenize long texts."""
        super().__init__(artifact)
        self._settings = settings
        self._metrics = metrics
        self._executor = executor
        self._preprocessor: Preprocessor | None = None
        self.is_batch_invariant = settings.batch_invariant
        """Whether outputs have the same bits in every batch."""
        self.pool = WorkerPool(
            BatchWorker,
            artifact,
            settings,
            self._fill_workers,
            batch_invariant=self.is_batch_invariant,
        )
        self.scheduler: Scheduler | None = None
        """The queue; None until the workers are ready."""
        self._planner: BatchPlanner | None = None
        self._dispatcher: Dispatcher | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        tokenization = self.program.tokenization
        if tokenization is not None:
            folder, fields = self.artifact.tokenizer_folder, self.program.fields
            loading = loop.run_in_executor(
                self._executor, Preprocessor, folder, tokenization, fields
            )
        await self.pool.start()
        ready = self.pool.ready[0].ready_header
        if tokenization is not None:
            self._preprocessor = await loading
        self.content_sha256 = ready["content_sha256"]
        times = BucketTimes.model_validate(ready["times"])
        buckets = select_buckets(self.artifact, batch_invariant=self.is_batch_invariant)
        self._lengths = np.array([bucket.length for bucket in buckets.shapes])
        mixes_lengths = not self.is_batch_invariant
        planner = self._planner = BatchPlanner(buckets, times, mixes_lengths=mixes_lengths)
        self.scheduler = Scheduler(planner, self._settings.queue.max_wait_seconds)
        self._dispatcher = Dispatcher(
            self.scheduler, self.pool, self.program.output_size, self._metrics.count_batch
        )
        self._fill_workers()

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting if self.scheduler else 0

    def estimate_wait(self) -> float:
        return self.scheduler.estimate_wait("interactive") if self.scheduler else 0.0

    def is_overloaded(self, max_wait_seconds: float) -> bool:
        """Return whether an interactive request's expected wait exceeds a limit."""
        return self.estimate_wait() > max_wait_seconds

    @property
    def preprocessor(self) -> Preprocessor:
        """Tokenizer and limits; raises InvalidRequestError if the model does not read texts."""
        if self._preprocessor is None:
            raise InvalidRequestError("this model reads tensors, not texts")
        return self._preprocessor

    def select_preprocessor(self, side: Side | None) -> Preprocessor:
        """Return the tokenizer that truncates on a side, by default the model's."""
        tokenization = self.program.tokenization
        if side is None or tokenization is None:
            return self.preprocessor
        changed = tokenization.model_copy(update={"truncation_side": side})
        return self.preprocessor.with_tokenization(changed)

    def find_words(self, inputs: Inputs) -> list[TextWords]:
        """Return the words in the records' first texts."""
        preprocessor = self.select_preprocessor(inputs.truncation_side)
        return preprocessor.find_words(inputs.columns[0], inputs.prompt)

    @property
    def recommended_records_in_flight(self) -> int:
        """How many records clients should keep in flight to keep all workers busy.

        Two batches per worker, for texts of `TYPICAL_TOKENS` tokens.
        """
        if self._planner is None:
            return 1
        length = int(self._lengths[np.searchsorted(self._lengths[:-1], TYPICAL_TOKENS)])
        num_workers = max(1, len(self.pool.ready))
        return QUEUED_BATCHES * num_workers * self._planner.find_efficient_rows(length)

    @property
    def is_normalized(self) -> bool:
        """Whether vectors have length 1."""
        pooling = self.program.pooling
        return pooling is not None and pooling.normalize and pooling.truncate_dim is None

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of a started version."""
        if self._dispatcher is None:
            raise RuntimeError("the version has not started")
        return self._dispatcher

    async def compute(self, inputs: Inputs, options: RequestOptions) -> Outputs:
        """Compute texts; raises the errors in `request_errors`."""
        self.dispatcher.check_room(options)
        if not inputs.truncate and self._settings.overflow == "split":
            outputs = await self._compute_windows(inputs, options)
            if outputs is not None:
                return outputs
        encoded = await self._encode(inputs)
        failures = self._find_long_records(inputs, encoded.is_truncated)
        records, indices = encoded.records, np.arange(len(encoded.records))
        if failures:
            indices = np.flatnonzero(~encoded.is_truncated)
            records = records.select(indices) if len(indices) else records
        values = np.zeros((len(encoded.records), self.program.output_size), np.float32)
        if len(indices):
            request = await self._compute_records(records, options)
            values[indices] = request.outputs
            failures |= {int(indices[key]): value for key, value in request.failures.items()}
        num_tokens = sum(column.lengths for column in encoded.records.texts)
        is_truncated = encoded.is_truncated & self._truncates(inputs)
        self._metrics.count_truncated(int(is_truncated.sum()))
        return Outputs(values, np.asarray(num_tokens), is_truncated, failures)

    async def describe_tokens(
        self, texts: Sequence[str], prompt: str | None, *, add_special_tokens: bool
    ) -> list[list[dict[str, Any]]]:
        """Return each text's tokens: id, text, whether it is special, and characters."""
        preprocessor = self.preprocessor
        num_characters = sum(map(len, texts))
        if num_characters > MAX_DESCRIBED_CHARACTERS:
            problem = f"{num_characters} characters are over the {MAX_DESCRIBED_CHARACTERS}"
            raise TooLargeError(f"{problem} of a request; send fewer texts at once")
        return await self._run(
            num_characters,
            lambda: preprocessor.describe_tokens(
                texts, prompt, add_special_tokens=add_special_tokens
            ),
        )

    def describe(self) -> dict[str, Any]:
        limits: dict[str, Any] = {}
        if self._preprocessor is not None:
            limits = {"max_input_length": self._preprocessor.max_length}
        if self.scheduler is not None:
            queue = self._settings.queue
            length, seconds = int(self._lengths[-1]), queue.timeout_seconds
            count = self.scheduler.count_fitting(length, seconds)
            limits[BATCH_SIZE] = int(min(count, queue.max_request_records))
        return {
            **super().describe(),
            **limits,
            "batch_invariant": self.is_batch_invariant,
            "recommended_records_in_flight": self.recommended_records_in_flight,
        }

    async def compute_tensors(self, records: Records, options: RequestOptions) -> Outputs:
        """Return a custom module's outputs for rows of input tensors."""
        request = await self._compute_records(records, options)
        count = len(records)
        no_flags = np.zeros(count, bool)
        return Outputs(request.outputs, np.ones(count, np.int64), no_flags, request.failures)

    async def compute_token_vectors(
        self, inputs: Inputs, options: RequestOptions
    ) -> list[np.ndarray]:
        """Return each text's token vectors, [tokens, width] fp32.

        Special tokens are included. Raises the errors in `request_errors`.
        """
        encoded = await self._encode(inputs)
        if failures := self._find_long_records(inputs, encoded.is_truncated):
            raise ContextLengthError(failures[min(failures)])
        records = encoded.records
        if records.num_tokens > MAX_VECTOR_TOKENS:
            problem = f"{records.num_tokens} tokens are over the limit of {MAX_VECTOR_TOKENS}"
            raise TooLargeError(problem)
        texts = [records.slice_arrays(index)[0] for index in range(len(records))]
        vectors = await self.dispatcher.compute_token_vectors(texts, options)
        self.num_answers += 1
        return vectors

    async def _compute_windows(self, inputs: Inputs, options: RequestOptions) -> Outputs | None:
        """Return the mean window vectors of texts, or None without windows."""
        if self.program.output_kind != "vectors" or len(inputs.columns) != 1:
            return None
        [texts] = inputs.columns
        num_characters = sum(map(len, texts))
        limit = self.preprocessor.max_length * self._settings.queue.max_request_records
        if num_characters > limit:
            problem = f"{num_characters} characters are over the {limit} of a request"
            raise TooLargeError(f"{problem}; send fewer texts at once")
        records, owners = await self._run(
            num_characters, lambda: self.preprocessor.encode_windows(texts, inputs.prompt)
        )
        try:
            request = await self._compute_records(records, options)
        except TooManyRecordsError as error:  # a record is a part of a text
            raise TooManyRecordsError(error.problem, int(owners[error.num_records])) from None
        lengths = records.texts[0].lengths
        no_flags = np.zeros(len(texts), bool)
        if len(owners) == len(texts):
            return Outputs(request.outputs, lengths, no_flags, request.failures)
        values = np.zeros((len(texts), self.program.output_size), np.float32)
        np.add.at(values, owners, request.outputs * lengths[:, None])
        num_tokens = np.bincount(owners, lengths, len(texts)).astype(np.int64)
        values /= np.maximum(num_tokens, 1)[:, None]
        if self.is_normalized:
            values = scale_to_length_1(values)
        failures = {int(owners[key]): value for key, value in request.failures.items()}
        return Outputs(values, num_tokens, no_flags, failures)

    async def _compute_records(self, records: Records, options: RequestOptions) -> ComputedRequest:
        lengths = self._lengths[np.searchsorted(self._lengths, records.lengths)].tolist()
        request = await self.dispatcher.compute(records, lengths, options)
        self.num_answers += not request.failures
        return request

    async def _encode(self, inputs: Inputs) -> EncodedRecords:
        """Tokenize records; raises InvalidRequestError for a wrong one."""
        preprocessor = self.select_preprocessor(inputs.truncation_side)
        if inputs.token_ids:
            lists = [np.array(ids, np.int32) for ids in inputs.token_ids]
            largest, limit = max(ids.max() for ids in lists), preprocessor.vocab_size
            if largest >= limit:
                raise InvalidRequestError(f"token {largest} is over the {limit} of the vocabulary")
            return preprocessor.encode_ids(lists)
        num_texts = max(1, len(self.program.fields.text_fields))
        if len(inputs.columns) != num_texts:
            problem = f"the model reads {num_texts} texts per record, not {len(inputs.columns)}"
            raise InvalidRequestError(problem)
        limit = preprocessor.max_characters
        lengths = np.array([list(map(len, column)) for column in inputs.columns])
        is_long: np.ndarray = np.any(lengths > limit, axis=0)
        self._find_long_records(inputs, is_long)
        columns = [list(map(preprocessor.cut, column)) for column in inputs.columns]
        encoded = await self._run(
            int(np.minimum(lengths, limit).sum()),
            lambda: preprocessor.encode_records(columns, inputs.prompt, inputs.values),
        )
        return encoded._replace(is_truncated=encoded.is_truncated | is_long)

    async def _run(self, num_characters: int, encode: Callable[[], T]) -> T:
        """Tokenize texts, in a thread if they are long."""
        start = time.perf_counter()
        try:
            if num_characters <= INLINE_CHARACTERS:
                return encode()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, encode)
        except (DataError, SettingsError) as error:
            raise InvalidRequestError(str(error)) from None
        finally:
            self._metrics.add_phase("tokenize", time.perf_counter() - start)

    def _truncates(self, inputs: Inputs) -> bool:
        return inputs.truncate or self._settings.overflow == "truncate"

    def _find_long_records(self, inputs: Inputs, is_long: np.ndarray) -> dict[int, str]:
        """Return the failures of records that are too long; empty if they are truncated.

        Raises TooLargeError unless the server reports failures in place.
        """
        if self._truncates(inputs):
            return {}
        limit = self.preprocessor.max_length
        problem = "record {} is longer than the {} tokens that the model reads; shorten it"
        failures = {int(index): problem.format(index, limit) for index in np.flatnonzero(is_long)}
        if failures and not self._settings.item_errors:
            raise ContextLengthError(failures[min(failures)])
        return failures

    def _fill_workers(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.fill_workers()


def scale_to_length_1(vectors: np.ndarray) -> np.ndarray:
    """Return vectors divided by their norms, [records, width]; vectors of zeros are kept."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: np.ndarray = vectors / np.where(norms > 0, norms, 1)
    return scaled


def open_served_artifact(folder: Path) -> Artifact:
    """Open an artifact whose files the workers will verify, or a model that is not exported.

    Raises the errors of `open_unchecked` and `describe_model`.
    """
    if is_artifact(folder):
        artifact = open_unchecked(folder)
        artifact.check_target()
        return artifact
    return describe_model(str(folder), COMMAND)
