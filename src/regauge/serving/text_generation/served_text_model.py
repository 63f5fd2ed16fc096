"""A served causal model as the routes see it: texts to tokens, tokens to texts, and a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from regauge.data.chat_templates import TemplateError
from regauge.data.conversations import ASSISTANT, ConversationError
from regauge.data.sources import is_unicode
from regauge.inference.export.preprocess import Preprocessor
from regauge.inference.export.text_stream import AnswerText
from regauge.serving.text_generation.text_requests import RequestTooLongError
from regauge.system.errors import DataError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.inference.export.artifact import Artifact
    from regauge.models.settings import Generation
    from regauge.serving.text_generation.text_client import TokenStream
    from regauge.serving.text_generation.text_requests import EngineLimits


class TextClient(Protocol):
    """What a served model needs of its workers."""

    @property
    def limits(self) -> EngineLimits:
        """The limits of the engines."""

    def start_answer(
        self,
        prompt: np.ndarray,
        generation: Generation,
        number: int = 0,
        timeout_seconds: float | None = None,
    ) -> TokenStream:
        """Send a request and return its stream."""


class ServedTextModel:
    """The tokenizer of a causal model, its default options, and its workers."""

    def __init__(self, name: str, artifact: Artifact, client: TextClient) -> None:
        """Take the name of the model in requests; `artifact` has the default options."""
        self.name = name
        """The name of the model in requests."""
        self.generation = artifact.generation_options
        """The options of a request that names none."""
        self.client = client
        """The workers."""
        program = artifact.manifest.program
        if program.tokenization is None:
            raise SettingsError(f"the model '{name}' reads no texts", "serve a causal model")
        self._max_length = (
            client.limits.max_prompt_tokens
            or client.limits.max_tokens
            or program.tokenization.max_length
        )
        limits = {"max_length": self._max_length}
        tokenization = program.tokenization.model_copy(update=limits)
        self._chat = Preprocessor(artifact.tokenizer_folder, tokenization, program.fields)
        self._completion = self._chat.with_tokenization(
            tokenization.model_copy(update={"input_format": "completion"})
        )

    @property
    def is_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._chat.is_chat

    def limit_answer(self, num_prompt_tokens: int) -> int:
        """Return the most tokens of an answer without a limit of its own, at least 1."""
        count = self.generation.max_new_tokens or 1
        if self.client.limits.max_tokens is not None:
            count = min(count, self.client.limits.max_tokens - num_prompt_tokens)
        return max(1, count)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the tokens of a text to continue, [tokens] int32; no chat template is applied.

        Raises DataError if the text is longer than the model reads, or is not valid Unicode.
        """
        if not is_unicode(text):
            raise DataError("the prompt is not valid Unicode", "send text in UTF-8")
        encoded = self._completion.encode_records([[text]])
        self._check_length(encoded.num_truncated)
        return encoded.records.texts[0].ids

    def encode_chat(self, record: Mapping[str, Any]) -> np.ndarray:
        """Return the tokens of a conversation up to its answer, [tokens] int32.

        `record` has `messages` and perhaps `tools`. Raises DataError if it is invalid.
        """
        if not self.is_chat:
            problem = f"the model '{self.name}' has no chat template"
            raise DataError(problem, "send the prompt to /v1/completions")
        try:
            request = self._chat.render_request(record)
            _check_last_message(record)
        except ConversationError as error:
            raise DataError(f"{error.reason}: {error.detail}", "correct the messages") from None
        except TemplateError as error:
            problem = f"the chat template cannot render the conversation: {error}"
            raise DataError(problem, "send messages that the template knows") from None
        encoded = self._chat.encode_requests([request])
        self._check_length(encoded.num_truncated)
        return encoded.records.texts[0].ids

    def build_answer(self, generation: Generation) -> AnswerText:
        """Return an empty answer that decodes its tokens."""
        return AnswerText(self._decode, generation)

    def _decode(self, tokens: list[int]) -> str:
        return self._chat.decode(np.array([tokens], np.int64))[0] if tokens else ""

    def _check_length(self, num_truncated: int) -> None:
        if num_truncated:
            problem = f"the prompt has more than the {self._max_length} tokens that the model reads"
            raise RequestTooLongError(problem, "shorten the prompt")


def _check_last_message(record: Mapping[str, Any]) -> None:
    """Raise ConversationError if a conversation ends with an answer, which would be left out."""
    if record["messages"][-1].get("role") == ASSISTANT:
        raise ConversationError("the last message is an answer of the assistant")
