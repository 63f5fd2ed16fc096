"""Run files of tiny models, as tables, and runs of them that tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from regauge.config import build, merge, parse_choice
from regauge.evaluation.settings import EvaluateSettings
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from distributed.world import World

ACCELERATOR = os.environ.get("REGAUGE_TEST_ACCELERATOR", "cpu")
"""The kind of device on which these tests train."""
BERT = {
    "architecture": "bert",
    "dropout": 0.1,
    "config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    },
}
LAST_LAYER = {**BERT, "trainable_layers": 1}
GPT = {
    "architecture": "gpt2",
    "dropout": 0.1,
    "config": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32},
}
LLAMA = {
    "architecture": "llama",
    "config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    },
}
ORDERED = {"epsilon": 1e-6}
"""Ranking losses ignore components that all candidates share; those gradients are rounding."""
TASKS: dict[str, dict[str, Any]] = {
    "mlm": {"task": {"kind": "mlm"}, "model": BERT},
    "last-layer": {"task": {"kind": "mlm"}, "model": LAST_LAYER},
    "next-sentence": {"task": {"kind": "mlm", "next_sentence": True}, "model": BERT},
    "clm": {"task": {"kind": "clm"}, "model": GPT},
    "sft": {"task": {"kind": "sft"}, "model": LLAMA},
    "dpo": {"task": {"kind": "dpo", "max_buckets": 2}, "model": GPT},
    "llama": {"task": {"kind": "clm"}, "model": LLAMA},
    # At 0.05 the loss falls to 0.001, where the last bits of a cosine are 1e-5 of it.
    "contrastive": {
        "task": {"kind": "contrastive", "max_buckets": 2, "temperature": 0.5},
        "model": BERT,
    },
    "grouped": {
        "task": {
            "kind": "contrastive",
            "max_buckets": 2,
            "temperature": 0.5,
            "negatives_group_size": 4,
        },
        "model": BERT,
    },
    "negatives": {
        "task": {
            "kind": "contrastive",
            "document": ("document", "abstract"),
            "negatives": ("negative",),
            "matryoshka_dims": (32, 8),
            "max_buckets": 2,
            "temperature": 0.5,
        },
        "model": BERT,
    },
    "triplet": {
        "task": {
            "kind": "triplet",
            "anchor": "query",
            "positive": "document",
            "max_buckets": 2,
            "distance": "euclidean",
            "margin": 2.0,
        },
        "model": BERT,
    },
    "similarity": {
        "task": {
            "kind": "similarity",
            "text_fields": ("query", "document"),
            "label": "similarity",
            "max_buckets": 2,
        },
        "model": BERT,
    },
    "distill": {
        "task": {
            "kind": "distill",
            "text_fields": ("query", "document"),
            "objective": "cosine",
            "max_buckets": 2,
        },
        "model": BERT,
    },
    "rank": {
        "task": {
            "kind": "rank",
            "numeric_features": ("price",),
            "categorical_features": ("brand",),
            "interactions": {"hidden": (16,), "width": 4, "buckets": 50},
            "max_buckets": 2,
        },
        "model": BERT,
        "optimizer": ORDERED,
    },
    "frozen": {
        "task": {
            "kind": "rank",
            "objective": "pairwise",
            "numeric_features": ("price",),
            "interactions": {"hidden": (16,), "rank": 4, "experts": 2, "structure": "stacked"},
            "max_buckets": 2,
        },
        "model": LAST_LAYER,
        "optimizer": ORDERED,
    },
    "apart": {
        "task": {
            "kind": "rank",
            "encoders": "separate",
            "numeric_features": ("price",),
            "interactions": {"hidden": (16,)},
            "max_buckets": 2,
        },
        "model": LAST_LAYER,
        "optimizer": ORDERED,
    },
    "classify": {
        "task": {
            "kind": "classify",
            "text_fields": ("query", "document"),
            "classes": 3,
            "max_buckets": 2,
        },
        "model": merge(BERT, {"config": {"max_position_embeddings": 48}}),
    },
}
TASKS["balanced"] = {
    "task": {
        **TASKS["classify"]["task"],
        "label_smoothing": 0.1,
        "class_weights": "balanced",
    },
    "model": TASKS["classify"]["model"],
}
TASKS["multi-label"] = {
    "task": {
        **{name: value for name, value in TASKS["classify"]["task"].items() if name != "classes"},
        "label": "topics",
        "problem_type": "multi-label",
        "class_weights": "balanced",
    },
    "model": TASKS["classify"]["model"],
}
TASKS["tokens"] = {"task": {"kind": "tokens", "max_buckets": 2}, "model": BERT}
TASKS["several"] = {
    "task": (
        {**TASKS["contrastive"]["task"], "name": "search", "weight": 2},
        {
            "kind": "mlm",
            "name": "words",
            "data": {"path": "packed"},
            "batch": {"rows": 4, "microbatch_rows": 1},
        },
        {**TASKS["classify"]["task"], "name": "topics"},
    ),
    "model": TASKS["classify"]["model"],
}
FULL = pytest.mark.full
DATA = {"fields": "pairs"}
"""Names of datasets that differ from their layout."""
STRATEGIES = {
    1: ("single", "ddp", "zero1", "fsdp"),
    2: ("ddp", "zero1", "fsdp", "shard-grad-op"),
    3: ("ddp", "zero1", "fsdp"),
    4: ("ddp", "zero1", "fsdp", "shard-grad-op", "hsdp"),
}
"""Strategies by the number of processes."""


def cases(every: Iterable[tuple[Any, ...]], first: Collection[tuple[Any, ...]]) -> list[Any]:
    """Return every case; those that are not in `first` run only in `make test-rest`."""
    return [pytest.param(*case, marks=[] if case in first else FULL) for case in every]


def strategy_table(strategy: str) -> dict[str, str]:
    """Return the table of a strategy; "shard-grad-op" is the second sharding of fsdp."""
    if strategy == "shard-grad-op":
        return {"kind": "fsdp", "sharding": strategy}
    return {"kind": strategy}


def settings(folder: Path, data: Path, task: str = "mlm", /, **changes: Any) -> TrainSettings:
    """Return a run of 12 steps of 8 rows in 4 microbatches, merged with `changes`.

    A model with a path replaces the model of the task.
    """
    base: dict[str, Any] = {
        "output": {
            "folder": str(folder),
            "trackers": ("jsonl",),
            "log_every_steps": 1,
            "checkpoint": {"every_steps": 4, "keep_last": 10, "async_save": False},
        },
        "seed": 7,
        "data": {"path": str(data), "workers": 0},
        "batch": {"rows": 8, "microbatch_rows": 2},
        "optimizer": {"learning_rate": 0.003, "schedule": {"warmup_steps": 3}},
        "execution": {"precision": "fp32", "threads": 1},
        "accelerator": ACCELERATOR,
        "stop": {"steps": 12},
    }
    tables = merge(merge(base, TASKS[task]), changes)
    if isinstance(tables["task"], tuple):  # its dataset is next to the dataset of the run
        tables["task"] = tuple(
            merge(table, {"data": {"path": str(data.parent / table["data"]["path"])}})
            if "data" in table
            else table
            for table in tables["task"]
        )
    if "path" in (model := changes.get("model", {})):
        tables["model"] = model
    return build(TrainSettings, tables)


def evaluation(
    folder: Path, data: Path, task: str, models: dict[str, Path], /, **changes: Any
) -> EvaluateSettings:
    """Return the settings of an offline evaluation, merged with `changes`."""
    tables: dict[str, Any] = {
        "output": {"folder": str(folder)},
        "data": {"path": str(data)},
        "task": TASKS[task]["task"],
        "models": {name: str(path) for name, path in models.items()},
        "evaluate": {"untrained": False, "baselines": False},
        "accelerator": ACCELERATOR,
        "execution": {"precision": "fp32", "threads": 1},
    }
    return build(EvaluateSettings, merge(tables, changes))


@dataclass
class Runs:
    """Runs by size, task and changes; each is trained once, in a separate folder."""

    root: Path
    data: dict[str, Path]
    world: Callable[[int], World]
    done: dict[str, Path] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        """Return a new folder."""
        path = self.root / f"{len(list(self.root.iterdir())):03d}-{name}"
        path.mkdir()
        return path

    def job(self, job: str, size: int, folder: Path, task: str, changes: dict[str, Any]) -> Any:
        """Run a job on every process of a world; return the results in the order of ranks."""
        return self.world(size).run(job, str(folder), str(self.find_data(task)), task, changes)

    def find_data(self, task: str) -> Path:
        """Return the dataset of a task."""
        table = TASKS[task]["task"]
        layout = "fields"
        if not isinstance(table, tuple):
            layout = parse_choice("tasks", table).row_layout()
        return self.data[DATA.get(layout, layout)]

    def train_once(self, size: int, task: str, *, job: str = "train", **changes: Any) -> Path:
        """Return the folder of a finished run."""
        key = json.dumps([job, size, task, changes], sort_keys=True)
        if key not in self.done:
            folder = self.folder(f"{size}-{task}")
            self.job(job, size, folder, task, changes)
            self.done[key] = folder
        return self.done[key]
