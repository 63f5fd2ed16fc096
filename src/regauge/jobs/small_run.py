"""Small shapes for a rehearsal: few steps, few rows, a small model, the CPU.

| table | in a rehearsal |
| --- | --- |
| `stop` | 40 steps |
| `batch` | 8 rows in microbatches of 2, also per task |
| `evaluation` | 16 rows, before the first and after the last step |
| `model.config` | `SMALL_SIZES` keys shrunk; a `model.path` model is unchanged |
| `optimizer.schedule` | 2 warm-up steps |
| `output` | a temporary folder, metrics in a file, a checkpoint every 5 steps |
| `execution` | 1 process per node, fp32, no compilation, brief checks; at most 2 nodes |
| `accelerator` | `cpu`; a strategy that needs more processes is removed |
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.accelerators import REFERENCE_KIND
from regauge.jobs.job_spec import LaunchRequest
from regauge.supervision.settings import parse_node_range
from regauge.system.processes import World

if TYPE_CHECKING:
    from regauge.training.strategies import Strategy

STEPS, CHECKPOINT_STEPS = 40, 5
ROWS, MICROBATCH_ROWS = 8, 2
MAX_NODES = 2
SMALL_SIZES = {
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embedding_size": 64,
    "head_dim": 32,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "n_inner": 128,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 2,
    "n_head": 2,
    "num_key_value_heads": 2,
}
"""Small model sizes, by transformers configuration key."""
HEADS = {"hidden_size": "num_attention_heads", "n_embd": "n_head"}
"""Model width key -> attention head count key; heads must divide the width."""
JOIN_SECONDS = 120.0
EXECUTION: dict[str, Any] = {
    "processes": 1,
    "threads": 1,
    "precision": "fp32",
    "compile": "off",
    "timeout_seconds": 120,
    "supervision": {"preflight": "brief"},
}


def shrink_request(request: LaunchRequest, folder: Path, output: Path) -> LaunchRequest:
    """Write a run file with small shapes into a folder; return the request to launch it.

    The run of the new file writes to `output`.
    """
    tables = shrink_tables(request.tables, output)
    run_file = folder / f"{request.run_file.stem}.json"
    run_file.write_text(json.dumps(tables), encoding="utf-8")
    return replace(request, run_file=run_file, overrides=(), tables=tables)


def shrink_tables(tables: config.Tables, output: Path) -> config.Tables:
    """Return a training run's tables with small shapes, writing to `output`."""
    small = {key: value for key, value in tables.items() if key not in {"launch", "profile"}}
    execution = tables.get("execution", {})
    nodes = {**_shrink_nodes(execution.get("nodes", {})), "join_seconds": JOIN_SECONDS}
    small["execution"] = {**execution, **EXECUTION, "nodes": nodes}
    small["stop"] = {"steps": STEPS}
    small["batch"] = {"rows": ROWS, "microbatch_rows": MICROBATCH_ROWS}
    small["evaluation"] = {"rows": 16}
    small["accelerator"] = {"kind": REFERENCE_KIND}
    small["output"] = {
        "folder": str(output),
        "trackers": ["jsonl"],
        "log_every_steps": 1,
        "checkpoint": {"every_steps": CHECKPOINT_STEPS, "keep_last": 2, "async_save": False},
    }
    small["optimizer"] = _shrink_optimizer(tables.get("optimizer", {}))
    small["model"] = _shrink_model(tables.get("model", {}))
    if isinstance(task := tables.get("task"), list | tuple):
        small["task"] = [{key: entry[key] for key in entry if key != "batch"} for entry in task]
    if "strategy" in tables and not _is_possible(tables["strategy"], nodes.get("count", 1)):
        del small["strategy"]
    return small


def list_changes(tables: config.Tables, small: config.Tables) -> list[str]:
    """Return the keys that a rehearsal changes, as `key = value`, except for the output folder."""
    before, after = dict(config.flatten(tables)), dict(config.flatten(small))
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    return [f"{key} = {value}" for key, value in changed.items() if key != "output.folder"]


def _shrink_nodes(nodes: dict[str, Any]) -> dict[str, Any]:
    """Return [execution.nodes] for the rehearsal: 1 node, 2 nodes, or `1:2`."""
    if "count" not in nodes:
        return {}
    min_nodes, max_nodes = (min(number, MAX_NODES) for number in parse_node_range(nodes["count"]))
    return {"count": max_nodes if min_nodes == max_nodes else f"{min_nodes}:{max_nodes}"}


def _shrink_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer with 2 warm-up steps; an optimizer given as a text is its kind."""
    table = {"kind": optimizer} if isinstance(optimizer, str) else dict(optimizer)
    schedule = table.get("schedule", {})
    schedule = {"kind": schedule} if isinstance(schedule, str) else dict(schedule)
    return {**table, "schedule": {**schedule, "warmup_steps": 2}}


def _shrink_model(model: dict[str, Any]) -> dict[str, Any]:
    sizes = model.get("config", {})
    if not sizes:
        return model
    heads = {name: SMALL_SIZES[name] for width, name in HEADS.items() if width in sizes}
    numbers = {key: value for key, value in sizes.items() if isinstance(value, int)}
    small = {key: min(numbers[key], SMALL_SIZES[key]) for key in numbers.keys() & SMALL_SIZES}
    return {**model, "config": {**heads, **sizes, **small}}


def _is_possible(table: Any, count: int | str) -> bool:
    """Return whether a strategy works with one process on each of `count` nodes."""
    strategy: Strategy = config.parse_choice("strategies", table)
    size = parse_node_range(count)[1]
    return strategy.obstacle(World(0, size), "adamw") is None
