"""`benchmark` of artifacts: turns in alternation, one document, tables, a chart, and a page."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from regauge import jsonl
from regauge.accelerators.cpu import Cpu
from regauge.artifacts import artifact as artifacts
from regauge.artifacts.engine import loaded
from regauge.benchmarking import inference
from regauge.benchmarking.latency_worker import Bench, loads, request_of
from regauge.benchmarking.load_generator import FEWEST, percentile
from regauge.benchmarking.settings import Benchmarking, Measuring
from regauge.cli import main
from regauge.config import build
from regauge.errors import NoProgressError, SettingsError
from regauge.reporting.inference_section import PERCENTILES
from regauge.verbs import benchmark, pipeline
from regauge.worker import LINES

WIDTH, LAYERS, INNER = 32, 2, 64
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "rail", "wheel", "gauge", "track", "train")
QUICK = (
    "inference.seconds=0.05",
    "inference.rows=[1,3]",
    "inference.lengths=[32,13]",
    "inference.turns=2",
    "inference.warmup=1",
    "arrivals.seconds=0.1",
    "arrivals.shares=[0.5]",
    "arrivals.rates=[40]",
    "execution.price.usd_per_hour=3.6",
    "execution.price.as_of=2026-11-01",
)


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
    made = (
        'candidates.backends=["eager"]',
        'candidates.precisions=["fp32"]',
        "candidates.seconds=0.01",
        "candidates.threads=[1]",
        "proof.texts=16",
    )
    where = ("--model", str(folder / "tiny"), "--to", str(folder / "first"))
    assert main(["export", *where, *made]) == 0
    shutil.copytree(folder / "first", folder / "second")
    return folder


@pytest.fixture(scope="module")
def measured(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a whole benchmark of two artifacts."""
    folder = tmp_path_factory.mktemp("bench") / "out"
    both = (str(artifact / "first"), str(artifact / "second"))
    assert main(["benchmark", *both, f"output.folder={folder}", *QUICK]) == 0
    return folder


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "benchmark.json").read_text())
    return found


def test_figures_follow_from_what_each_turn_wrote_down(measured: Path) -> None:
    found = document(measured)
    assert (found["format"], found["measured"], found["turns"]) == (1, "inference", 2)
    assert [(row["artifact"], row["rows"], row["length"]) for row in found["rows"]] == [
        (name, rows, length)
        for name in ("first", "second")
        for length in (32, 13)
        for rows in (1, 3)
    ]
    for row in found["rows"]:
        turns = [
            jsonl.whole(measured / "turns" / f"{number}-{row['artifact']}" / LINES)
            for number in (1, 2)
        ]
        where = {"rows": row["rows"], "length": row["length"]}
        loops = [told for turn in turns for told in turn if told.get("closed") == where]
        closed = row["closed"]
        assert closed["requests"] == [len(each["milliseconds"]) for each in loops]
        assert min(closed["requests"]) >= FEWEST
        for percent in PERCENTILES:
            each = [percentile(loop["milliseconds"], percent) for loop in loops]
            known = [value for value in each if value is not None]
            wanted = statistics.median(known) if len(known) == len(each) else None
            assert closed[f"p{percent}_ms"] == wanted
        rates = [len(loop["milliseconds"]) / loop["seconds"] for loop in loops]
        rate = statistics.median(rates)
        assert closed["inferences_per_second"] == pytest.approx(row["rows"] * rate)
        assert closed["tokens_per_second"] == pytest.approx(row["rows"] * row["length"] * rate)
        usd = 3.6 / 3600 / (row["rows"] * rate) * 1e6
        assert closed["usd_per_million_inferences"] == pytest.approx(usd)
        shares = [(came["share"], came["requests_per_second"]) for came in row["open"]]
        assert shares == [(0.5, pytest.approx(statistics.median(rates) / 2)), (None, 40)]


def test_the_share_of_the_peak_has_its_operations_counted_by_hand(measured: Path) -> None:
    found = document(measured)
    weights = LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
    peaks = {each["name"]: each for each in found["artifacts"]}
    for row in found["rows"]:
        closed, artifact = row["closed"], peaks[row["artifact"]]
        flops = row["length"] * (2 * weights + 4 * LAYERS * WIDTH * row["length"])
        assert closed["flops_per_inference"] == flops
        share = flops * closed["inferences_per_second"] / artifact["peak_flops_per_second"]
        assert closed["peak_share"] == pytest.approx(share)
        assert "measured here" in artifact["peak_source"]
    assert "2 N + 4 L h S" in found["formulas"]["flops_per_inference"]


def test_an_artifact_has_its_start_its_memory_and_its_price(measured: Path) -> None:
    for each in document(measured)["artifacts"]:
        ready = each["ready"]
        assert all(seconds > 0 for seconds in ready.values())
        assert each["memory_bytes"] > 1e6
        assert each["price"]["usd_per_hour"] == 3.6
        assert each["price"]["as_of"] == "2026-11-01"
        assert (each["model"], each["computed_by"]) == ("tiny", "eager fp32")
        assert each["machine"]["threads"] == 1
        assert each["tdp_watts"] is None


def test_requests_are_computed_in_the_shapes_of_the_ladder(measured: Path) -> None:
    shapes = {(row["rows"], row["length"]): row["shapes"] for row in document(measured)["rows"]}
    assert shapes[3, 32] == [[3, 32]]
    assert shapes[1, 13] == [[1, 14]]


def test_a_request_has_real_words_as_long_as_its_length(artifact: Path, tmp_path: Path) -> None:
    opened = artifacts.opened(artifact / "first")
    bench = Bench(
        asked(tmp_path, first=artifact), 1, "first", opened, loaded(opened, invariant=False)
    )
    request = request_of(bench, 3, 13)
    ((tokens, lengths),) = request.batches
    assert (tokens.shape, lengths.tolist(), request.tokens) == ((3, 14), [13] * 3, 39)
    assert tokens[:, 13:].eq(0).all()
    assert len(tokens[:, :13].unique()) > len(WORDS) // 2
    assert int(tokens.max()) < len(WORDS)
    assert request_of(bench, 3, 13).batches[0][0].equal(tokens)


def test_joules_are_what_the_device_counts_from_the_first_request_on(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = artifacts.opened(artifact / "first")
    wanted = asked(tmp_path, first=artifact)
    bench = Bench(wanted, 1, "first", opened, loaded(opened, invariant=False))
    answered: list[int] = []
    monkeypatch.setattr(Bench, "answer", lambda _, request: answered.append(request.rows))

    def meter(_: Cpu) -> Callable[[], float]:
        before = len(answered)
        return lambda: 0.5 * (len(answered) - before)

    monkeypatch.setattr(Cpu, "meter", meter)
    told = next(loads(bench, request_of(bench, 1, 8)))
    assert told["joules"] == 0.5 * len(told["milliseconds"])
    assert len(answered) == len(told["milliseconds"]) + wanted.inference.warmup


def test_a_table_a_chart_and_a_page_are_written(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (measured / "benchmark.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * 4 * 3
    assert {line["load"] for line in table} == {"closed", "open"}
    chart = ET.fromstring((measured / "benchmark.svg").read_text())  # noqa: S314 - drawn here
    assert chart.tag.endswith("svg")
    assert "--series-2" in (measured / "benchmark.svg").read_text()
    assert main(["report", str(measured), f"output.folder={tmp_path}"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Poisson arrivals, latency from the moment of arrival" in page
    assert "Inferences per second, one request after the other" in page
    assert "times as long as first for a request" in page
    assert main(["report", str(measured), f"output.folder={tmp_path}", "--format", "md"]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| batch x length | p50 ms | latency |" in text
    assert "times as long as first" in capsys.readouterr().out


def test_an_artifact_in_a_pipeline_is_reported_on_as_well(artifact: Path, tmp_path: Path) -> None:
    assert main(["report", str(artifact / "first"), f"output.folder={tmp_path}"]) == 0


def test_every_artifact_has_a_turn_before_any_has_the_next(
    tmp_path: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[int, str]] = []
    monkeypatch.setattr(
        inference, "_turn", lambda _, name, number: order.append((number, name)) or []
    )
    monkeypatch.setattr(inference.summary, "document", lambda *_: {})
    inference.run(asked(tmp_path / "out", first=artifact / "first", other=artifact / "second"))
    assert order == [(number, name) for number in (1, 2, 3) for name in ("first", "other")]


def asked(folder: Path, **artifacts: Path) -> Measuring:
    named = {name: str(path) for name, path in artifacts.items()}
    inference = {"artifacts": named, "lengths": [16]}
    return build(Measuring, {"output": {"folder": str(folder)}, "inference": inference})


def test_a_dry_run_says_what_would_be_measured_without_torch(
    tmp_path: Path, artifact: Path
) -> None:
    words = ["benchmark", str(artifact / "first"), f"output.folder={tmp_path / 'out'}", *QUICK]
    code = (
        "import sys; from regauge.cli import main; "
        f"code = main({[*words, '--dry-run', '--json']!r}); "
        "sys.exit(code or 3 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["batch_x_length"] == ["1 x 32", "3 x 32", "1 x 13", "3 x 13"]
    assert told["requests_a_second"] == ["0.5 of the closed loop", "40"]
    assert told["artifacts"][0]["computed_by"] == "eager fp32"
    assert told["price"] == "3.6 USD an hour (the run file, on-demand, 2026-11-01)"
    assert told["seconds_at_least"] == 2
    assert not (tmp_path / "out").exists()


def test_lengths_that_nobody_asked_for_are_such_as_the_artifacts_read(
    tmp_path: Path, artifact: Path
) -> None:
    folders = {"first": str(artifact / "first")}
    inference = {"artifacts": folders, "rows": (2,)}
    tables = {"inference": inference, "output": {"folder": str(tmp_path / "out")}}
    assert benchmark.plan(build(Measuring, tables))["batch_x_length"] == ["2 x 48"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inference.lengths=[64]"], "reads at most 48 tokens, and inference.lengths has 64"),
        (["execution.price.instance=inf2.xlarg"], "did you mean 'inf2.xlarge'?"),
        (["inference.beside=[['first','none']]"], "no artifact is called 'none'"),
        (["inference.rows=[2,2]"], "rows has a number twice"),
        (["inference.row=[2]"], "did you mean 'rows'?"),
        (["inference.artifacts.a/b=out"], "'a/b' names no artifact"),
        (["{first}"], "two artifacts would be called"),
        (["{none}"], "there is no manifest.json"),
        (["output.folder={first}"], "is an artifact or a dataset"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(
    artifact: Path,
    tmp_path: Path,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"first": artifact / "first", "none": tmp_path / "none"}
    given = [word.format(**places) for word in words]
    folder = f"output.folder={tmp_path / 'out'}"
    assert main(["benchmark", str(artifact / "first"), folder, "inference.lengths=[16]", *given])
    told = capsys.readouterr().err
    assert said in told
    assert told.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_benchmark_is_kept(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "benchmark.json").write_text('{"scaling": "weak", "rows": []}')
    with pytest.raises(SettingsError, match="is of something else"):
        benchmark.run(asked(tmp_path, first=artifact / "first"))
    (tmp_path / "benchmark.json").write_text("{")
    with pytest.raises(SettingsError, match="cannot be read"):
        benchmark.run(asked(tmp_path, first=artifact / "first"))
    refusal = benchmark.plan(asked(tmp_path, first=artifact / "first"))["would_refuse"]
    assert "cannot be read" in refusal
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]


def test_an_artifact_that_was_changed_ends_the_command_with_its_name(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(artifact / "first", broken)
    data = bytearray((broken / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (broken / "weights.safetensors").write_bytes(data)
    assert main(["benchmark", str(broken), f"output.folder={tmp_path / 'out'}", *QUICK]) == 64
    assert "regauge: broken: " in (told := capsys.readouterr().err)
    assert "is not what was exported" in told


def test_an_artifact_that_says_nothing_is_named(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "_patience", lambda _: 0.0)
    with pytest.raises(NoProgressError, match="slow has said nothing for 0 s"):
        inference._turn(asked(tmp_path, slow=artifact / "first"), "slow", 1)


def test_folders_are_named_after_what_tells_them_apart(tmp_path: Path) -> None:
    runs = [tmp_path / "fp32" / "artifact", tmp_path / "bf16" / "artifact", tmp_path / "other"]
    assert list(inference.named(runs)) == ["fp32", "bf16", "other"]
    same = [tmp_path / "a" / "best", tmp_path / "b" / "best"]
    assert list(inference.named(same)) == ["a-best", "b-best"]


def test_a_stage_measures_artifacts_and_one_with_the_flag_measures_training(
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
target.model = "somewhere"
[[stage]]
verb = "benchmark"
name = "latency"
inference.artifacts.kept = "@export"
[[stage]]
verb = "benchmark --training"
name = "scaling"
benchmark.turns = 1
""")
    _, latency, scaling = pipeline.load(file, ()).stages
    assert isinstance(latency.settings, Measuring)
    assert latency.settings.inference.artifacts == {"kept": str(tmp_path / "out" / "1-export")}
    assert latency.settings.output.folder == str(tmp_path / "out" / "2-latency")
    assert latency.inputs == ("export",)
    assert isinstance(scaling.settings, Benchmarking)
    assert scaling.settings.benchmark.turns == 1
