"""`benchmark --training`: short runs in turns, one table, and a page with a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed import datasets
from distributed.runs import settings
from regauge.benchmarking import training
from regauge.benchmarking.settings import Benchmarking
from regauge.cli import main
from regauge.config import build, dump, merge
from regauge.errors import SettingsError
from regauge.verbs import benchmark, train


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.packed(tmp_path_factory.mktemp("data") / "packed")


def asked(folder: Path, data: Path, **benchmark: Any) -> Benchmarking:
    """Return a benchmark of tiny runs: 8 rows a process in 4 microbatches."""
    tables = dump(settings(folder, data, "mlm"))
    quick = {"execution": {"price": {"usd_per_hour": 3.6}, "threads": None, "compile": "no"}}
    whole = merge(tables, {"benchmark": {"steps": 4, "warmup_steps": 1, **benchmark}, **quick})
    return build(Benchmarking, whole)


def test_a_benchmark_measures_every_number_of_processes(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "bench", tmp_path / "run.json"
    wanted = asked(folder, data, processes=(2, 1), turns=1)
    file.write_text(json.dumps(dump(wanted)))
    assert main(["benchmark", str(file), "--training"]) == 0
    found = json.loads((folder / "benchmark.json").read_text())
    assert [row["processes"] for row in found["rows"]] == [1, 2]
    assert [row["global_batch"] for row in found["rows"]] == [8, 16]
    assert [row["learning_rate"] for row in found["rows"]] == [0.003, 0.006]
    runs = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert runs == ["1-processes-1", "2-processes-1"]
    for row in found["rows"]:
        own = [turn for turn in runs if turn.startswith(str(row["processes"]))]
        rates = [rate for turn in own for rate in _rates(folder / turn)]
        assert row["spread"] == pytest.approx([min(rates), max(rates)])
        assert row["spread"][0] <= row["tokens_per_second"] <= row["spread"][1]
        assert row["sequences_per_second"] == row["global_batch"] / row["seconds_per_step"]
        assert row["usd_per_million_tokens"] == pytest.approx(1e3 / row["tokens_per_second"])
    one, two = found["rows"]
    assert one["efficiency"] == 1.0
    share = two["sequences_per_second"] / one["sequences_per_second"] / 2
    assert two["efficiency"] == pytest.approx(share)
    assert one["peak_flops_per_second"] == two["peak_flops_per_second"]
    assert "Weak scaling" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "Real tokens per second by processes" in page
    assert f"{one['efficiency']:.1%}" in page


def _rates(folder: Path) -> list[float]:
    """Return the tokens a second between the lines after the warm-up of one step."""
    told = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    told = list({line["step"]: line for line in reversed(told)}.values())[::-1]
    spent = [line["seconds"]["step"] + line["seconds"]["data_wait"] for line in told]
    return [
        (after["tokens"] - before["tokens"]) / (until - since)
        for before, after, since, until in zip(told, told[1:], spent, spent[1:], strict=False)
    ]


def test_every_number_of_processes_has_a_turn_before_any_has_the_next(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    nothing = training.Turn((1.0,), (1.0,), (), dict.fromkeys(training.CHIP, ""))
    nothing.chip["peak_flops_per_second"] = None
    monkeypatch.setattr(train, "run", lambda run: order.append(Path(run.output.folder).name))
    monkeypatch.setattr(training, "read", lambda *_: nothing)
    (tmp_path / "bench").mkdir()
    benchmark.run(asked(tmp_path / "bench", data, processes=(1, 2), turns=2))
    assert order == ["1-processes-1", "2-processes-1", "1-processes-2", "2-processes-2"]


def test_a_later_job_in_the_same_folder_adds_its_rows(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = training.Turn((1.0,), (1.0,), (), dict.fromkeys(training.CHIP, ""))
    nothing.chip["peak_flops_per_second"] = None
    monkeypatch.setattr(train, "run", lambda run: run)
    monkeypatch.setattr(training, "read", lambda *_: nothing)
    (tmp_path / "bench").mkdir()
    for size in (2, 1):
        benchmark.run(asked(tmp_path / "bench", data, processes=(size,), turns=1))
    found = json.loads((tmp_path / "bench" / "benchmark.json").read_text())
    assert [row["processes"] for row in found["rows"]] == [1, 2]


def test_strong_scaling_keeps_the_batch(tmp_path: Path, data: Path) -> None:
    wanted = asked(tmp_path / "bench", data, scaling="strong", processes=(1, 2, 4))
    for size in training.sizes(wanted):
        short = training.turn_of(wanted, size, 1)
        assert (short.batch.rows, short.optimizer.learning_rate) == (8, 0.003)
        assert short.execution.processes == size
        assert short.stop.steps == 5


def test_threads_are_alike_for_every_number_of_processes(tmp_path: Path, data: Path) -> None:
    wanted = asked(tmp_path / "bench", data, processes=(1, 2))
    threads = {training.turn_of(wanted, size, 1).execution.threads for size in (1, 2)}
    assert len(threads) == 1


def test_what_another_job_has_measured_is_kept_where_its_settings_were_these(
    tmp_path: Path, data: Path
) -> None:
    def row(size: int, rate: float) -> dict[str, Any]:
        known = {"processes": size, "sequences_per_second": rate, "mfu": None}
        return {**known, "peak_flops_per_second": None}

    wanted = asked(tmp_path / "bench", data)
    earlier = training.document(wanted, [row(1, 10.0), row(2, 15.0)], {})
    found = training.document(wanted, [row(2, 18.0), row(4, 30.0)], earlier)
    told = [(each["processes"], each["efficiency"]) for each in found["rows"]]
    assert told == [(1, 1.0), (2, 0.9), (4, 0.75)]
    other = asked(tmp_path / "bench", data, scaling="strong")
    alone = training.document(other, [row(4, 30.0)], found)
    assert [each["processes"] for each in alone["rows"]] == [4]


def test_what_cannot_be_measured_is_said_before_anything_runs(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(dump(asked(tmp_path / "bench", data, processes=(8,)))))
    assert main(["benchmark", str(file)]) == 2
    assert "add --training" in capsys.readouterr().err
    strong = (str(file), "--training", "benchmark.scaling=strong")
    assert main(["benchmark", *strong]) == 2
    assert "8 processes for 4 microbatches a step" in capsys.readouterr().err
    nodes = merge(dump(asked(tmp_path / "b", data)), {"execution": {"nodes": {"count": "1:2"}}})
    nodes["execution"]["nodes"]["endpoint"] = "localhost:1"
    with pytest.raises(SettingsError, match="is no number to measure"):
        training.machines(build(Benchmarking, nodes))
    assert not (tmp_path / "bench").exists()
