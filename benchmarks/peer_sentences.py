"""A run of this project as sentence-transformers does it: a program that trains in turns.

The same pairs of each step, tokenizer, first weights, loss, optimizer and schedule, read from the
same run file. Held-out pairs are measured by this project's own path.

    python benchmarks/peer_sentences.py FOLDER RUN_FILE [--style best|compiled|default] [--turn N]
"""

from __future__ import annotations

from typing import Any

import transformers
from datasets import Dataset as Table
from peer_parts import Order, measuring, ordered, reading, taken
from peer_trainer import InTurn, plain, written
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import Transformer
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.utils.data import BatchSampler, SequentialSampler


def main() -> None:
    """Train until nobody wants another turn."""
    order = ordered(__doc__)
    reader = reading(order)
    model = _model(order, plain(reader.model))
    reader.model = model[0].auto_model
    told = written(order, compiled=order.style == "compiled")
    trainer = _Counting(
        model=model,
        args=SentenceTransformerTrainingArguments(**told, batch_sampler=_in_order),
        train_dataset=_pairs(order),
        loss=MultipleNegativesRankingLoss(model, scale=1 / order.settings.task.temperature),
    )
    measured = measuring(order, reader)
    trainer.add_callback(InTurn(order, lambda: trainer.pairs, measured))
    trainer.train()


class _Counting(SentenceTransformerTrainer):
    """Counts pairs."""

    pairs = 0

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        self.pairs += len(next(value for name, value in inputs.items() if "input_ids" in name))
        return super().training_step(model, inputs, *rest, **named)


def _model(order: Order, encoder: Any) -> SentenceTransformer:
    """Return an encoder with the tokenizer of the pairs, its mean and a vector of length 1."""
    folder = order.folder / "encoder"
    encoder.save_pretrained(folder)
    _tokenizer(order).save_pretrained(folder)
    fields = order.dataset.manifest.fields
    longest = max(fields[name].limit for name in _names(order))
    inner = Transformer(str(folder), max_seq_length=longest)
    return SentenceTransformer(modules=[inner, Pooling(encoder.config.hidden_size)], device="cpu")


def _pairs(order: Order) -> Table:
    """Return the pairs of all steps as texts, cut where their tokens are."""
    tokenizer, rows = _tokenizer(order), order.dataset.rows("train")
    found = rows.take(taken(order))
    return Table.from_dict(
        {
            name: tokenizer.batch_decode([row[name] for row in found], skip_special_tokens=True)
            for name in _names(order)
        }
    )


def _in_order(pairs: Table, **how: Any) -> BatchSampler:
    return DefaultBatchSampler(SequentialSampler(pairs), **how)


def _tokenizer(order: Order) -> Any:
    return transformers.AutoTokenizer.from_pretrained(order.dataset.folder / "tokenizer")


def _names(order: Order) -> tuple[str, str]:
    return order.settings.task.query, order.settings.task.document


if __name__ == "__main__":
    main()
