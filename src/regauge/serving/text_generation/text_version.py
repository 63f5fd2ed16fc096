"""A loaded causal model version: texts to tokens, tokens to texts, and the workers between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.data.chat_templates import TemplateError
from regauge.data.conversations import ASSISTANT, ConversationError
from regauge.data.sources import is_unicode
from regauge.inference.export.preprocess import Preprocessor
from regauge.serving.loaded_version import LoadedVersion
from regauge.serving.text_generation.text_client import TextWorker
from regauge.serving.text_generation.text_queue import TextQueue
from regauge.serving.text_generation.text_requests import RequestTooLongError
from regauge.serving.workers.worker_pool import WorkerPool
from regauge.system.errors import DataError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.text_stream import AnswerText
    from regauge.models.settings import Generation
    from regauge.serving.server_metrics import ServerMetrics
    from regauge.serving.settings import Serve
    from regauge.serving.text_generation.text_queue import TokenStream


class TextVersion(LoadedVersion):
    """A causal model version that answers requests."""

    pool: WorkerPool[TextWorker]

    def __init__(self, artifact: Artifact, settings: Serve, metrics: ServerMetrics) -> None:
        """Take the artifact with the default options."""
        super().__init__(artifact)
        self._metrics = metrics
        self.generation = artifact.generation_options
        """Options for requests that set none."""
        table = settings.generation.model_dump()
        self.pool = WorkerPool(TextWorker, artifact, settings, self._fill_workers, generation=table)
        self.queue = TextQueue(self.pool, settings.generation, self._count_token)
        """Requests that wait or are answered."""

    async def start(self) -> None:
        tokenization, fields = self.program.tokenization, self.program.fields
        if tokenization is None:
            raise SettingsError(
                f"the model '{self.name}' does not read texts", "serve a causal model"
            )
        await self.pool.start()
        worker = self.pool.ready[0]
        self.content_sha256 = worker.ready_header["content_sha256"]
        self._max_tokens = worker.limits.max_tokens
        self._max_length = (
            worker.limits.max_prompt_tokens or self._max_tokens or tokenization.max_length
        )
        tokenization = tokenization.model_copy(update={"max_length": self._max_length})
        self._chat = Preprocessor(self.artifact.tokenizer_folder, tokenization, fields)
        self._completion = self._chat.with_tokenization(
            tokenization.model_copy(update={"input_format": "completion"})
        )

    @property
    def num_waiting(self) -> int:
        return self.queue.num_waiting

    def estimate_wait(self) -> float:
        return self.queue.estimate_wait()

    def count_cache_blocks(self) -> tuple[int, int]:
        counts = [worker.heartbeat["cache_blocks"] for worker in self.pool.ready]
        return sum(used for used, _ in counts), sum(total for _, total in counts)

    def _count_token(self, stream: TokenStream) -> None:
        if not stream.num_tokens:
            num_tokens, seconds = stream.num_prompt_tokens, stream.waited_seconds
            self._metrics.count_first_token(self.name, num_tokens, seconds)
        self._metrics.count_generated_token(self.name)

    def _fill_workers(self) -> None:
        self.queue.fill_workers()

    def is_overloaded(self, max_wait_seconds: float) -> bool:
        """Return False: the queue refuses each client by itself."""
        del max_wait_seconds
        return False

    @property
    def is_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._chat.is_chat

    def limit_answer(self, num_prompt_tokens: int) -> int:
        """Return the maximum tokens for an answer without a limit of its own, at least 1.

        It is the limit that was exported or declared with the model, within the remaining room.
        """
        declared = self.program.answer_tokens
        if self._max_tokens is None:
            return declared or self.generation.max_new_tokens or 1
        room = max(1, self._max_tokens - num_prompt_tokens)
        return room if declared is None else min(declared, room)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the tokens of a text to continue, [tokens] int32; without a chat template.

        Raises DataError if the text is too long for the model, or is not valid Unicode.
        """
        self._check_length(is_long=len(text) > self._completion.max_characters)
        if not is_unicode(text):
            raise DataError("the prompt is not valid Unicode", "send text in UTF-8")
        encoded = self._completion.encode_records([[text]])
        self._check_length(is_long=encoded.num_truncated > 0)
        return encoded.records.texts[0].ids

    def encode_chat(self, record: Mapping[str, Any]) -> np.ndarray:
        """Return a conversation's tokens up to the answer, [tokens] int32.

        `record` has `messages` and perhaps `tools`. Raises DataError if it is invalid.
        """
        if not self.is_chat:
            problem = f"the model '{self.name}' does not have a chat template"
            raise DataError(problem, "send the prompt to /v1/completions")
        try:
            request = self._chat.render_request(record)
            _check_last_message(record)
        except ConversationError as error:
            raise DataError(f"{error.reason}: {error.detail}", "correct the messages") from None
        except TemplateError as error:
            problem = f"the chat template cannot render the conversation: {error}"
            raise DataError(problem, "send messages that the template knows") from None
        self._check_length(is_long=len(request) > self._chat.max_characters)
        encoded = self._chat.encode_requests([request])
        self._check_length(is_long=encoded.num_truncated > 0)
        return encoded.records.texts[0].ids

    def build_answer(self, generation: Generation) -> AnswerText:
        """Return an empty answer that decodes its tokens."""
        return self._chat.build_answer(generation)

    def _check_length(self, *, is_long: bool) -> None:
        if is_long:
            problem = f"the prompt has more than the {self._max_length} tokens that the model reads"
            raise RequestTooLongError(problem, "shorten the prompt")


def _check_last_message(record: Mapping[str, Any]) -> None:
    """Raise ConversationError if a conversation ends with an answer, which would be left out."""
    if record["messages"][-1].get("role") == ASSISTANT:
        raise ConversationError("the last message is an answer of the assistant")
