"""Records for which a damaged model has no numbers are rejected, not labelled."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import regauge
from distributed import datasets
from end_to_end.predicting import random_texts, read_table, train_model
from regauge.cli import main
from regauge.system.errors import DataError

WORD = 77
DRAWN = ["generation.temperature=1", "generation.max_new_tokens=1"]
EXECUTION = ("execution.precision=fp32", "execution.threads=1", "accelerator=cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose model has NaN in the embedding of one word."""
    run = train_model(tmp_path_factory.mktemp("classifier"), "classify")
    damage(run, "word_embeddings.weight")
    return run


def damage(run: Path, suffix: str) -> None:
    """Let one word's embedding be NaN."""
    path = run / "model" / "model.safetensors"
    weights = load_file(path)
    (name,) = (name for name in weights if name.endswith(suffix))
    weights[name][WORD] = math.nan
    save_file(weights, path, {"format": "pt"})


def test_an_answer_without_finite_logits_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token with the most likely NaN would be the first of the vocabulary."""
    run = train_model(tmp_path / "writer", "llama", datasets.write_packed)
    damage(run, "embed_tokens.weight")
    lines = [{"id": 0, "text": "w5 w6"}, {"id": 1, "text": f"w{WORD}"}, {"id": 2, "text": "w9"}]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options = ["execution.executor=inline", "predict.batch_invariant=false"]
    for number, drawn in enumerate(([], DRAWN)):
        folder = tmp_path / f"out{number}"
        paths = ["--source", str(source), "--to", str(folder)]
        assert main(["predict", str(run), *paths, *options, *drawn]) == 0
        assert read_table(folder)["id"].to_pylist() == [0, 2]
        (line,) = (folder / "quarantine" / "000000-00000.jsonl").read_text().splitlines()
        assert json.loads(line)["reason"] == "the model's output is not finite"
    model = regauge.load(run, threads=1)
    assert len(model.generate(["w5 w6", "w9"], max_new_tokens=3)) == 2
    for call in (model.generate, model.predict):
        with pytest.raises(DataError, match="record 1: the model's output is not finite"):
            call(["w5 w6", f"w{WORD}"])
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", f"w{WORD}"]) == 64
    assert "the model's output is not finite" in capsys.readouterr().err


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
    with pytest.raises(DataError, match="record 2: the model's output is not finite"):
        regauge.load(run, threads=1).predict(texts, texts[::-1])


def test_a_damaged_model_is_an_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(run, tmp_path / "all", [f"w{WORD} w{number}" for number in range(5, 9)]) == 64
    assert "most records are rejected: 4 of 4" in capsys.readouterr().err
