"""Real models in a pipeline that runs four times on growing data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regauge.registry.registry import Registry
from regauge.system.errors import DataError, DifferenceError

RUN_FILE = """\
output.folder = "out"
task.kind = "classify"
rows = { layout = "fields", fields = { text = 16 }, labels = { label = ["a", "b", "c"] } }
prepare.processes = 1
accelerator = "cpu"

[repeat]
increments = ["new"]
deadline_hours = 6

[registry]
path = "registry"
model = "topics"

[[stage]]
verb = "prepare"
name = "base"
source = { kind = "jsonl", files = ["base.jsonl"] }
validation.source.files = ["heldout.jsonl"]
tokenizer.vocab_size = 400

[[stage]]
verb = "prepare"
name = "new"
source = { kind = "jsonl", files = ["data/*.jsonl"] }
tokenizer.path = "@base"

[[stage]]
verb = "train"
data = { path = "@new", workers = 0 }
batch = { rows = 8, microbatch_rows = 8 }
execution = { precision = "fp32", threads = 1 }
optimizer.learning_rate = 0.01
stop.steps = 40
output = { checkpoint.every_steps = 5, trackers = ["jsonl"] }

[stage.model]
architecture = "bert"
init_from.path = "@serving"

[stage.model.config]
hidden_size = 32
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 64
max_position_embeddings = 32

[[stage]]
verb = "export"
name = "artifact"
export.run = "@train"
buckets = { lengths = [16], max_batch_size = 4 }
candidates = { backends = ["eager"], precisions = ["fp32"], threads = [1], timing_seconds = 0.02 }
parity.num_texts = 16

[[stage]]
verb = "evaluate"
data.path = "@base"
execution = { precision = "fp32", threads = 1 }
models = { new = "@artifact", serving = "@serving" }

[[stage]]
verb = "gate"
gate.evaluation = "@evaluate"
gate.metrics.accuracy = { max_loss = 0.05, min_value = 0.5 }

[[stage]]
verb = "predict"
artifact = "@artifact"
source = { kind = "jsonl", files = ["data/*.jsonl"] }
predict.text_fields = ["text"]

[[stage]]
verb = "promote"
promote = { artifact = "@artifact", gate = "@gate", evaluation = "@evaluate" }
"""
WORDS = ("goal team match", "bank loan stock", "hotel train visa")
KILL_SECONDS = 900.0


def write_records(path: Path, count: int, seed: int, shift: int = 0) -> None:
    """Write texts of three classes; a `shift` makes every label wrong."""
    draw = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        label = int(draw.integers(0, 3))
        words = [*draw.choice(WORDS[label].split(), 4), *map(str, draw.integers(0, 99, 3))]
        lines.append(json.dumps({"text": " ".join(words), "label": (label + shift) % 3}) + "\n")
    path.write_text("".join(lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "daily.toml").write_text(RUN_FILE)
    write_records(tmp_path / "base.jsonl", 120, 1)
    write_records(tmp_path / "heldout.jsonl", 60, 2)
    write_records(tmp_path / "data" / "1.jsonl", 80, 3)
    return tmp_path


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "regauge", "pipeline", "daily.toml", *options]


def run(folder: Path, *options: str, code: int = 0) -> str:
    """Run the pipeline; return its output, and its log."""
    done = subprocess.run(
        command(*options), cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def read_results(folder: Path) -> dict[str, Any]:
    """Return the results of the stages of the last round, by name."""
    document = json.loads((folder / "out" / "pipeline.json").read_text())
    return {stage["name"]: stage for stage in document["stages"]}


def find_serving(folder: Path) -> int:
    return Registry(folder / "registry").list_stages("topics")["production"]


def kill_in_training(folder: Path) -> None:
    """Start the pipeline, and kill all of its processes after a checkpoint of `train`."""
    before = set((folder / "out" / "3-train").glob("*/checkpoints/step-*"))
    process = subprocess.Popen(
        command(),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + KILL_SECONDS
        while set((folder / "out" / "3-train").glob("*/checkpoints/step-*")) <= before:
            assert process.poll() is None, "the pipeline has ended without a new checkpoint"
            assert time.monotonic() < deadline, "the pipeline has written no checkpoint"
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(3600)
def test_four_rounds_on_growing_data(folder: Path) -> None:
    run(folder)
    assert find_serving(folder) == 1
    first = read_results(folder)
    assert "nothing to do: round 1 is finished" in run(folder)

    write_records(folder / "data" / "2.jsonl", 80, 4)
    kill_in_training(folder)
    assert find_serving(folder) == 1
    output = run(folder)
    assert "base: prepare was finished earlier" in output
    assert "resuming from step" in output.lower()
    second = read_results(folder)
    assert find_serving(folder) == 2
    assert second["base"]["folder"] == first["base"]["folder"]
    start = second["train"]["settings"]["model"]["init_from"]["path"]
    assert (folder / start).samefile(folder / first["train"]["folder"])
    assert second["new"]["result"]["train_rows"] <= 80, "only the new file is prepared"
    assert second["gate"]["result"]["serving_version"] == "1"

    write_records(folder / "data" / "3.jsonl", 160, 5, shift=1)
    output = run(folder, code=DifferenceError.exit_code)
    assert "the gate refuses the new model, version 2 keeps serving: accuracy is" in output
    assert find_serving(folder) == 2
    refused = read_results(folder)["artifact"]["folder"]

    write_records(folder / "data" / "3.jsonl", 80, 5)
    reasons = run(folder, "--why")
    assert "data source: data/3.jsonl changed" in reasons
    assert "base: skip: nothing has changed since round 1" in reasons
    run(folder)
    assert find_serving(folder) == 3
    assert read_results(folder)["artifact"]["folder"] != refused
    damaged = folder / read_results(folder)["artifact"]["folder"] / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\0\0\0\1")
    (folder / read_results(folder)["promote"]["folder"] / "done.json").unlink()
    output = run(folder, "stage.gate.gate.metrics.accuracy.max_loss=0.5", code=DataError.exit_code)
    assert "has changed since it was exported" in output
    assert find_serving(folder) == 3
