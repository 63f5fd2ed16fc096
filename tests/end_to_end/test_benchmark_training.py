"""`benchmark --training`: alternating short runs, one table, and a page with a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge.cli import main
from regauge.commands import benchmark, train
from regauge.config import build, dump, merge
from regauge.evaluation.benchmark import training
from regauge.evaluation.benchmark.settings import TrainingBenchmarkSettings
from regauge.system.errors import SettingsError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_packed(tmp_path_factory.mktemp("data") / "packed")


def build_settings(folder: Path, data: Path, **benchmark: Any) -> TrainingBenchmarkSettings:
    """Return the settings of tiny runs: 8 rows per process in 4 microbatches."""
    tables = dump(settings(folder, data, "mlm"))
    fast = {"execution": {"price": {"usd_per_hour": 3.6}, "threads": None, "compile": "off"}}
    merged = merge(tables, {"benchmark": {"steps": 4, "warmup_steps": 1, **benchmark}, **fast})
    return build(TrainingBenchmarkSettings, merged)


@pytest.mark.full
def test_a_benchmark_measures_every_number_of_processes(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "bench", tmp_path / "run.json"
    benchmark_settings = build_settings(folder, data, processes=(2, 1), repeats=1)
    file.write_text(json.dumps(dump(benchmark_settings)))
    assert main(["benchmark", str(file), "--training"]) == 0
    document = json.loads((folder / "benchmark.json").read_text())
    assert [row["processes"] for row in document["rows"]] == [1, 2]
    assert [row["global_batch_size"] for row in document["rows"]] == [8, 16]
    assert [row["learning_rate"] for row in document["rows"]] == [0.003, 0.006]
    runs = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert runs == ["1-processes-1", "2-processes-1"]
    for row in document["rows"]:
        row_runs = [run for run in runs if run.startswith(str(row["processes"]))]
        rates = [rate for run in row_runs for rate in _read_rates(folder / run)]
        assert row["tokens_per_second_range"] == pytest.approx([min(rates), max(rates)])
        assert (
            row["tokens_per_second_range"][0]
            <= row["tokens_per_second"]
            <= row["tokens_per_second_range"][1]
        )
        assert row["sequences_per_second"] == row["global_batch_size"] / row["seconds_per_step"]
        assert row["usd_per_million_tokens"] == pytest.approx(1e3 / row["tokens_per_second"])
    one, two = document["rows"]
    assert one["efficiency"] == 1.0
    share = two["sequences_per_second"] / one["sequences_per_second"] / 2
    assert two["efficiency"] == pytest.approx(share)
    assert one["peak_flops_per_second"] == two["peak_flops_per_second"]
    assert "Weak scaling" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "Real tokens per second by number of processes" in page
    assert f"{one['efficiency']:.1%}" in page


def _read_rates(folder: Path) -> list[float]:
    """Return the tokens per second between the lines after the warm-up of one step."""
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    ledger = list({line["step"]: line for line in reversed(ledger)}.values())[::-1]
    seconds = [line["seconds"]["step"] + line["seconds"]["data_wait"] for line in ledger]
    return [
        (after["tokens"] - before["tokens"]) / (until - since)
        for before, after, since, until in zip(
            ledger, ledger[1:], seconds, seconds[1:], strict=False
        )
    ]


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the runs that are asked for, none of which trains."""
    names: list[str] = []
    chip = {**dict.fromkeys(training.CHIP_KEYS, ""), "peak_flops_per_second": None}
    steps = training.TimedSteps((1.0,), (1.0,), (), chip)
    monkeypatch.setattr(train, "run", lambda run: names.append(Path(run.output.folder).name))
    monkeypatch.setattr(training, "read_timed_steps", lambda *_: steps)
    (tmp_path / "bench").mkdir()
    return names


def test_short_runs_alternate_between_the_numbers_of_processes(
    tmp_path: Path, data: Path, order: list[str]
) -> None:
    benchmark.run(build_settings(tmp_path / "bench", data, processes=(1, 2), repeats=2))
    assert order == ["1-processes-1", "2-processes-1", "1-processes-2", "2-processes-2"]


@pytest.mark.usefixtures("order")
def test_a_later_job_in_the_same_folder_adds_its_rows(tmp_path: Path, data: Path) -> None:
    for size in (2, 1):
        benchmark.run(build_settings(tmp_path / "bench", data, processes=(size,), repeats=1))
    document = json.loads((tmp_path / "bench" / "benchmark.json").read_text())
    assert [row["processes"] for row in document["rows"]] == [1, 2]


def test_strong_scaling_keeps_the_batch(tmp_path: Path, data: Path) -> None:
    benchmark_settings = build_settings(
        tmp_path / "bench", data, scaling="strong", processes=(1, 2, 4)
    )
    for size in training.list_process_counts(benchmark_settings):
        short = training.build_short_run(benchmark_settings, size, 1)
        assert (short.batch.rows, short.optimizer.learning_rate) == (8, 0.003)
        assert short.execution.processes == size
        assert short.stop.steps == 5


def test_threads_are_equal_for_every_number_of_processes(tmp_path: Path, data: Path) -> None:
    benchmark_settings = build_settings(tmp_path / "bench", data, processes=(1, 2))
    threads = {
        training.build_short_run(benchmark_settings, size, 1).execution.threads for size in (1, 2)
    }
    assert len(threads) == 1


def test_rows_of_an_earlier_job_with_equal_settings_are_kept(tmp_path: Path, data: Path) -> None:
    def row(size: int, rate: float) -> dict[str, Any]:
        figures = {"processes": size, "sequences_per_second": rate, "mfu": None}
        return {**figures, "peak_flops_per_second": None}

    benchmark_settings = build_settings(tmp_path / "bench", data)
    earlier = training.build_document(benchmark_settings, [row(1, 10.0), row(2, 15.0)], {})
    document = training.build_document(benchmark_settings, [row(2, 18.0), row(4, 30.0)], earlier)
    efficiencies = [(row["processes"], row["efficiency"]) for row in document["rows"]]
    assert efficiencies == [(1, 1.0), (2, 0.9), (4, 0.75)]
    other = build_settings(tmp_path / "bench", data, scaling="strong")
    alone = training.build_document(other, [row(4, 30.0)], document)
    assert [row["processes"] for row in alone["rows"]] == [4]


def test_invalid_settings_are_refused_before_any_run(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(dump(build_settings(tmp_path / "bench", data, processes=(8,)))))
    assert main(["benchmark", str(file)]) == 2
    assert "add --training" in capsys.readouterr().err
    strong = (str(file), "--training", "benchmark.scaling=strong")
    assert main(["benchmark", *strong]) == 2
    assert "8 processes, but only 4 microbatches per step" in capsys.readouterr().err
    nodes = merge(
        dump(build_settings(tmp_path / "b", data)), {"execution": {"nodes": {"count": "1:2"}}}
    )
    nodes["execution"]["nodes"]["endpoint"] = "localhost:1"
    with pytest.raises(SettingsError, match="is a range; a benchmark needs one number"):
        training.count_nodes(build(TrainingBenchmarkSettings, nodes))
    assert not (tmp_path / "bench").exists()
