"""A causal model as an artifact: texts that go on as transformers' own `generate` lets them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import regauge
from distributed import datasets
from end_to_end.predicting import EAGER, exported, table, texts, trained, written
from regauge.artifacts.export_settings import Text
from regauge.artifacts.programs import of_folder
from regauge.cli import main

MOST = 6


@pytest.fixture(scope="module", params=["clm", "llama"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("writer"), request.param, datasets.packed)


def expected(model: Path, prompts: list[str], limit: int) -> list[str]:
    """Return what transformers writes behind each prompt alone, or behind its last tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    writer = AutoModelForCausalLM.from_pretrained(model).eval()
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        ids = ids[:, -limit:]
        more = {"pad_token_id": 0, "eos_token_id": tokenizer.sep_token_id}
        with torch.no_grad():
            whole = writer.generate(ids, max_new_tokens=MOST, do_sample=False, **more)
        found.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def test_texts_go_on_alone_and_in_batches_as_transformers_lets_them(
    run: Path, tmp_path: Path
) -> None:
    made = (*EAGER, f"text.answer_tokens={MOST}", "shapes.tokens=128")
    artifact = exported(run, tmp_path / "artifact", *made)
    manifest = json.loads((artifact / "manifest.json").read_text())
    limit = manifest["program"]["reads"]["tokens"]
    assert limit == 32 - MOST
    source = written(tmp_path / "texts.jsonl", 20)
    command = ["predict", str(artifact), "--source", str(source), "--to", str(tmp_path / "out")]
    assert main([*command, "execution.executor=inline", "predict.rows=7"]) == 0
    found = table(tmp_path / "out")["answer"].to_pylist()
    assert found == expected(run / "model", texts(20), limit)
    assert any(found)
    assert regauge.load(artifact).answer(texts(20)[:3])["answer"] == found[:3]


def test_answers_leave_room_for_a_text(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(run), "--to", str(tmp_path / "artifact"), *EAGER]
    assert main(["export", *given, "text.answer_tokens=30"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "text.answer_tokens = 30 leaves no room for a text; set at most 29" in line


def test_a_folder_is_read_as_those_do_who_left_it(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(run / "model", folder)
    wanted = Text(answer_tokens=MOST)
    assert of_folder(folder, wanted).texts.manner == "regauge"
    table = json.loads((folder / "config.json").read_text())
    assert table.pop("texts_read_as") == "regauge"
    (folder / "config.json").write_text(json.dumps(table))
    assert of_folder(folder, wanted).texts.manner == "transformers"


def test_a_request_stands_in_the_template_of_its_run(tmp_path: Path) -> None:
    run = trained(tmp_path, "sft", datasets.chats)
    made = (*EAGER, "text.answer_tokens=4", "shapes.tokens=64")
    (run / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}w7 {{ m.content }} {% endfor %}w8"
    )
    artifact = exported(run, tmp_path / "artifact", *made)
    reads = json.loads((artifact / "manifest.json").read_text())["program"]["reads"]
    assert reads["ends"] == "chat"
    loaded = regauge.load(artifact)
    read = loaded._reader.read([["w9 w10"]]).rows
    assert read.texts[0].ids.tolist() == [7, 9, 10, 8]
    assert len(loaded.answer(["w9 w10"])["answer"]) == 1
