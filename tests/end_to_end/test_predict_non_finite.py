"""Records for which a damaged model has no numbers are rejected, not labelled."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from end_to_end.predicting import random_texts, read_table, train_model
from regauge.cli import main

WORD = 77
EXECUTION = ("execution.precision=fp32", "execution.threads=1", "accelerator=cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose model has NaN in the embedding of one word."""
    run = train_model(tmp_path_factory.mktemp("classifier"), "classify")
    path = run / "model" / "model.safetensors"
    weights = load_file(path)
    (name,) = (name for name in weights if name.endswith("word_embeddings.weight"))
    weights[name][WORD] = math.nan
    save_file(weights, path, {"format": "pt"})
    return run


def predict(run: Path, folder: Path, texts: list[str]) -> int:
    pairs = zip(texts, reversed(texts), strict=True)
    lines = (
        json.dumps({"id": number, "query": query, "document": document}) + "\n"
        for number, (query, document) in enumerate(pairs)
    )
    folder.mkdir()
    (folder / "pairs.jsonl").write_text("".join(lines))
    paths = ["--source", str(folder / "pairs.jsonl"), "--to", str(folder / "out")]
    options = ["execution.executor=inline", "predict.batch_invariant=false"]
    return main(["predict", str(run), *paths, *options])


def test_a_record_without_a_finite_output_is_quarantined(run: Path, tmp_path: Path) -> None:
    texts = [text.replace(f"w{WORD}", "w9") for text in random_texts(11)]
    assert predict(run, tmp_path / "clean", texts) == 0
    clean = read_table(tmp_path / "clean" / "out")
    texts[2] = f"w{WORD}"
    assert predict(run, tmp_path / "damaged", texts) == 0
    table = read_table(tmp_path / "damaged" / "out")
    kept = [number for number in range(11) if number not in {2, 8}]
    assert table["id"].to_pylist() == kept
    assert table.equals(clean.take(kept))
    lines = (tmp_path / "damaged" / "out" / "quarantine" / "000000-00000.jsonl").read_text()
    rejected = [json.loads(line) for line in lines.splitlines()]
    assert [line["location"] for line in rejected] == ["line 3", "line 9"]
    assert {line["reason"] for line in rejected} == {"the model's output is not finite"}


def test_a_damaged_model_is_an_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(run, tmp_path / "all", [f"w{WORD} w{number}" for number in range(5, 9)]) == 64
    assert "most records are rejected: 4 of 4" in capsys.readouterr().err
