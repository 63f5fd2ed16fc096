"""The quickstart on a small corpus, from the command line: complete, interrupted and resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regauge.cli import main

DEMO = Path(__file__).resolve().parents[2] / "runs" / "quickstart.toml"
LIBRARY = Path(json.__file__).parent.parent
SMALL = (
    f'source.roots=["{LIBRARY / "asyncio"}", "{LIBRARY / "email"}"]',
    "stage.corpus.tokenizer.vocab_size=1000",
    "stage.corpus.split.heldout_fraction=0.2",
    "stage.warm-up.stop.steps=2",
    "stage.warm-up.batch.rows=8",
    "stage.warm-up.batch.microbatch_rows=4",
    "stage.warm-up.model.config.hidden_size=32",
    "stage.warm-up.model.config.intermediate_size=64",
    "stage.match.batch.rows=32",
    "stage.match.batch.microbatch_rows=16",
    "stage.match.evaluation.every_steps=0",
    'stage.artifact.candidates.backends=["eager", "onnx"]',
    "stage.artifact.candidates.timing_seconds=0.1",
    "stage.artifact.parity.num_texts=32",
    "stage.speed.inference.duration_seconds=0.2",
    "stage.speed.open_loop.duration_seconds=0.2",
)
COMPARED = tuple(
    f"stage.{name}.{assignment}"
    for name in ("fp32", "bf16", "fp32-again")
    for assignment in ("stop.steps=2", "evaluation.every_steps=1")
)


def command(folder: Path, *more: str, file: Path = DEMO) -> list[str]:
    output = f"output.folder={folder}"
    return [sys.executable, "-m", "regauge", "pipeline", str(file), output, *SMALL, *more]


def run(folder: Path, *more: str, file: Path = DEMO) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *more, file=file),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
def test_the_demo_prepares_trains_evaluates_and_reports(tmp_path: Path) -> None:
    done = run(tmp_path / "demo", "stage.match.stop.steps=4", *COMPARED)
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "demo" / "5-evaluate" / "evaluation.json").read_text())
    rows = {row["name"]: row for row in table["rows"]}
    assert list(rows) == ["untrained", "trained", "compiled", "BM25", "reciprocal rank fusion"]
    assert all(0 <= row["recall@1"] <= row["recall@10"] <= 1 for row in rows.values())
    assert all(row["recall@1"] <= row["mrr"] <= 1 for row in rows.values())
    assert rows["BM25"]["mrr"] > rows["untrained"]["mrr"]
    assert rows["compiled"]["recall@10"] == rows["trained"]["recall@10"]
    result = json.loads((tmp_path / "demo" / "10-vectors" / "result.json").read_text())
    assert result["rows"] > 300
    speed = json.loads((tmp_path / "demo" / "6-speed" / "benchmark.json").read_text())
    expected = [(1, 24), (10, 24), (1, 128), (10, 128)]
    assert [(row["batch_size"], row["input_length"]) for row in speed["rows"]] == expected
    page = (tmp_path / "demo" / "11-report" / "report.html").read_text()
    assert "BM25" in page
    assert "bf16 compared with fp32: pass" in page
    assert "fp32 differs from itself" not in page, "the band is wider than two steps of noise"
    report, command = done.stdout.splitlines()[-2:]
    assert "report.html" in report
    artifact, vectors = tmp_path / "demo" / "4-artifact", tmp_path / "demo" / "10-vectors"
    assert command == f"next: regauge serve {artifact} serve.search.vectors={vectors}"
    titles = {line.strip() for line in done.stdout.splitlines()}
    assert {"evaluate", "speed: Startup and memory"} <= titles
    first, last = (
        json.loads((tmp_path / "demo" / stage / "environment.json").read_text())
        for stage in ("2-warm-up", "9-fp32-again")
    )
    assert first["variables"] == last["variables"], "a stage leaves none to the next"

    again = run(tmp_path / "demo", "stage.match.stop.steps=4", *COMPARED)
    assert again.returncode == 0, again.stderr
    assert "step" not in again.stderr
    check_dry_runs(tmp_path / "demo", tmp_path / "settings.json")


def check_dry_runs(folder: Path, run_file: Path) -> None:
    """Check the dry runs of a finished pipeline, of a stale one, and of each verb in its folder."""
    before = {path: path.stat() for path in folder.rglob("*")}
    words = ("stage.match.stop.steps=4", *COMPARED, "--dry-run", "--json")
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr
    stages = json.loads(done.stdout)["stages"]
    assert {stage["state"] for stage in stages} == {"finished"}
    assert all(stage["seconds"] > 0 for stage in stages)
    stale = run(folder, *words, "stage.match.batch.rows=64")
    assert stale.returncode == 2, stale.stderr
    answer = json.loads(stale.stdout)
    reasons = {stage["name"]: stage.get("reason") for stage in answer["stages"]}
    change = "'batch.rows' has changed from 32 to 64"
    assert (reasons["warm-up"], reasons["match"]) == (None, change)
    assert reasons["artifact"] == "its input 'match' is stale"
    assert change in answer["error"]
    for stage in stages:
        run_file.write_text(json.dumps(stage["settings"]))
        # Outside of its pipeline, an export refuses a folder that exists.
        code = 2 if stage["verb"] == "export" else 0
        assert main([stage["verb"], str(run_file), "--dry-run"]) == code, stage["name"]
    runs = [str(folder / name) for name in ("7-fp32", "8-bf16")]
    assert main(["compare", *runs, "--dry-run"]) == 0
    after = {path: path.stat() for path in folder.rglob("*")}
    assert {path: facts.st_mtime_ns for path, facts in after.items()} == {
        path: facts.st_mtime_ns for path, facts in before.items()
    }


@pytest.mark.full
def test_ctrl_c_saves_and_the_same_command_continues(tmp_path: Path) -> None:
    """The pipeline runs up to the interrupted stage; the previous test covers the other stages."""
    file = tmp_path / "quickstart.toml"
    file.write_text(DEMO.read_text().partition("# The model as an artifact")[0])
    plain = "stage.match.execution.compile=off"  # with this many steps, compilation would pay off
    long = ("stage.match.stop.steps=100000", "stage.match.output.log_every_steps=1", plain)
    metrics = tmp_path / "demo" / "3-match" / "metrics.jsonl"
    with subprocess.Popen(
        command(tmp_path / "demo", *long, file=file),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        while not (metrics.exists() and '"train/loss"' in metrics.read_text()):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    last = errors.strip().splitlines()[-1]
    assert last.startswith("regauge: ")
    step = int(last.partition("saved at step ")[2].partition(";")[0])
    assert (metrics.parent / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()

    # One more step: the number of steps may change between attempts.
    further = (f"stage.match.stop.steps={step + 1}", "stage.match.output.log_every_steps=1")
    again = run(tmp_path / "demo", *further, file=file)
    assert again.returncode == 0, again.stderr
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line["step"] for line in lines if line.get("attempt") == 2 and "train/loss" in line]
    assert steps == [step + 1]
