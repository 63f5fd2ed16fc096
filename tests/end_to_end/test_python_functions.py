"""Verbs as Python functions: run files, settings, data and callbacks as objects of a program."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

import regauge
from distributed import datasets
from distributed.runs import BERT
from regauge.commands._python.records import write_records
from regauge.commands._python.results import DryRunPlan, PrepareResult, TrainResult
from regauge.system.errors import ChildError, DataError, SettingsError

STEPS = 4
RECORDS = [
    {"text": f"{noun} number {number} is a small {noun} that sleeps on its bed every day"}
    for number in range(40)
    for noun in ("cat", "dog")
]
PREPARE: dict[str, Any] = {
    "tokenizer": {"vocab_size": 300},
    "rows": {"layout": "packed", "length": 16},
    "split": {"heldout_fraction": 0.2, "similarity": 1.0},
    "prepare": {"processes": 1},
}
MODULE = """
import json, os
from pathlib import Path
from regauge import Callback

class Recorder(Callback):
    def on_step(self, event):
        with Path(os.environ["RECORD"]).open("a") as file:
            file.write(json.dumps([event.rank, event.step]) + "\\n")

def count_steps():
    return Recorder()

def build_nothing():
    return None
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_packed(tmp_path_factory.mktemp("data") / "packed")


@pytest.fixture
def settings(data: Path, tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a tiny run as a dictionary."""
    return {
        "data": {"path": data},
        "task": "mlm",
        "model": {**BERT, "dropout": 0.0},
        "batch": {"rows": np.int64(8), "microbatch_rows": 2},
        "stop": {"steps": STEPS},
        "evaluation": {"every_steps": 2},
        "output": {"folder": tmp_path / "run", "checkpoint": {"every_steps": 2}},
        "accelerator": "cpu",
        "execution": {"precision": "fp32", "threads": 1, "compile": "off"},
    }


class Recorder(regauge.Callback):
    """Records the events of a run."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.metrics: list[dict[str, float]] = []
        self.weights: list[float] = []
        self.threads: set[int] = set()

    def on_step(self, event: regauge.TrainingEvent) -> None:
        self.events.append(("step", event.step))
        self.weights.append(float(next(iter(event.model.parameters())).detach().sum()))
        assert (event.rank, event.total_steps) == (0, STEPS)

    def on_evaluate(self, event: regauge.TrainingEvent) -> None:
        self.events.append(("evaluate", event.step))
        self.metrics.append(event.metrics)

    def on_save(self, event: regauge.TrainingEvent) -> None:
        assert event.checkpoint is not None
        state = json.loads((event.checkpoint / "state.json").read_text())
        assert (state["step"], event.folder) == (event.step, event.checkpoint.parents[1])
        self.events.append(("save", event.step))
        self.threads.add(threading.get_ident())


def test_a_run_prints_nothing_and_returns_a_typed_result(
    settings: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "regauge"):
        result = regauge.train(settings)
    assert capfd.readouterr() == ("", "")
    assert isinstance(result, TrainResult)
    assert result.folder == tmp_path / "run"
    assert (result.model_folder / "config.json").is_file()
    assert (result.steps, result.model_step, result.stop_reason) == (STEPS, STEPS, "finished")
    assert result.metrics["heldout/loss"] == result["metrics"]["heldout/loss"] > 0
    document = json.loads((tmp_path / "run" / "result.json").read_text())
    assert document.items() <= result.items()
    assert dict(result) == result.document == result
    # The lines of the child process are log records of this one.
    assert "optimizer: learning_rate 0.0005" in caplog.text
    assert f"step {STEPS}/{STEPS}" in caplog.text


@pytest.mark.full
def test_verbose_prints_the_result_and_the_log(
    settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    regauge.train(settings, verbose=True)
    printed = capfd.readouterr()
    assert "heldout/loss: " in printed.out
    assert "optimizer: learning_rate 0.0005" in printed.err
    regauge.train(settings, dry_run=True)
    assert capfd.readouterr() == ("", "")


def test_run_files_and_settings_are_texts_paths_and_dictionaries(
    settings: dict[str, Any], tmp_path: Path, data: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
data.path = "{data}"
task = "mlm"
batch = {{ rows = 8, microbatch_rows = 2 }}
stop.steps = 1
output.folder = "{tmp_path / "run"}"
model = {{ architecture = "bert", config = {{ hidden_size = 8, num_attention_heads = 2 }} }}
"""
    )
    plans = [
        regauge.train(file, "stop.steps=7", dry_run=True),
        regauge.train(str(file), stop__steps=7, dry_run=True),
        regauge.train(run_file=file, dry_run=True, **{"stop.steps": 7}),  # type: ignore[arg-type]
        regauge.train(file, "stop.steps=9", dry_run=True, stop={"steps": np.int32(7)}),
    ]
    assert all(isinstance(plan, DryRunPlan) and plan == plans[0] for plan in plans)
    assert plans[0]["steps"] == 7
    plan = regauge.train({**settings, "seed": None}, dry_run=True, output={"folder": tmp_path})
    assert (plan["steps"], plan["output"]) == (STEPS, str(tmp_path))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: regauge.train(run, stop__stps=3), "settings: unknown key 'stop.stps'"),
        (lambda run: regauge.train({**run, "batc": 1}), "settings: unknown key 'batc'"),
        (lambda run: regauge.train(run, stop={"steps": object()}), "'stop.steps' is of type obj"),
        (lambda run: regauge.train(run, seed=None), "'seed' is None; leave it out"),
        (lambda _: regauge.train(3), "run_file is of type int; pass a path or a dictionary"),
        (lambda run: regauge.export(run, to=3), "to is of type int; pass a path"),
        (lambda _: regauge.load(3), "path is of type int; pass the path of a model"),
        (lambda run: regauge.train(run, callbacks=["recording"]), "callbacks"),
        (lambda run: regauge.train(run, callbacks=[3]), "callbacks: int is not a callback"),
        (lambda run: regauge.train(run, callbacks=[Recorder]), r"create it: Recorder\(\)"),
        (lambda run: regauge.train(run, callbacks=["a:B", Recorder()]), "the same form"),
        (
            lambda run: regauge.train(run, callbacks=[Recorder()], execution__processes=2),
            "callbacks of this program need one process, not 2",
        ),
        (lambda run: regauge.prepare(run, data=3), "data is of type int"),
        (lambda run: regauge.prepare(run, data=[]), "data does not contain records"),
        (lambda run: regauge.prepare(run, data=["a", 3]), "record 2 of data is of type int"),
        (lambda run: regauge.prepare(run, data=[{"a": {1}}]), "record 1 of data cannot be written"),
        (lambda run: regauge.predict(run["data"]["path"], data=["a"]), "name it: to=FOLDER"),
    ],
)
def test_a_wrong_argument_is_one_error(
    settings: dict[str, Any], call: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises((SettingsError, DataError), match=message):
        call(settings)


def test_a_parameter_of_another_verb_is_a_type_error(settings: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"evaluate\(\) got an unexpected keyword argument 'data'"):
        regauge.evaluate(settings, data=RECORDS)


@pytest.mark.full
def test_callbacks_of_the_program_run_in_its_process_and_change_nothing(
    settings: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    result = regauge.train(settings, callbacks=[recorder])
    assert capfd.readouterr() == ("", "")
    steps = [event for event in recorder.events if event[0] == "step"]
    assert steps == [("step", step) for step in range(1, STEPS + 1)]
    evaluations = [event for event in recorder.events if event[0] == "evaluate"]
    assert evaluations == [("evaluate", step) for step in (0, 2, STEPS)]
    assert [event for event in recorder.events if event[0] == "save"] == [("save", 2), ("save", 4)]
    assert recorder.metrics[-1] == result["metrics"]
    assert len(set(recorder.weights)) == STEPS
    assert recorder.threads == {threading.get_ident()}
    plain = regauge.train({**settings, "output": {"folder": tmp_path / "other"}})
    assert plain["metrics"] == result["metrics"]
    weights = [folder / "model.safetensors" for folder in (result.model_folder, plain.model_folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.full
def test_the_error_of_a_callback_ends_the_run(settings: dict[str, Any]) -> None:
    class Broken(regauge.Callback):
        def on_step(self, event: regauge.TrainingEvent) -> None:
            raise ZeroDivisionError(f"at step {event.step}")

    with pytest.raises(ZeroDivisionError, match="at step 1"):
        regauge.train(settings, callbacks=[Broken()])
    assert regauge.train(settings).steps == STEPS


@pytest.mark.full
def test_importable_callbacks_run_in_every_process(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recording.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECORD", str(tmp_path / "record.jsonl"))
    settings["execution"]["processes"] = 2
    regauge.train(settings, callbacks=["recording:Recorder"])
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert sorted(lines) == [[rank, step] for rank in (0, 1) for step in range(1, STEPS + 1)]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["callbacks"] == [
        "recording:Recorder"
    ]


@pytest.mark.full
def test_an_import_path_of_something_else_is_refused(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recording.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    message = "callbacks: NoneType is not a callback; inherit from regauge.Callback"
    with pytest.raises(ChildError, match=message) as caught:
        regauge.train(settings, callbacks=["recording:build_nothing"])
    assert caught.value.exit_code == 2


def test_equal_data_is_one_file_whatever_its_type(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    pieces = pa.concat_tables([table.slice(0, 7), table.slice(7)])
    dataset = Dataset.from_list(RECORDS[40:] + RECORDS[:40])
    order = [*range(40, 80), *range(40)]
    tables = [write_records(data, tmp_path / "a").path for data in (table, pieces)]
    assert tables[0] == tables[1]
    assert pa.ipc.open_file(str(tables[0])).read_all() == table
    selected = write_records(dataset.select(order), tmp_path / "a").path
    assert pa.ipc.open_file(str(selected)).read_all().to_pylist() == RECORDS
    lines = write_records(RECORDS, tmp_path / "a").path
    assert [json.loads(line) for line in lines.read_text().splitlines()] == RECORDS
    assert write_records(iter(RECORDS), tmp_path / "a").path == lines
    texts = write_records([record["text"] for record in RECORDS], tmp_path / "a").path
    assert texts == lines
    assert write_records(RECORDS[1:], tmp_path / "a").path != lines
    assert lines.parent == tmp_path / "a.records"
    assert len(list(lines.parent.iterdir())) == 4


@pytest.mark.parametrize("kind", ["list", "dataset", "table"])
def test_data_of_a_program_is_prepared_once(tmp_path: Path, kind: str) -> None:
    def build() -> Any:
        convert = {"list": list, "dataset": Dataset.from_list, "table": pa.Table.from_pylist}[kind]
        return convert(RECORDS)

    settings = {**PREPARE, "data": {"path": tmp_path / "data"}}
    first = regauge.prepare(settings, data=build())
    assert isinstance(first, PrepareResult)
    assert (first.folder, first.heldout_rows > 0) == (tmp_path / "data", True)
    times = {file: file.stat().st_mtime_ns for file in first.folder.rglob("*.arrow")}
    for file in (tmp_path / "data.records").iterdir():
        file.unlink()  # the content counts, not the file
    assert "next" not in first  # its command would name a temporary file
    second = regauge.prepare(settings, data=build())
    assert second.fingerprint == first.fingerprint
    assert {file: file.stat().st_mtime_ns for file in times} == times
    with pytest.raises(DataError):
        regauge.prepare(settings, data=RECORDS[1:])


@pytest.mark.full
def test_a_run_prepares_its_data(settings: dict[str, Any], tmp_path: Path) -> None:
    tables = {**settings, **PREPARE}
    del tables["data"]
    result = regauge.train(tables, data=RECORDS)
    assert result.steps == STEPS
    assert (tmp_path / "run-data" / "manifest.json").is_file()
    assert regauge.train(tables, data=RECORDS, stop__steps=5).steps == 5


SCRIPT = """
import regauge
settings = {settings!r}
texts = [f"text {{n}} about {{n}} cats " * 1500 for n in range(48)]
regauge.prepare(settings, data=texts, source__chunk_mib=1)
print("prepared once")
"""


@pytest.mark.full
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    tables = {**PREPARE, "prepare": {"processes": 2}, "data": {"path": str(tmp_path / "data")}}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(settings=tables))
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("prepared once\n", "", 0)


@pytest.mark.full
def test_a_function_may_be_called_in_a_thread(settings: dict[str, Any]) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(regauge.train(settings)))
    thread.start()
    thread.join()
    assert results[0].steps == STEPS
