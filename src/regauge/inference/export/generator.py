"""Generates text with a loaded model: prompts and conversations in, answers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.data.chat_templates import TemplateError
from regauge.data.conversations import ASSISTANT, ConversationError
from regauge.data.randomness import draw_uniform
from regauge.inference.export.buckets import select_buckets
from regauge.inference.export.engine import Engine, check_finite
from regauge.inference.export.records import TextRecords
from regauge.system.errors import DataError, SettingsError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.inference.backends import Runner
    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.preprocess import EncodedRecords, Preprocessor
    from regauge.inference.export.records import Records
    from regauge.models.settings import Generation


def is_single_prompt(prompts: Any) -> bool:
    """Return whether a value is one prompt: a text, a record, or a list of messages."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str):
        return True
    is_message = (isinstance(item, Mapping) and "role" in item for item in prompts)
    return bool(prompts) and all(is_message)


def add_draws(
    records: TextRecords, generation: Generation, numbers: np.ndarray, *, count: int, piece: int = 0
) -> TextRecords:
    """Add the random numbers that select tokens, if tokens are drawn.

    A number depends on the seed, the source piece, the record number in it ([records]) and the new
    token's number, of which there are `count`.
    """
    if not generation.is_sampled:
        return records
    draws = draw_uniform(generation.seed, piece, numbers[:, None], np.arange(count)[None])
    return TextRecords(records.texts, [*records.features, draws])


def decode_answers(
    preprocessor: Preprocessor, generation: Generation, outputs: np.ndarray
) -> list[str]:
    """Return the texts of generated tokens, [records, tokens], up to their first stop text."""
    return list(map(generation.cut_text, preprocessor.decode(outputs)))


class Generator:
    """A loaded model that generates text; each call may have other options."""

    def __init__(
        self,
        artifact: Artifact,
        runner: Runner,
        preprocessor: Preprocessor,
        *,
        batch_invariant: bool,
    ) -> None:
        self._artifact = artifact
        self._runner = runner
        self._preprocessor = preprocessor
        self._batch_invariant = batch_invariant

    def generate(
        self,
        prompts: Sequence[Any],
        generation: Generation,
        on_text: Callable[[str], None] | None = None,
    ) -> list[str]:
        """Answer each prompt; `on_text` gets the parts of a single answer as they come.

        Raises SettingsError if the model cannot generate as requested, and DataError for an invalid
        prompt or an output that is not finite.
        """
        if on_text is not None and len(prompts) != 1:
            raise SettingsError(f"on_text is for one prompt, got {len(prompts)}", "pass one prompt")
        artifact = replace(self._artifact, generation=generation)
        entry = artifact.program
        preprocessor = self._preprocessor.with_tokenization(entry.tokenization)
        encoded = [_encode_prompt(preprocessor, prompt) for prompt in prompts]
        if count := sum(records.num_truncated for records in encoded):
            message = "Prompts of more than %d tokens lost their beginning: %d"
            logger.warning(message, preprocessor.max_length, count)
        tokens = [records.records.texts[0].ids for records in encoded]
        numbers = np.arange(len(tokens))
        records: Records = add_draws(
            TextRecords.from_lists(tokens), generation, numbers, count=entry.output_size
        )
        buckets = select_buckets(artifact, batch_invariant=self._batch_invariant)
        stream = TextStream(preprocessor, generation, on_text) if on_text else None
        with self._set_options(artifact.generation_options, stream):
            outputs = Engine(self._runner, buckets, entry.output_size).compute(records)
        check_finite(outputs)
        answers = decode_answers(preprocessor, generation, outputs)
        if stream and answers:
            stream.finish(answers[0])
        return answers

    @contextmanager
    def _set_options(self, options: Generation, stream: TextStream | None) -> Iterator[None]:
        """Let the program generate with other options in a block, and report to a stream.

        Raises SettingsError for a program on several devices, which keeps its options.
        """
        program: Any = getattr(self._runner, "program", None)
        if program is None:
            if options != self._artifact.generation_options or stream is not None:
                problem = "a model on several devices keeps the options that it was loaded with"
                raise SettingsError(problem, "run `regauge predict` with other options")
            yield
            return
        earlier, program.options = program.options, options
        program.on_step = stream.add if stream else None
        try:
            yield
        finally:
            program.options, program.on_step = earlier, None


class TextStream:
    """Reports parts of an answer while it is generated, once they can no longer change."""

    def __init__(
        self, preprocessor: Preprocessor, generation: Generation, on_text: Callable[[str], None]
    ) -> None:
        self._answer = preprocessor.build_answer(generation)
        self._on_text = on_text
        self._sent = ""

    def add(self, tokens: list[int]) -> None:
        """Report the answer's new part, given all tokens so far."""
        self._send(self._answer.add(tokens[self._answer.num_tokens :]))

    def finish(self, text: str) -> None:
        """Report the rest of the whole answer."""
        if text.startswith(self._sent):
            self._send(text[len(self._sent) :])

    def _send(self, part: str) -> None:
        if part:
            self._on_text(part)
            self._sent += part


def _encode_prompt(preprocessor: Preprocessor, prompt: Any) -> EncodedRecords:
    if isinstance(prompt, str):
        return preprocessor.encode_records([[prompt]])
    if not isinstance(prompt, Mapping | Sequence):
        problem = f"a prompt is of type {type(prompt).__name__}"
        raise DataError(problem, "pass a text, a list of messages or a record")
    if not preprocessor.is_chat:
        problem = "the model has no chat template, so it cannot answer a conversation"
        raise DataError(problem, "pass a text, or a model with a chat template")
    record = dict(prompt) if isinstance(prompt, Mapping) else {"messages": list(prompt)}
    try:
        request = preprocessor.render_request(record)
        _check_last_message(record)
    except ConversationError as error:
        problem = f"{error.reason}: {error.detail}"
        raise DataError(problem, 'pass messages such as {"role": "user", "content": "…"}') from None
    except TemplateError as error:
        problem = f"the chat template cannot render the conversation: {error}"
        raise DataError(problem, "pass messages that the template knows") from None
    return preprocessor.encode_requests([request])


def _check_last_message(record: Mapping[str, Any]) -> None:
    """Raise DataError if a conversation ends with an answer, which would be left out."""
    messages = record.get("messages")
    if isinstance(messages, list) and messages[-1].get("role") == ASSISTANT:
        problem = "the conversation ends with an answer of the assistant"
        raise DataError(problem, "end it with the message to answer")
