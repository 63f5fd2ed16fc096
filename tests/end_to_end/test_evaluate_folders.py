"""`regauge evaluate FOLDER [--source FILE]` and `regauge replay FOLDER`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from distributed.jobs import lines
from distributed.runs import BERT, LLAMA
from regauge.cli import main
from regauge.commands import prepare
from regauge.config import build, merge
from regauge.data.dataset import Dataset
from regauge.system.processes import World
from regauge.training.run import attempt
from regauge.training.settings import TrainSettings

TOPICS = {"sport": "goal team match", "finance": "bank loan stock", "travel": "hotel train visa"}
NAMES = tuple(TOPICS)
EXECUTION = ("execution.precision=fp32", "execution.threads=1", "accelerator=cpu")


def write_records(path: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Write texts of three topics, and conversations about them."""
    draw = np.random.default_rng(seed)
    records = []
    for _ in range(count):
        label = int(draw.integers(0, 3))
        words = [*draw.choice(TOPICS[NAMES[label]].split(), 4), *map(str, draw.integers(0, 99, 3))]
        text = " ".join(words)
        records.append({"text": text, "label": label, "instruction": text, "output": NAMES[label]})
    if path.suffix == ".csv":
        rows = [f"{record['text']};{record['label']}" for record in records]
        path.write_text("\n".join(["text;label", *rows]) + "\n")
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def train(folder: Path, source: dict[str, Any], rows: dict[str, Any], **tables: Any) -> Path:
    """Prepare a dataset and train on it; return the folder of the run."""
    data = {"path": str(folder / "data")}
    prepared = {
        "data": data,
        "source": source,
        "rows": rows,
        "split": {"heldout_fraction": 0.25},
        "tokenizer": {"vocab_size": 400},
        "prepare": {"processes": 1},
    }
    prepare.run(build(prepare.PrepareSettings, prepared))
    run = {
        "data": {**data, "workers": 0},
        "output": {"folder": str(folder / "run"), "trackers": ("jsonl",)},
        "batch": {"rows": 8, "microbatch_rows": 8},
        "optimizer": {"learning_rate": 0.01},
        "execution": {"precision": "fp32", "threads": 1},
        "accelerator": "cpu",
        "stop": {"steps": 6},
    }
    attempt(build(TrainSettings, merge(run, tables)), World())
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a classifier that was trained on a CSV file."""
    folder = tmp_path_factory.mktemp("classifier")
    write_records(folder / "train.csv", 80, 0)
    return train(
        folder,
        {
            "kind": "csv",
            "files": (str(folder / "train.csv"),),
            "delimiter": ";",
            "integers": ("label",),
        },
        {"layout": "fields", "fields": {"text": 16}, "labels": {"label": NAMES}},
        task={"kind": "classify", "class_weights": "balanced"},
        model=BERT,
    )


def read_json(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    return document


def last_metrics(run: Path) -> dict[str, float]:
    """Return the metrics of the last evaluation of a run."""
    line = [line for line in lines(run) if "heldout/loss" in line][-1]
    return {
        name.removeprefix("heldout/"): value
        for name, value in line.items()
        if name.startswith("heldout/")
    }


@pytest.mark.parametrize("part", ["", "model", "run.json"])
def test_a_folder_is_evaluated_on_the_heldout_rows_of_its_run(
    run: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    assert main(["evaluate", str(run / part), *EXECUTION, "--json"]) == 0
    answer = read_json(capsys.readouterr().out)
    assert answer["output"] == str(run.with_name("run-evaluation") / "evaluation.json")
    directions = read_json(Path(answer["output"]).read_text())["directions"]
    assert (directions["accuracy"], directions["loss"]) == ("max", "min")
    assert "items" not in directions
    row, *baselines = answer["rows"]
    assert [row["name"] for row in baselines] == ["majority", "tf-idf + logistic regression"]
    assert row.pop("name") == "run"
    assert row == pytest.approx(last_metrics(run), rel=1e-6)
    assert [entry["name"] for entry in answer["classes"]["run"]["classes"]] == list(NAMES)


@pytest.fixture(scope="module")
def sampled_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that evaluates 5 of its held-out rows."""
    folder = tmp_path_factory.mktemp("sampled")
    write_records(folder / "train.jsonl", 80, 0)
    source = {"kind": "jsonl", "files": (str(folder / "train.jsonl"),)}
    rows = {"layout": "fields", "fields": {"text": 16}, "labels": {"label": NAMES}}
    task, evaluation = {"kind": "classify"}, {"rows": 5}
    return train(folder, source, rows, task=task, model=BERT, evaluation=evaluation)


@pytest.mark.parametrize("records", [0, 30], ids=["held-out rows", "file"])
def test_all_rows_are_evaluated_unless_the_command_asks_for_a_sample(
    sampled_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], records: int
) -> None:
    """The sample of a run is for its own evaluations."""
    assert last_metrics(sampled_run)["items"] == 5
    num_rows = records or len(Dataset(sampled_run.with_name("data")).rows("heldout"))
    arguments = ["evaluate", str(sampled_run), "--to", str(tmp_path / "result"), *EXECUTION]
    if records:
        write_records(tmp_path / "test.jsonl", records, 7)
        arguments += ["--source", str(tmp_path / "test.jsonl")]
    for sample, note in (("", f"{num_rows} held-out rows of"), ("8", f"8 of {num_rows} held-out")):
        options = [f"evaluation.rows={sample}"] if sample else []
        assert main([*arguments, *options, "--json"]) == 0
        answer = read_json(capsys.readouterr().out)
        assert answer["rows"][0]["items"] == int(sample or num_rows)
        assert answer["notes"][0].startswith(note)
        assert main([*arguments, *options]) == 0
        assert note in capsys.readouterr().out, "the terminal does not show the number of rows"


def test_baselines_equal_scikit_learn(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for a file: they are fitted on the training rows of the run."""
    write_records(tmp_path / "test.csv", 30, 9)
    files = ["--source", str(tmp_path / "test.csv"), "--to", str(tmp_path / "result")]
    assert main(["evaluate", str(run), *files, *EXECUTION, "--json"]) == 0
    rows = {row["name"]: row for row in read_json(capsys.readouterr().out)["rows"]}
    (folder,) = (path for path in (tmp_path / "result" / "data").iterdir() if path.is_dir())
    parts = Dataset(run.with_name("data")).rows("train"), Dataset(folder).rows("heldout")
    (texts, labels), (test_texts, test_labels) = (
        ([row["text"].tolist() for row in split], [row["label"] for row in split])
        for split in (part.take(range(len(part))) for part in parts)
    )
    model = make_pipeline(TfidfVectorizer(analyzer=list), LogisticRegression(tol=1e-8))
    model.fit(texts, labels)
    linear = rows["tf-idf + logistic regression"]
    assert linear["accuracy"] == pytest.approx(model.score(test_texts, test_labels))
    majority = DummyClassifier().fit(texts, labels)
    assert rows["majority"]["accuracy"] == pytest.approx(majority.score(test_texts, test_labels))


def test_each_file_has_its_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path / "new test.csv", 5, 7)
    source = str(tmp_path / "new test.csv")
    assert main(["evaluate", str(run), "--source", source, "--dry-run", "--json"]) == 0
    answer = read_json(capsys.readouterr().out)
    assert answer["output"] == str(run.with_name("run-evaluation-new-test"))


def test_a_file_is_prepared_like_the_dataset_of_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON lines have the same records as the CSV file, whose options are those of the run."""
    first, second = tmp_path / "test.csv", tmp_path / "test.jsonl"
    records = write_records(first, 30, 7)
    assert write_records(second, 30, 7) == records
    rows, to = [], tmp_path / "result"
    for file in (first, second, first):
        arguments = ["--source", str(file), "--to", str(to), *EXECUTION, "--json"]
        assert main(["evaluate", str(run), *arguments]) == 0
        rows += read_json(capsys.readouterr().out)["rows"][:1]
    assert rows[0] == rows[1] == rows[2]
    assert rows[0]["items"] == 30
    folders = [path for path in (to / "data").iterdir() if path.is_dir()]
    assert len(folders) == 2, "an unchanged file is prepared once"
    prepared = Dataset(folders[0])
    assert not len(prepared.rows("train"))
    labels = prepared.rows("heldout").read_column("label").tolist()
    assert labels == [record["label"] for record in records]
    original = Dataset(run.with_name("data")).manifest
    assert prepared.manifest.tokenizer == original.tokenizer
    assert prepared.manifest.settings["rows"] == original.settings["rows"]
    first.write_text(first.read_text() + f"{records[0]['text']};{records[0]['label']}\n")
    assert main(["evaluate", str(run), *arguments]) == 0
    assert read_json(capsys.readouterr().out)["rows"][0]["items"] == 31


@pytest.mark.full
def test_several_processes_evaluate_a_file_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path / "test.csv", 20, 3)
    to = tmp_path / "result"
    command = ["evaluate", str(run), "--source", str(tmp_path / "test.csv"), "--to", str(to)]
    rows, times = [], []
    for _ in range(2):
        assert main([*command, *EXECUTION, "execution.processes=2", "--json"]) == 0
        captured = capsys.readouterr()
        rows.append(read_json(captured.out)["rows"])
        files = (path for path in to.rglob("*") if path.is_file())
        times.append({path: path.stat().st_mtime_ns for path in files})
    assert f"{to} is finished; nothing is changed" in captured.err
    assert rows[0] == rows[1]
    assert times[0] == times[1]


def test_the_weights_of_the_classes_are_those_of_the_training_rows(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of one class alone has no balance."""
    record = {"text": "goal goal goal", "label": 0}
    (tmp_path / "one.jsonl").write_text(json.dumps(record) + "\n")
    arguments = ["--source", str(tmp_path / "one.jsonl"), "--to", str(tmp_path / "result")]
    assert main(["evaluate", str(run), *arguments, *EXECUTION, "--json"]) == 0
    answer = read_json(capsys.readouterr().out)
    supports = [entry["support"] for entry in answer["classes"]["run"]["classes"]]
    assert supports == [1, 0, 0]


def test_the_terminal_shows_classes_and_matrix(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), *EXECUTION]) == 0
    shown = capsys.readouterr().out
    assert "classes of run" in shown
    assert "confusion matrix of run" in shown


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--source", "test.xyz"], "'test.xyz' has no known suffix; use one of .jsonl"),
        (["--source", "missing.csv"], "no file matches 'missing.csv'"),
        (["evaluation.rws=3"], "unknown key 'evaluation.rws'; did you mean"),
    ],
)
def test_bad_input_is_reported_in_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert main(["evaluate", str(run), *arguments, *EXECUTION]) in {2, 64}
    assert problem in capsys.readouterr().err


def test_a_folder_without_a_run_needs_its_task(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    assert main(["evaluate", str(tmp_path / "model")]) == 2
    message = capsys.readouterr().err
    assert "its task and its dataset are unknown" in message
    assert "such as task.kind=classify data.path=out/dataset" in message
    keys = [f"data.path={run.with_name('data')}", "task.kind=classify"]
    keys += [f"task.class_names={json.dumps(NAMES)}"]
    assert main(["evaluate", str(tmp_path / "model"), *keys, *EXECUTION, "--json"]) == 0
    row, *_ = read_json(capsys.readouterr().out)["rows"]
    assert row["name"] == "model"
    assert row["accuracy"] == pytest.approx(last_metrics(run)["accuracy"])


def test_a_language_model_is_evaluated_on_conversations_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template of the rows is that of the tokenizer; its file may be gone."""
    write_records(tmp_path / "train.jsonl", 60, 0)
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.role }} {{ message.content }}"
        "{{ sep_token if message.role == 'assistant' else ' ' }}{% endfor %}"
    )
    run = train(
        tmp_path,
        {"kind": "jsonl", "files": (str(tmp_path / "train.jsonl"),)},
        {"layout": "chat", "length": 32, "chat_template": str(template)},
        task={"kind": "sft"},
        model=LLAMA,
    )
    template.unlink()
    write_records(tmp_path / "test.jsonl", 20, 1)
    arguments = ["--source", str(tmp_path / "test.jsonl"), *EXECUTION, "--json"]
    assert main(["evaluate", str(run), *arguments]) == 0
    answer = read_json(capsys.readouterr().out)
    (row,) = answer["rows"]
    assert row["perplexity"] == pytest.approx(np.exp(row["loss"]), rel=1e-6)
    assert not answer["classes"]


def test_a_run_folder_is_replayed_next_to_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in run.iterdir())
    assert main(["replay", str(run)]) == 2
    assert "'replay.until' is missing; set replay.until" in capsys.readouterr().err
    assert main(["replay", str(run), "replay.until=99"]) == 2
    assert re.search(r"replay\.until is 99, and the run has \d+ steps", capsys.readouterr().err)
    assert main(["replay", str(run), "replay.until=3", "--json"]) == 0
    folder = run.with_name("run-replay")
    assert read_json(capsys.readouterr().out)["output"] == str(folder)
    assert len((folder / "replay.jsonl").read_text().splitlines()) == 3
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_folder_without_a_run_is_not_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path), "replay.until=3"]) == 64
    assert "run.json is missing" in capsys.readouterr().err
