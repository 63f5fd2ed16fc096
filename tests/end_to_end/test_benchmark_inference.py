"""`benchmark` of artifacts: alternating repeats, document, CSV file, chart and report page."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from regauge.accelerators.cpu import Cpu
from regauge.cli import main
from regauge.commands import benchmark, pipeline
from regauge.config import FORMAT, build
from regauge.evaluation.benchmark import inference
from regauge.evaluation.benchmark.latency_worker import (
    LoadedArtifact,
    build_request,
    measure,
    measure_loads,
)
from regauge.evaluation.benchmark.load_generator import MIN_REQUESTS
from regauge.evaluation.benchmark.settings import BenchmarkSettings, TrainingBenchmarkSettings
from regauge.inference.export.artifact import open_artifact
from regauge.inference.export.engine import load_engine
from regauge.system import jsonl
from regauge.system.errors import DataError, NoProgressError, SettingsError
from regauge.system.worker import LINES

WIDTH, LAYERS, INNER = 32, 2, 64
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "rail", "wheel", "gauge", "track", "train")
QUICK = (
    "inference.duration_seconds=0.05",
    "inference.batch_sizes=[1,3]",
    "inference.input_lengths=[32,13]",
    "inference.repeats=2",
    "inference.warmup_requests=1",
    "open_loop.duration_seconds=0.1",
    "open_loop.load_fractions=[0.5]",
    "open_loop.requests_per_second=[40]",
    "execution.price.usd_per_hour=3.6",
    "execution.price.as_of=2026-11-01",
)


def export_tiny(folder: Path, name: str, backend: str) -> Path:
    """Export the model `tiny` in a folder, for one thread; return the artifact."""
    options = (
        f'candidates.backends=["{backend}"]',
        'candidates.precisions=["fp32"]',
        'candidates.quantization=["none"]',
        "candidates.timing_seconds=0.01",
        "candidates.threads=[1]",
        "parity.num_texts=16",
    )
    target = folder / name
    assert main(["export", "--model", str(folder / "tiny"), "--to", str(target), *options]) == 0
    return target


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an artifact of a tiny BERT, as `export` writes it."""
    folder = tmp_path_factory.mktemp("artifact")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=INNER,
        max_position_embeddings=48,
    )
    BertModel(config).save_pretrained(folder / "model")
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, WORDS[1]))
    words.pre_tokenizer = Whitespace()
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder / "model")
    shutil.move(folder / "model", folder / "tiny")
    export_tiny(folder, "first", "eager")
    shutil.copytree(folder / "first", folder / "second")
    return folder


@pytest.fixture(scope="module")
def bench_folder(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a benchmark of two artifacts."""
    folder = tmp_path_factory.mktemp("bench") / "out"
    both = (str(artifact / "first"), str(artifact / "second"))
    assert main(["benchmark", *both, f"output.folder={folder}", *QUICK]) == 0
    return folder


def read_document(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "benchmark.json").read_text())
    return document


@pytest.mark.full
def test_figures_are_computed_from_the_lines_of_each_repeat(bench_folder: Path) -> None:
    document = read_document(bench_folder)
    assert (document["format"], document["kind"], document["repeats"]) == (FORMAT, "inference", 2)
    assert [
        (row["artifact"], row["batch_size"], row["input_length"]) for row in document["rows"]
    ] == [
        (name, batch_size, length)
        for name in ("first", "second")
        for length in (32, 13)
        for batch_size in (1, 3)
    ]
    for row in document["rows"]:
        repeats = [
            jsonl.read_lines(bench_folder / "repeats" / f"{number}-{row['artifact']}" / LINES)
            for number in (1, 2)
        ]
        shape = {name: row[name] for name in ("batch_size", "input_length")}
        loops = [line for repeat in repeats for line in repeat if line.get("closed_loop") == shape]
        closed = row["closed_loop"]
        assert closed["num_requests"] == [len(loop["latencies_ms"]) for loop in loops]
        assert min(closed["num_requests"]) >= MIN_REQUESTS
        rates = [len(loop["latencies_ms"]) / loop["duration_seconds"] for loop in loops]
        rate = statistics.median(rates)
        assert closed["inferences_per_second"] == pytest.approx(row["batch_size"] * rate)
        loads = [(load["load_fraction"], load["requests_per_second"]) for load in row["open_loop"]]
        assert loads == [(0.5, pytest.approx(statistics.median(rates) / 2)), (None, 40)]


@pytest.mark.full
def test_the_fraction_of_the_peak_uses_the_counted_operations(bench_folder: Path) -> None:
    document = read_document(bench_folder)
    weights = LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
    artifacts_by_name = {artifact["name"]: artifact for artifact in document["artifacts"]}
    for row in document["rows"]:
        closed, artifact = row["closed_loop"], artifacts_by_name[row["artifact"]]
        flops = row["input_length"] * (2 * weights + 4 * LAYERS * WIDTH * row["input_length"])
        assert closed["flops_per_inference"] == flops
        fraction = flops * closed["inferences_per_second"] / artifact["peak_flops_per_second"]
        assert closed["peak_fraction"] == pytest.approx(fraction)
        assert "measured here" in artifact["peak_source"]
    assert "2 N + 4 L h S" in document["formulas"]["flops_per_inference"]


@pytest.mark.full
def test_an_artifact_has_startup_memory_and_price(bench_folder: Path) -> None:
    for artifact in read_document(bench_folder)["artifacts"]:
        startup = artifact["startup"]
        assert all(seconds > 0 for seconds in startup.values())
        assert artifact["peak_memory_bytes"] > 1e6
        assert artifact["price"]["usd_per_hour"] == 3.6
        assert artifact["price"]["as_of"] == "2026-11-01"
        assert (artifact["model"], artifact["backend_description"]) == ("tiny", "eager fp32")
        assert artifact["machine"]["threads"] == 1
        assert artifact["tdp_watts"] is None


@pytest.mark.full
def test_requests_are_computed_in_the_buckets_of_the_artifact(bench_folder: Path) -> None:
    buckets = {
        (row["batch_size"], row["input_length"]): row["buckets"]
        for row in read_document(bench_folder)["rows"]
    }
    assert buckets[3, 32] == [[3, 32]]
    assert buckets[1, 13] == [[1, 14]]


def load_first(artifact: Path, folder: Path) -> LoadedArtifact:
    opened = open_artifact(artifact / "first")
    engine = load_engine(opened, batch_invariant=False)
    return LoadedArtifact(build_settings(folder, first=artifact), 1, "first", opened, engine)


def test_a_request_has_real_tokens_of_the_input_length(artifact: Path, tmp_path: Path) -> None:
    loaded = load_first(artifact, tmp_path)
    request = build_request(loaded, 3, 13)
    ((tokens, lengths),) = request.batches
    assert (tokens.shape, lengths.tolist(), request.tokens) == ((3, 14), [13] * 3, 39)
    assert (tokens[:, 13:] == 0).all()
    assert len(np.unique(tokens[:, :13])) > len(WORDS) // 2
    assert int(tokens.max()) < len(WORDS)
    assert np.array_equal(build_request(loaded, 3, 13).batches[0][0], tokens)


@pytest.mark.full
def test_the_machine_has_the_threads_of_an_artifact_without_torch(
    artifact: Path, tmp_path: Path
) -> None:
    target = export_tiny(artifact, "graph", "openvino")
    torch.set_num_threads(2)
    settings = build_settings(tmp_path, graph=target)
    line = next(measure(settings, "graph", 1, time.monotonic()))
    assert line["machine"]["threads"] == 1


@pytest.mark.full
def test_energy_is_counted_from_the_first_timed_request(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_first(artifact, tmp_path)
    answered: list[int] = []
    monkeypatch.setattr(
        LoadedArtifact, "compute", lambda _, request: answered.append(request.batch_size)
    )

    def meter(_: Cpu) -> Callable[[], float]:
        before = len(answered)
        return lambda: 0.5 * (len(answered) - before)

    monkeypatch.setattr(Cpu, "start_energy_meter", meter)
    line = next(measure_loads(loaded, build_request(loaded, 1, 8)))
    assert line["joules"] == 0.5 * len(line["latencies_ms"])
    assert len(answered) == len(line["latencies_ms"]) + loaded.settings.inference.warmup_requests


@pytest.mark.full
def test_csv_file_chart_and_page_are_written(
    bench_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (bench_folder / "benchmark.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * 4 * 3
    assert {line["load"] for line in table} == {"closed_loop", "open_loop"}
    chart = ET.fromstring((bench_folder / "benchmark.svg").read_text())  # noqa: S314 - drawn here
    assert chart.tag.endswith("svg")
    assert "--series-2" in (bench_folder / "benchmark.svg").read_text()
    assert main(["report", str(bench_folder), f"output.folder={tmp_path}"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Open loop: Poisson arrivals, latency from the moment of arrival" in page
    assert "Inferences per second, closed loop" in page
    assert "times the median latency of first at 4 shapes (batch x length)" in page
    assert main(["report", str(bench_folder), f"output.folder={tmp_path}", "--format", "md"]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| batch x length | p50 ms | latency ratio |" in text
    assert "times the median latency of first" in capsys.readouterr().out


def test_a_report_on_an_artifact_folder_succeeds(artifact: Path, tmp_path: Path) -> None:
    assert main(["report", str(artifact / "first"), f"output.folder={tmp_path}"]) == 0


def test_repeats_alternate_between_the_artifacts(
    tmp_path: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[int, str]] = []
    monkeypatch.setattr(
        inference, "_measure_once", lambda _, name, number: order.append((number, name)) or []
    )
    monkeypatch.setattr(inference.inference_summary, "build_document", lambda *_: {})
    inference.run(
        build_settings(tmp_path / "out", first=artifact / "first", other=artifact / "second")
    )
    assert order == [(number, name) for number in (1, 2, 3) for name in ("first", "other")]


def build_settings(folder: Path, **artifacts: Path) -> BenchmarkSettings:
    named = {name: str(path) for name, path in artifacts.items()}
    inference = {"artifacts": named, "input_lengths": [16]}
    return build(BenchmarkSettings, {"output": {"folder": str(folder)}, "inference": inference})


def test_a_dry_run_shows_the_plan_without_importing_torch(tmp_path: Path, artifact: Path) -> None:
    words = ["benchmark", str(artifact / "first"), f"output.folder={tmp_path / 'out'}", *QUICK]
    code = (
        "import sys; from regauge.cli import main; "
        f"code = main({[*words, '--dry-run', '--json']!r}); "
        "sys.exit(code or 3 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["batch_x_length"] == ["1 x 32", "3 x 32", "1 x 13", "3 x 13"]
    assert plan["requests_per_second"] == ["0.5 of the closed loop", "40"]
    assert plan["artifacts"][0]["backend_description"] == "eager fp32"
    assert plan["price"] == "3.6 USD per hour (run file, on-demand, 2026-11-01)"
    assert plan["min_seconds"] == 2
    assert not (tmp_path / "out").exists()


def test_default_lengths_are_limited_to_what_the_artifacts_accept(
    tmp_path: Path, artifact: Path
) -> None:
    folders = {"first": str(artifact / "first")}
    inference = {"artifacts": folders, "batch_sizes": (2,)}
    tables = {"inference": inference, "output": {"folder": str(tmp_path / "out")}}
    assert benchmark.plan(build(BenchmarkSettings, tables))["batch_x_length"] == ["2 x 48"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["inference.input_lengths=[64]"],
            "accepts at most 48 tokens, but inference.input_lengths contains 64",
        ),
        (["execution.price.instance=inf2.xlarg"], "did you mean 'inf2.xlarge'?"),
        (
            ["inference.compare=[['first','none']]"],
            "inference.compare names an unknown artifact 'none'",
        ),
        (["inference.batch_sizes=[2,2]"], "batch_sizes has duplicates: 2, 2"),
        (["inference.batch_size=[2]"], "did you mean 'batch_sizes'?"),
        (["inference.artifacts.a/b=out"], "invalid artifact name 'a/b'"),
        (["{first}"], "two artifacts have the name"),
        (["{none}"], "manifest.json is missing"),
        (["output.folder={first}"], "is an artifact or a dataset"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(
    artifact: Path,
    tmp_path: Path,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = {"first": artifact / "first", "none": tmp_path / "none"}
    arguments = [word.format(**folders) for word in words]
    folder = f"output.folder={tmp_path / 'out'}"
    assert main(
        ["benchmark", str(artifact / "first"), folder, "inference.input_lengths=[16]", *arguments]
    )
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


def test_the_document_of_another_benchmark_is_not_replaced(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "benchmark.json").write_text('{"kind": "training", "rows": []}')
    with pytest.raises(SettingsError, match="is not an inference benchmark"):
        benchmark.run(build_settings(tmp_path, first=artifact / "first"))
    (tmp_path / "benchmark.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read: Expecting"):
        benchmark.run(build_settings(tmp_path, first=artifact / "first"))
    refusal = benchmark.plan(build_settings(tmp_path, first=artifact / "first"))["error"]
    assert "cannot be read: Expecting" in refusal
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]


@pytest.mark.full
def test_a_modified_artifact_is_reported_by_name(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(artifact / "first", broken)
    data = bytearray((broken / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (broken / "weights.safetensors").write_bytes(data)
    assert main(["benchmark", str(broken), f"output.folder={tmp_path / 'out'}", *QUICK]) == 64
    assert "regauge: broken: " in (error := capsys.readouterr().err)
    assert "has changed since it was exported" in error


def test_an_artifact_without_progress_is_reported_by_name(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "_max_silence_seconds", lambda _: 0.0)
    with pytest.raises(NoProgressError, match="slow made no progress for 0 s"):
        inference._measure_once(build_settings(tmp_path, slow=artifact / "first"), "slow", 1)


def test_artifacts_are_named_by_the_part_of_the_path_that_differs(tmp_path: Path) -> None:
    runs = [tmp_path / "fp32" / "artifact", tmp_path / "bf16" / "artifact", tmp_path / "other"]
    assert list(inference.name_artifacts(runs)) == ["fp32", "bf16", "other"]
    same = [tmp_path / "a" / "best", tmp_path / "b" / "best"]
    assert list(inference.name_artifacts(same)) == ["a-best", "b-best"]


def test_a_benchmark_stage_measures_artifacts_or_with_a_flag_training(
    tmp_path: Path,
) -> None:
    file = tmp_path / "all.toml"
    file.write_text(f"""
[output]
folder = "{tmp_path / "out"}"
[data]
path = "data"
[task]
kind = "mlm"
[model]
architecture = "bert"
config = {{}}
[batch]
rows = 8
microbatch_rows = 4
[optimizer]
learning_rate = 0.1
[stop]
steps = 1
[[stage]]
verb = "export"
export.model = "somewhere"
[[stage]]
verb = "benchmark"
name = "latency"
inference.artifacts.kept = "@export"
[[stage]]
verb = "benchmark --training"
name = "scaling"
benchmark.repeats = 1
""")
    _, latency, scaling = pipeline.load(file, ()).stages
    assert isinstance(latency.settings, BenchmarkSettings)
    assert latency.settings.inference.artifacts == {"kept": str(tmp_path / "out" / "1-export")}
    assert latency.settings.output.folder == str(tmp_path / "out" / "2-latency")
    assert latency.inputs == ("export",)
    assert isinstance(scaling.settings, TrainingBenchmarkSettings)
    assert scaling.settings.benchmark.repeats == 1
