"""A loaded program as a task's module, for evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from regauge.inference.export.records import TextRecords, TokenizedTexts

if TYPE_CHECKING:
    from regauge.inference.export.engine import Engine
    from regauge.models.io_spec import InputSpec, OutputKind
    from regauge.models.losses import Batch

OUTPUT_NAMES: dict[OutputKind, str] = {
    "vectors": "vectors",
    "classes": "scores",
    "values": "scores",
    "scores": "scores",
}
"""Output kind -> key in the batch returned by a task's module."""


class EngineModule(nn.Module):
    """An engine as a task's module: maps a batch of tokens to a batch of outputs."""

    def __init__(self, engine: Engine, output_kind: OutputKind, input_spec: InputSpec) -> None:
        super().__init__()
        self.engine = engine
        self.compute_dtype = torch.float32
        self._output_name = OUTPUT_NAMES[output_kind]
        self._input_spec = input_spec

    def forward(self, batch: Batch) -> Batch:
        """Return a batch's outputs, [batch, width] fp32; 0 for empty rows.

        For a ranker the output is [rows, candidates].
        """
        if self._input_spec.ranking is not None:
            return {
                self._output_name: self._score_candidates(
                    batch, self._input_spec.ranking.num_query_texts
                )
            }
        tokens, segments = (batch[name].cpu().numpy() for name in ("tokens", "segments"))
        lengths = (segments > 0).sum(1)
        (filled,) = np.nonzero(lengths)
        lengths = np.minimum(lengths, self.engine.buckets.max_length)
        texts = TokenizedTexts.from_lists(
            [tokens[row, : lengths[row]].astype(np.int32) for row in filled]
        )
        starts = (
            [_second_text_starts(batch["types"], lengths)[filled]]
            if self._input_spec.is_pair
            else []
        )
        outputs = np.zeros((len(tokens), self.engine.output_size), np.float32)
        outputs[filled] = self.engine.compute(TextRecords([texts], starts))
        return {self._output_name: torch.from_numpy(outputs).to(batch["tokens"].device)}

    def _score_candidates(self, batch: Batch, queries: int) -> Tensor:
        """Return candidate scores, [rows, candidates]; 0 for absent candidates.

        `queries` is the number of texts per query.
        """
        present = batch["present"].cpu().numpy() > 0
        rows, candidates = present.shape
        tokens = batch["tokens"].cpu().numpy().reshape(rows, -1, batch["tokens"].shape[1])
        num_tokens = (batch["segments"].cpu().numpy() > 0).sum(1)
        lengths = np.minimum(num_tokens, self.engine.buckets.max_length).reshape(rows, -1)
        texts_per_record = self._input_spec.num_separate_texts
        documents = texts_per_record - queries
        row_of, candidate_of = np.nonzero(present)

        def select_text(index: int) -> TokenizedTexts:
            """Return one text for every candidate; a row holds the query texts first."""
            slots = np.full_like(candidate_of, index)
            if index >= queries:
                slots = queries + candidate_of * documents + index - queries
            pairs = zip(row_of, slots, strict=True)
            return TokenizedTexts.from_lists(
                [tokens[row, slot, : lengths[row, slot]] for row, slot in pairs]
            )

        features = [
            batch[name].cpu().numpy()[row_of, candidate_of] for name in ("numbers", "categories")
        ]
        padded = [
            values if values.shape[1] else np.pad(values, ((0, 0), (0, 1))) for values in features
        ]
        texts = [select_text(index) for index in range(texts_per_record)]
        outputs = self.engine.compute(TextRecords(texts, padded))
        scores = np.zeros((rows, candidates), np.float32)
        scores[row_of, candidate_of] = outputs[:, 0]
        return torch.from_numpy(scores).to(batch["tokens"].device)


def _second_text_starts(types: Tensor, lengths: np.ndarray) -> np.ndarray:
    """Return where each row's second text starts, [batch] int32; the row's length if none."""
    is_second = types.cpu().numpy() > 0
    starts: np.ndarray = np.where(is_second.any(1), is_second.argmax(1), lengths).astype(np.int32)
    return starts
