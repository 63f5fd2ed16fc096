"""Run files of tiny models, as tables, and runs of them that tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import build, merge
from regauge.training.settings import Training

if TYPE_CHECKING:
    from distributed.world import World

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
TASKS: dict[str, dict[str, Any]] = {
    "mlm": {"task": {"kind": "mlm"}, "model": BERT},
    "clm": {"task": {"kind": "clm"}, "model": GPT},
    "llama": {"task": {"kind": "clm"}, "model": LLAMA},
    # At 0.05 the loss falls to 0.001, where the last bits of a cosine are 1e-5 of it.
    "contrastive": {
        "task": {"kind": "contrastive", "shapes": 2, "temperature": 0.5},
        "model": BERT,
    },
    "grouped": {
        "task": {"kind": "contrastive", "shapes": 2, "temperature": 0.5, "negatives": 4},
        "model": BERT,
    },
}
STRATEGIES = {
    1: ("single", "ddp", "zero1", "fsdp"),
    2: ("ddp", "zero1", "fsdp", "shard-grad-op"),
    3: ("ddp", "zero1", "fsdp"),
    4: ("ddp", "zero1", "fsdp", "shard-grad-op", "hsdp"),
}
"""What a model can be spread by, by the number of processes."""


def named(strategy: str) -> dict[str, str]:
    """Return the table of a strategy; fsdp's second sharding goes by its own name here."""
    if strategy == "shard-grad-op":
        return {"kind": "fsdp", "sharding": strategy}
    return {"kind": strategy}


def settings(folder: Path, data: Path, task: str = "mlm", /, **changes: Any) -> Training:
    """Return a run of 12 steps of 8 rows in 4 microbatches; `changes` are laid over it."""
    base: dict[str, Any] = {
        "output": {
            "folder": str(folder),
            "trackers": ("jsonl",),
            "every_steps": 1,
            "checkpoint": {"every_steps": 4, "keep": 10, "writing": "blocking"},
        },
        "seed": 7,
        "data": {"path": str(data), "workers": 0},
        "batch": {"rows": 8, "microbatch_rows": 2},
        "optimizer": {"learning_rate": 0.003, "schedule": {"warmup_steps": 3}},
        "execution": {"precision": "fp32", "threads": 1},
        "accelerator": "cpu",
        "stop": {"steps": 12},
        **TASKS[task],
    }
    return build(Training, merge(base, changes))


@dataclass
class Runs:
    """Runs by size, task and changes, each done once, and every one in a folder of its own."""

    root: Path
    data: dict[str, Path]
    world: Callable[[int], World]
    done: dict[str, Path] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        """Return a folder that no other run has."""
        path = self.root / f"{len(list(self.root.iterdir())):03d}-{name}"
        path.mkdir()
        return path

    def job(self, job: str, size: int, folder: Path, task: str, changes: dict[str, Any]) -> Any:
        """Do a job on every process of a world; return what each returned."""
        coupled = TASKS[task]["task"]["kind"] == "contrastive"
        data = self.data["pairs" if coupled else "packed"]
        return self.world(size).run(job, str(folder), str(data), task, changes)

    def trained(self, size: int, task: str, **changes: Any) -> Path:
        """Return the folder of a finished run."""
        key = json.dumps([size, task, changes], sort_keys=True)
        if key not in self.done:
            folder = self.folder(f"{size}-{task}")
            self.job("train", size, folder, task, changes)
            self.done[key] = folder
        return self.done[key]
