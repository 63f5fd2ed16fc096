"""Token classification from JSON lines to entities: train, evaluate, export, predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers

import regauge
from distributed.runs import BERT
from regauge.cli import main
from regauge.commands import prepare
from regauge.config import build
from regauge.system.processes import World
from regauge.training.run import attempt
from regauge.training.settings import TrainSettings

PEOPLE, PLACES = ("Ann", "Bob", "Carla", "Dan"), ("Paris", "Rome", "Oslo", "Lima")
FILLERS = ("so", "now", "then", ",")
TAGS = ("O", "B-PER", "I-PER", "B-LOC")
EXECUTION = ("execution.precision=fp32", "execution.threads=1", "accelerator=cpu")


def write_sentences(path: Path, count: int, seed: int) -> None:
    """Write sentences such as "Ann Miller lives in Oslo ." with their tags."""
    draw = np.random.default_rng(seed)
    records = []
    for _ in range(count):
        person, city = draw.choice(PEOPLE), draw.choice(PLACES)
        fillers = [str(word) for word in draw.choice(FILLERS, draw.integers(0, 4))]
        words, tags = [*fillers, str(person)], [*["O"] * len(fillers), "B-PER"]
        if draw.random() < 0.5:
            words, tags = [*words, "Miller"], [*tags, "I-PER"]
        words += [str(draw.choice(["lives", "works", "stays"])), "in", str(city), "."]
        records.append({"tokens": words, "tags": [*tags, "O", "O", "B-LOC", "O"]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_sentences(folder / "train.jsonl", 300, 0)
    tables: dict[str, Any] = {
        "data": {"path": str(folder / "data")},
        "source": {"kind": "jsonl", "files": (str(folder / "train.jsonl"),)},
        "rows": {"layout": "tagged", "fields": {"tokens": 24}, "labels": {"tags": TAGS}},
        "split": {"heldout_fraction": 0.2, "similarity": 1.0},
        "tokenizer": {"vocab_size": 500},
        "prepare": {"processes": 1},
    }
    prepare.run(build(prepare.PrepareSettings, tables))
    train = {
        "data": {"path": str(folder / "data"), "workers": 0},
        "task": "tokens",
        "model": BERT,
        "output": {"folder": str(folder / "run"), "trackers": ("jsonl",)},
        "batch": {"rows": 16, "microbatch_rows": 16},
        "optimizer": {"learning_rate": 0.01},
        "execution": {"precision": "fp32", "threads": 1},
        "accelerator": "cpu",
        "stop": {"steps": 100},
    }
    attempt(build(TrainSettings, train), World())
    return folder / "run"


def test_entities_are_learnt_and_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((run / "result.json").read_text())["metrics"]
    assert result["heldout/f1"] > 0.9
    write_sentences(run.with_name("test.jsonl"), 20, 5)
    arguments = ["--source", str(run.with_name("test.jsonl")), *EXECUTION, "--json"]
    assert main(["evaluate", str(run), *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows"][0]["f1"] > 0.9
    supports = {row["name"]: row["support"] for row in answer["classes"]["run"]["classes"]}
    assert supports == {"PER": 20, "LOC": 20}


def test_transformers_loads_the_model(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--format", "hf", "--to", str(tmp_path / "hf")]) == 0
    model, loading = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert model.config.id2label == dict(enumerate(TAGS))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "Bob Miller works in Lima ."
    encoded = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        scores = model(encoded["input_ids"]).logits[0].softmax(1)
    (entities,) = regauge.load(tmp_path / "hf").predict(text)["entities"]
    assert [(entity["text"], entity["label"]) for entity in entities] == [
        ("Bob Miller", "PER"),
        ("Lima", "LOC"),
    ]
    assert [text[entity["start"] : entity["end"]] for entity in entities] == ["Bob Miller", "Lima"]
    words = encoded.word_ids()
    first = words.index(max(word for word in words if word is not None) - 1)
    assert scores[first].argmax() == TAGS.index("B-LOC")
    assert entities[1]["score"] == pytest.approx(float(scores[first].max()), abs=1e-5)


@pytest.fixture(scope="module")
def artifact(run: Path) -> Path:
    folder = run.with_name("artifact")
    options = ["parity.num_texts=24", "candidates.timing_seconds=0.05"]
    backends = 'candidates.backends=["eager", "openvino"]'
    assert main(["export", str(run), "--to", str(folder), *options, backends]) == 0
    return folder


@pytest.mark.full
def test_an_artifact_predicts_entities_of_files(run: Path, artifact: Path, tmp_path: Path) -> None:
    texts = ["Ann lives in Oslo .", "nothing", "Carla Miller stays in Rome.", "x " * 40 + "Dan"]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--source", str(source), "--to", str(tmp_path / "out")]
    assert main(["predict", str(artifact), *arguments]) == 0
    (file,) = (tmp_path / "out" / "shards").glob("*.parquet")
    rows = pq.read_table(file).column("entities").to_pylist()
    expected = regauge.load(run / "model").predict(texts)["entities"]
    keys = ("text", "label", "start", "end")
    for row, peer, text in zip(rows, expected, texts, strict=True):
        assert [[entity[key] for key in keys] for entity in row] == [
            [entity[key] for key in keys] for entity in peer
        ]
        assert [entity["score"] for entity in row] == pytest.approx(
            [entity["score"] for entity in peer], abs=0.05
        )
        assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in row)
    assert [entity["text"] for entity in rows[0]] == ["Ann", "Oslo"]
    assert rows[2][0]["text"] == "Carla Miller"
    assert not any("Dan" in entity["text"] for entity in rows[3]), "it is beyond the limit"


def test_an_artifact_has_no_metrics_of_tags(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(artifact), *EXECUTION]) == 2
    assert "is an artifact without the token outputs of task 'tokens'" in capsys.readouterr().err
