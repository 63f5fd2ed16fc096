"""Run files of tiny pipelines, whose gate refuses the model unless an override widens its band."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regauge import config

REFUSED = 2.0
"""Minimum accuracy of the gate, which no model reaches."""
PASS = "stage.gate.gate.metrics.accuracy.min_value=0.0"  # noqa: S105 - an override, no password
"""The override with which the gate passes."""
NODES = {"count": 2, "join_seconds": 60.0}
WORDS = ("goal team match", "bank loan stock", "hotel train visa")
MODEL: dict[str, Any] = {
    "architecture": "bert",
    "config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    },
    "init_from": {"path": "@serving"},
}


def write_pipeline(path: Path, root: Path, launch: dict[str, Any]) -> Path:
    """Write a pipeline that repeats, from texts to a promoted model, and its data in `root`."""
    for name, count in (("texts", 80), ("heldout", 24)):
        records = ({"text": f"{WORDS[n % 3]} {n}", "label": n % 3} for n in range(count))
        text = "".join(json.dumps(record) + "\n" for record in records)
        (root / f"{name}.jsonl").write_text(text)
    execution = {"precision": "fp32", "threads": 1}
    training = {"processes": 1, "timeout_seconds": 60, "supervision": {"preflight": "brief"}}
    stages: list[dict[str, Any]] = [
        {
            "verb": "prepare",
            "name": "data",
            "source": {"kind": "jsonl", "files": [str(root / "texts.jsonl")]},
            "validation": {"source": {"files": [str(root / "heldout.jsonl")]}},
            "tokenizer": {"vocab_size": 300},
        },
        {
            "verb": "train",
            "data": {"path": "@data", "workers": 0},
            "batch": {"rows": 8, "microbatch_rows": 4},
            "execution": {**execution, **training, "compile": "off", "nodes": NODES},
            "stop": {"steps": 6},
            "model": MODEL,
        },
        {
            "verb": "export",
            "name": "artifact",
            "export": {"run": "@train"},
            "buckets": {"lengths": [16], "max_batch_size": 4},
            "candidates": {
                "backends": ["eager"],
                "precisions": ["fp32"],
                "threads": [1],
                "timing_seconds": 0.02,
            },
            "parity": {"num_texts": 16},
        },
        {
            "verb": "evaluate",
            "data": {"path": "@data"},
            "execution": execution,
            "models": {"new": "@artifact", "serving": "@serving"},
        },
        build_gate("gate", "@evaluate"),
        {
            "verb": "promote",
            "promote": {"artifact": "@artifact", "gate": "@gate", "evaluation": "@evaluate"},
        },
    ]
    tables = {
        "output": {"folder": str(root / "daily")},
        "task": {"kind": "classify"},
        "rows": {"layout": "fields", "fields": {"text": 16}, "labels": {"label": ["a", "b", "c"]}},
        "accelerator": "cpu",
        "repeat": {"increments": ["data"]},
        "registry": {"path": str(root / "registry"), "model": "topics"},
        "stage": stages,
        "launch": launch,
    }
    path.write_text(json.dumps(tables))
    return path


def write_short_pipeline(
    path: Path, run: Path, root: Path, launch: dict[str, Any] | None = None
) -> Path:
    """Write a pipeline of three stages: the training of a run file, a gate, and another gate."""
    training = json.loads(run.read_text())
    del training["output"]["folder"]
    training["execution"]["nodes"] = NODES
    evaluation = write_evaluation(root / "evaluation")
    gates = [build_gate("gate", evaluation), build_gate("last", evaluation)]
    gates[-1]["gate"]["metrics"]["accuracy"]["min_value"] = 0.0
    stages = [{"verb": "train", **training}, *gates]
    tables = {"output": {"folder": str(root / path.stem)}, "stage": stages}
    path.write_text(json.dumps({**tables, "launch": launch or {}}))
    return path


def build_gate(name: str, evaluation: str) -> dict[str, Any]:
    """Return a stage with a gate that refuses every model."""
    metrics = {"accuracy": {"max_loss": 0.1, "min_value": REFUSED}}
    return {"verb": "gate", "name": name, "gate": {"evaluation": evaluation, "metrics": metrics}}


def write_evaluation(folder: Path) -> str:
    """Write an evaluation of one model; return its folder."""
    folder.mkdir(exist_ok=True)
    document = {
        "rows": [{"name": "new", "accuracy": 0.5}],
        "identity": {"data_fingerprint": "0" * 64, "heldout_rows": 10},
        "settings": {"models": {"new": "model"}},
    }
    config.save(folder / "evaluation.json", document)
    return str(folder)


def list_states(status: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["state"] for stage in status["stages"]}


def read_done_times(folder: Path) -> dict[str, int]:
    """Return the time of the record of each finished stage by its folder."""
    paths = [*folder.glob("*/done.json"), *folder.glob("*/*/done.json")]
    return {str(path.parent.relative_to(folder)): path.stat().st_mtime_ns for path in paths}
