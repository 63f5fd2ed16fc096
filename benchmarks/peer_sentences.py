"""Trains a contrastive run file with sentence-transformers, as an alternating program.

The run file sets the pairs of each step, tokenizer, initial weights, loss, optimizer and schedule.
Regauge evaluates the held-out pairs.

    python benchmarks/peer_sentences.py FOLDER RUN_FILE [--style best|compiled|default]
                                        [--steps-per-turn N]
"""

from __future__ import annotations

from typing import Any

import transformers
from datasets import Dataset as Table
from peer_parts import PeerRun, build_evaluation, build_run_module, list_rows, parse_run
from peer_trainer import TurnCallback, build_arguments, copy_to_transformers
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
    """Train until there is no other turn."""
    run = parse_run(__doc__)
    module = build_run_module(run)
    model = _build_model(run, copy_to_transformers(module.model))
    module.model = model[0].auto_model
    arguments = build_arguments(run, compiled=run.style == "compiled")
    trainer = _CountingTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            **arguments, batch_sampler=_build_sequential_sampler
        ),
        train_dataset=_read_pairs(run),
        loss=MultipleNegativesRankingLoss(model, scale=1 / run.settings.task.temperature),
    )
    evaluate = build_evaluation(run, module)
    trainer.add_callback(TurnCallback(run, lambda: trainer.pairs, evaluate))
    trainer.train()


class _CountingTrainer(SentenceTransformerTrainer):
    """Counts pairs."""

    pairs = 0

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        self.pairs += len(next(value for name, value in inputs.items() if "input_ids" in name))
        return super().training_step(model, inputs, *rest, **named)


def _build_model(run: PeerRun, encoder: Any) -> SentenceTransformer:
    """Return an encoder with the tokenizer of the pairs and mean pooling."""
    folder = run.folder / "encoder"
    encoder.save_pretrained(folder)
    _load_tokenizer(run).save_pretrained(folder)
    columns = run.dataset.manifest.columns
    max_length = max(columns[name].max_length for name in _pair_fields(run))
    transformer = Transformer(str(folder), max_seq_length=max_length)
    pooling = Pooling(encoder.config.hidden_size)
    return SentenceTransformer(modules=[transformer, pooling], device="cpu")


def _read_pairs(run: PeerRun) -> Table:
    """Return the pairs of all steps as texts, truncated like their tokens."""
    tokenizer = _load_tokenizer(run)
    rows = run.dataset.rows("train").take(list_rows(run))
    return Table.from_dict(
        {
            name: tokenizer.batch_decode([row[name] for row in rows], skip_special_tokens=True)
            for name in _pair_fields(run)
        }
    )


def _build_sequential_sampler(pairs: Table, **options: Any) -> BatchSampler:
    return DefaultBatchSampler(SequentialSampler(pairs), **options)


def _load_tokenizer(run: PeerRun) -> Any:
    return transformers.AutoTokenizer.from_pretrained(run.dataset.folder / "tokenizer")


def _pair_fields(run: PeerRun) -> tuple[str, str]:
    return run.settings.task.query, run.settings.task.document


if __name__ == "__main__":
    main()
