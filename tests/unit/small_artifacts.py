"""Folders with the documents of an artifact, its run and its dataset; no model computes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from regauge.config import FORMAT
from regauge.system.json_files import write_sealed

RUN_ID = "5d30a533a0a6"


def write_artifact(folder: Path, seed: int = 0, run: Path | None = None, **origin: str) -> Path:
    """Write the files of an artifact with the weights of a seed; return the folder."""
    files = {
        "weights.safetensors": hashlib.sha256(str(seed).encode()).digest() * 8,
        "payload/program.bin": b"program",
        "parity.json": json.dumps({"format": FORMAT, "quality_loss": seed / 1000}).encode(),
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    origin = {"path": str(run or "out/model"), "sha256": f"weights-{seed}"} | origin
    origin["step"] = "final"
    digests = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    document = {"format": FORMAT, "kind": "regauge artifact", "files": digests, "origin": origin}
    write_sealed(folder / "manifest.json", document)
    return folder


def write_run(folder: Path, data: Path, start: str | None = None) -> Path:
    """Write the documents of a finished run and of its dataset; return the folder of the run."""
    _write(data / "manifest.json", build_dataset())
    settings = {
        "seed": 7,
        "task": {"kind": "contrastive"},
        "model": {"init_from": {"path": start}} if start else {"architecture": "bert"},
        "optimizer": {"learning_rate": 0.1},
        "data": {"path": str(data)},
        "batch": {"rows": 8, "microbatch_rows": 8},
        "execution": {},
        "run": {"format": FORMAT, "run_id": RUN_ID, "data_fingerprint": "a1b2"},
    }
    _write(folder / "run.json", settings)
    _write(folder / "environment.json", {"packages": {"torch": "2.13"}, "python": "3.11"})
    _write(folder / "result.json", {"metrics": {"heldout/mrr": 0.5}, "model_step": 40, "usd": 1.5})
    return folder


def build_dataset() -> dict[str, Any]:
    """Return the part of a dataset's manifest that a lineage has."""
    return {
        "splits": {"train": {"rows": 100}, "heldout": {"rows": 10}},
        "settings": {"source": {"kind": "jsonl", "files": ["a.jsonl"]}},
        "tokenizer": {"sha256": "t1"},
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, **document}))
