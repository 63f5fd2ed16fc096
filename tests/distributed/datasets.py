"""Small datasets of random tokens, written in the format that `prepare` writes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from regauge.config import dump
from regauge.data.batches import RandomKey
from regauge.data.columns import MARKS_TYPE, TOKENS_TYPE, VALUE_TYPES
from regauge.data.dataset import (
    ColumnInfo,
    Dataset,
    DatasetManifest,
    ShardInfo,
    SplitInfo,
    TokenizerInfo,
)
from regauge.data.loader import CollatorConfig
from regauge.system.files import sha256
from regauge.tasks import Task

Row = dict[str, Any]
VOCABULARY = 300
MEMBERS = 5
LENGTH = 32
WIDTH = 32
"""Size of the vectors of the teacher, and the hidden size of the models."""
FACTS = TokenizerInfo(
    sha256=hashlib.sha256(b"none").hexdigest(),
    vocab_size=VOCABULARY,
    pad_token_id=0,
    mask_token_id=4,
    sep_token_id=3,
    special_token_ids=(0, 1, 2, 3, 4),
)


def write_packed(folder: Path, rows: int = 40, heldout: int = 10, seed: int = 1) -> Path:
    """Write packed rows of two or three documents each; the last tokens of some are padding."""
    splits = {"train": _packed_rows(rows, seed), "heldout": _packed_rows(heldout, seed + 1)}
    fields = {
        "tokens": ColumnInfo(max_length=LENGTH),
        "segments": ColumnInfo(max_length=LENGTH, kind="segments"),
    }
    return write_rows(folder, "packed", fields, splits)


def write_pairs(folder: Path, rows: int = 40, heldout: int = 10) -> Path:
    """Write pairs that share tokens, and a class that one token determines.

    Each row also has a second document that shares tokens, one that does not, a similarity, and the
    vector of a teacher.
    """
    splits = {"train": _pair_rows(rows, 3), "heldout": _pair_rows(heldout, 4)}
    limits = {"query": 12, "document": LENGTH, "abstract": 20, "negative": 24}
    fields = {name: _build_text_column(name, limit, splits) for name, limit in limits.items()}
    fields["label"] = ColumnInfo(
        max_length=1,
        kind="integer",
        ranges={"train": (0, 2), "heldout": (0, 2)},
        class_counts=_count_classes("label", splits),
        min=0,
        max=2,
    )
    fields["topics"] = ColumnInfo(
        max_length=1,
        kind="integers",
        class_names=("even", "third", "late", "long"),
        class_counts=_count_classes("topics", splits),
    )
    fields["similarity"] = ColumnInfo(max_length=1, kind="float", min=0, max=1)
    fields["embedding"] = ColumnInfo(max_length=WIDTH, kind="vector", min=1, max=1)
    return write_rows(folder, "fields", fields, splits)


def write_lengths(folder: Path, lengths: dict[str, list[int]]) -> Path:
    """Write training rows with texts of these lengths by field, and one of two classes."""
    sizes = zip(*lengths.values(), strict=True)
    rows: list[Row] = [
        {**{name: [5] * size for name, size in zip(lengths, row, strict=True)}, "label": index % 2}
        for index, row in enumerate(sizes)
    ]
    splits: dict[str, list[Row]] = {"train": rows, "heldout": []}
    fields = {name: _build_text_column(name, max(lengths[name]), splits) for name in lengths}
    fields["label"] = ColumnInfo(
        max_length=1,
        kind="integer",
        ranges={"train": (0, 1)},
        class_counts=_count_classes("label", splits),
        min=0,
        max=1,
    )
    return write_rows(folder, "fields", fields, splits)


def _count_classes(name: str, splits: dict[str, list[Row]]) -> dict[str, tuple[int, ...]]:
    """Return the number of rows of each class by split."""
    counts = {}
    for split, rows in splits.items():
        classes = [number for row in rows for number in np.atleast_1d(row[name]).tolist()]
        counts[split] = tuple(np.bincount(np.array(classes, np.int64)).tolist())
    return counts


def _build_text_column(name: str, limit: int, splits: dict[str, list[Row]]) -> ColumnInfo:
    """Return a column of texts with the histograms of their lengths."""
    lengths = {
        split: tuple(np.bincount([len(row[name]) for row in rows], minlength=limit + 1).tolist())
        for split, rows in splits.items()
    }
    return ColumnInfo(max_length=limit, lengths=lengths)


def write_groups(folder: Path, rows: int = 40, heldout: int = 10) -> Path:
    """Write queries with up to five candidates, one of which has the first token of the query."""
    splits = {"train": _group_rows(rows, 5), "heldout": _group_rows(heldout, 6)}
    fields = {
        name: ColumnInfo(
            max_length=limit, lengths={"train": _spread(limit), "heldout": _spread(limit)}
        )
        for name, limit in (("query", 8), ("document", 16))
    }
    number, listed = {"max_length": 1, "min": 0, "max": 1, "mean": 0.5}, {"max_group_size": MEMBERS}
    fields["document"] = fields["document"].model_copy(update=listed)
    fields["price"] = ColumnInfo(kind="float", std=2.0, **number, **listed)
    fields["brand"] = ColumnInfo(max_length=1, kind="category", num_distinct=9, **listed)
    fields["label"] = ColumnInfo(kind="integer", std=0.5, **number, **listed)
    return write_rows(folder, "groups", fields, splits)


def _spread(limit: int) -> tuple[int, ...]:
    return (0, *[1] * limit)


def _group_rows(count: int, seed: int) -> list[Row]:
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        size = int(draw.integers(2, MEMBERS + 1))
        query = draw.integers(5, 60, int(draw.integers(2, 9))).tolist()
        texts = [draw.integers(5, 60, int(draw.integers(3, 17))).tolist() for _ in range(size)]
        relevant = int(draw.integers(0, size))
        texts[relevant][0] = query[0]
        prices = draw.normal(0.5, 2, size)
        prices[0] = np.nan
        brands = [int(brand) for brand in draw.integers(-1, 9, size)]
        labels = [int(index == relevant) for index in range(size)]
        rows.append(
            {
                "query": query,
                "document": texts,
                "price": prices.tolist(),
                "brand": brands,
                "label": labels,
            }
        )
    return rows


def write_chats(folder: Path, rows: int = 40, heldout: int = 10) -> Path:
    """Write the rows of `packed`; the ends of their documents are answers."""
    splits = {
        name: [{**row, "loss_mask": _ends(row["segments"])} for row in _packed_rows(count, seed)]
        for name, count, seed in (("train", rows, 1), ("heldout", heldout, 2))
    }
    kinds: dict[str, Any] = {"tokens": "tokens", "segments": "segments", "loss_mask": "loss_mask"}
    fields = {name: ColumnInfo(max_length=LENGTH, kind=kind) for name, kind in kinds.items()}
    return write_rows(folder, "chat", fields, splits)


def write_preferences(folder: Path, rows: int = 40, heldout: int = 10) -> Path:
    """Write prompts with two answers; the tokens of chosen answers are smaller."""
    splits = {"train": _preference_rows(rows, 9), "heldout": _preference_rows(heldout, 10)}
    fields = {name: _build_text_column(name, LENGTH, splits) for name in ("chosen", "rejected")}
    mask = ColumnInfo(max_length=LENGTH, kind="loss_mask")
    return write_rows(
        folder, "preferences", fields | {f"{name}_mask": mask for name in fields}, splits
    )


def _preference_rows(count: int, seed: int) -> list[Row]:
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt = draw.integers(5, 40, int(draw.integers(3, 12))).tolist()
        row: Row = {}
        for name, lowest in (("chosen", 40), ("rejected", 60)):
            answer = draw.integers(lowest, lowest + 40, int(draw.integers(2, 20))).tolist()
            row[name] = [*prompt, *answer, 3]
            row[f"{name}_mask"] = [0] * len(prompt) + [1] * (len(answer) + 1)
        rows.append(row)
    return rows


def write_halves(folder: Path, rows: int = 40, heldout: int = 10) -> Path:
    """Write rows of two halves that share their first word, so that pairs can be recognized."""
    splits = {"train": _half_rows(rows, 7), "heldout": _half_rows(heldout, 8)}
    limit = LENGTH // 2
    fields = {name: _build_text_column(name, limit, splits) for name in ("first", "second")}
    return write_rows(folder, "sentence-pairs", fields, splits)


def _half_rows(count: int, seed: int) -> list[Row]:
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        word = int(draw.integers(5, 25))
        first, second = (
            (5 + draw.integers(0, 40, int(draw.integers(4, LENGTH // 2 - 2))) ** 2 % 290).tolist()
            for _ in range(2)
        )
        rows.append({"first": [2, word, *first, 3], "second": [word, *second, 3]})
    return rows


TAGS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")


def write_tagged(folder: Path, rows: int = 40, heldout: int = 10) -> Path:
    """Write sentences in which tokens below 100 begin an entity that the next ones continue."""
    splits = {"train": _tagged_rows(rows, 9), "heldout": _tagged_rows(heldout, 10)}
    fields = {"tokens": _build_text_column("tokens", LENGTH, splits)}
    counts = {
        split: tuple(
            sum(row["tags"].count(number) for row in split_rows) for number in range(len(TAGS))
        )
        for split, split_rows in splits.items()
    }
    fields["tags"] = ColumnInfo(
        max_length=1, kind="integers", class_names=TAGS, class_counts=counts
    )
    return write_rows(folder, "tagged", fields, splits)


def _tagged_rows(count: int, seed: int) -> list[Row]:
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        words = draw.integers(5, VOCABULARY, int(draw.integers(4, LENGTH - 1)))
        tags = []
        for previous, word in zip([0, *words], words, strict=False):
            begins, continues = word < 100, 60 < previous < 100
            tag = f"{'I' if continues else 'B'}-{'PER' if word % 2 else 'LOC'}" if begins else "O"
            tags.append(TAGS.index(tag))
        for index in range(3, len(tags), 5):
            tags[index] = -1
        rows.append({"tokens": [2, *words.tolist(), 3], "tags": [-1, *tags, -1]})
    return rows


WRITERS = {
    "packed": write_packed,
    "fields": write_pairs,
    "chat": write_chats,
    "groups": write_groups,
    "sentence-pairs": write_halves,
    "tagged": write_tagged,
    "preferences": write_preferences,
}
"""Functions that write a dataset, by layout."""


def _ends(segments: list[int]) -> list[int]:
    """Return 1 for each token of the second half of its segment."""
    marks = []
    for index, segment in enumerate(segments):
        first, count = segments.index(segment), segments.count(segment)
        marks.append(int(segment > 0 and index - first >= count / 2))
    return marks


def _packed_rows(count: int, seed: int) -> list[Row]:
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        cuts = sorted(draw.choice(np.arange(4, LENGTH - 2), 2, replace=False).tolist())
        end = int(draw.integers(LENGTH - 2, LENGTH + 1))
        segments = [1 + (position >= cuts[0]) + (position >= cuts[1]) for position in range(end)]
        tokens = (5 + draw.integers(0, 40, end) ** 2 % (VOCABULARY - 5)).tolist()
        padding = [0] * (LENGTH - end)
        rows.append({"tokens": tokens + padding, "segments": segments + padding})
    return rows


def _pair_rows(count: int, seed: int) -> list[Row]:
    draw, others = np.random.default_rng(seed), np.random.default_rng(seed + 100)
    rows = []
    for _ in range(count):
        document = draw.integers(5, VOCABULARY, int(draw.integers(8, LENGTH + 1)))
        query = draw.choice(document, int(draw.integers(3, 13)))
        first = int(query[0])
        label = first % 3
        abstract = others.choice(document, int(others.integers(3, 21)))
        negative = others.integers(5, VOCABULARY, int(others.integers(3, 25)))
        vector = others.normal(size=WIDTH) + 4 * (np.arange(WIDTH) % 3 == label)
        is_topic = (
            first % 2 == 0,
            first % 3 == 0,
            first > VOCABULARY / 2,
            len(document) > LENGTH / 2,
        )
        rows.append(
            {
                "query": query.tolist(),
                "document": document.tolist(),
                "abstract": abstract.tolist(),
                "negative": negative.tolist(),
                "label": label,
                "topics": [topic for topic, holds in enumerate(is_topic) if holds],
                "similarity": (first % 5) / 4,
                "embedding": (vector / np.linalg.norm(vector)).tolist(),
            }
        )
    return rows


def _type(field: ColumnInfo) -> pa.DataType:
    lists = {
        "tokens": TOKENS_TYPE,
        "segments": TOKENS_TYPE,
        "loss_mask": MARKS_TYPE,
        "integers": pa.list_(pa.int64()),
    }
    one = lists[field.kind] if field.kind in lists else VALUE_TYPES[field.kind]
    return pa.list_(one) if field.max_group_size > 1 else one


def write_rows(
    folder: Path,
    layout: str,
    fields: dict[str, ColumnInfo],
    splits: dict[str, list[Row]],
) -> Path:
    """Write a dataset with these rows by split."""
    (folder / "tokenizer").mkdir(parents=True)
    _write_tokenizer(folder / "tokenizer")
    described = {}
    for name, rows in splits.items():
        path = folder / f"{name}-00000.arrow"
        schema = pa.schema([(column, _type(field)) for column, field in fields.items()])
        table = pa.Table.from_pylist(rows, schema=schema).combine_chunks()
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_table(table)
        tokens = sum(len(row[next(iter(fields))]) for row in rows)
        shard = ShardInfo(file=path.name, rows=len(rows), tokens=tokens, sha256=sha256(path))
        described[name] = SplitInfo(rows=len(rows), tokens=tokens, shards=(shard,))
    manifest = DatasetManifest(
        layout=layout, columns=fields, splits=described, tokenizer=FACTS, settings={}
    )
    (folder / "manifest.json").write_text(json.dumps(dump(manifest)))
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token 17 is the word "w17"; the first tokens are special."""
    roles = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    words = [*roles.values(), *(f"w{number}" for number in range(len(roles), VOCABULARY))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=roles["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(roles.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{role}_token": word for role, word in roles.items()}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def read_first_batch(
    task: Task, data: Dataset, facts: CollatorConfig, count: int = 6
) -> dict[str, torch.Tensor]:
    """Return the first training rows, in the order of the dataset, as one microbatch."""
    rows = data.rows("train")
    (piece,) = task.split_batch(rows, np.arange(count), count, task.bucket_lengths(data.manifest))
    arrays = task.build_batch(rows, piece, RandomKey(0, 0, 0), facts)
    return {name: torch.from_numpy(value) for name, value in arrays.items()}
