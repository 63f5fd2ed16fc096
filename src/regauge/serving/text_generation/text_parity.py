"""Answers of a text engine in the form of an artifact's parity rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regauge.inference.export.records import Records, TextRecords
from regauge.models.generation.text_generation import NO_TOKEN
from regauge.serving.text_generation.text_requests import TextRequest
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from regauge.models.settings import Generation
    from regauge.serving.text_generation.text_requests import TextEngine


def generate_tokens(engine: TextEngine, generation: Generation, records: Records) -> np.ndarray:
    """Return the answers to prompts, [records, max_new_tokens] fp32, NO_TOKEN after their ends.

    Raises DataError if the engine fails to answer a prompt.
    """
    if not isinstance(records, TextRecords):
        raise TypeError("the rows of a model that generates text are texts")
    [texts] = records.texts
    for index, prompt in enumerate(np.split(texts.ids, np.cumsum(texts.lengths)[:-1])):
        engine.add(TextRequest(str(index), prompt, generation, index))
    answers: list[list[int]] = [[] for _ in range(len(records))]
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason == "error":
                raise DataError(event.message, "export the artifact again on this machine")
            if event.token is not None:
                answers[int(event.request_id)].append(event.token)
    tokens = np.full((len(records), generation.max_new_tokens or 1), NO_TOKEN, np.float32)
    for row, answer in zip(tokens, answers, strict=True):
        row[: len(answer)] = answer
    return tokens
