"""Export of causal models: the artifact generates the same texts as transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import regauge
from distributed import datasets
from end_to_end.predicting import (
    EAGER,
    export_run,
    random_texts,
    read_table,
    train_model,
    write_records,
)
from regauge.cli import main
from regauge.inference.export.export_settings import TextSettings
from regauge.inference.export.programs import build_folder_spec

MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module", params=["clm", pytest.param("llama", marks=pytest.mark.full)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model(tmp_path_factory.mktemp("writer"), request.param, datasets.write_packed)


def generate_with_transformers(model: Path, prompts: list[str], limit: int) -> list[str]:
    """Return the texts that transformers generates for the last tokens of each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    writer = AutoModelForCausalLM.from_pretrained(model).eval()
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        ids = ids[:, -limit:]
        more = {"pad_token_id": 0, "eos_token_id": tokenizer.sep_token_id}
        with torch.no_grad():
            whole = writer.generate(ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, **more)
        texts.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def test_generated_texts_equal_those_of_transformers(run: Path, tmp_path: Path) -> None:
    options = (*EAGER, f"text.max_new_tokens={MAX_NEW_TOKENS}", "buckets.max_batch_tokens=128")
    artifact = export_run(run, tmp_path / "artifact", *options)
    manifest = json.loads((artifact / "manifest.json").read_text())
    limit = manifest["program"]["tokenization"]["max_length"]
    assert limit == 32 - MAX_NEW_TOKENS
    source = write_records(tmp_path / "texts.jsonl", 20)
    command = ["predict", str(artifact), "--source", str(source), "--to", str(tmp_path / "out")]
    assert main([*command, "execution.executor=inline", "predict.shard_records=7"]) == 0
    answers = read_table(tmp_path / "out")["generated_text"].to_pylist()
    assert answers == generate_with_transformers(run / "model", random_texts(20), limit)
    assert any(answers)
    assert regauge.load(artifact).predict(random_texts(20)[:3])["generated_text"] == answers[:3]


def test_new_tokens_must_leave_room_for_a_text(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(run), "--to", str(tmp_path / "artifact"), *EAGER]
    assert main(["export", *given, "text.max_new_tokens=30"]) == 2
    progress, line = capsys.readouterr().err.strip().splitlines()
    assert progress.startswith("load: ")
    assert "text.max_new_tokens = 30 leaves no room for a text; set at most 29" in line


def test_the_tokenizer_convention_of_a_folder_is_read(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(run / "model", folder)
    settings = TextSettings(max_new_tokens=MAX_NEW_TOKENS)
    tokenization = build_folder_spec(folder, settings).entry.required_tokenization
    assert tokenization.convention == "regauge"
    table = json.loads((folder / "config.json").read_text())
    assert table.pop("tokenizer_convention") == "regauge"
    (folder / "config.json").write_text(json.dumps(table))
    assert (
        build_folder_spec(folder, settings).entry.required_tokenization.convention == "transformers"
    )


def test_generation_stops_at_every_end_token_of_a_folder(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(run / "model", folder)
    options = TextSettings(max_new_tokens=MAX_NEW_TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    records = [tokenizer(text).input_ids for text in random_texts(6)]
    writer = AutoModelForCausalLM.from_pretrained(folder).eval()
    document = json.loads((folder / "generation_config.json").read_text())
    ends = [document["eos_token_id"]]
    for ids in records:
        row = writer.generate(torch.tensor([ids]), max_new_tokens=1, do_sample=False)[0]
        ends.append(int(row[len(ids)]))
    document["eos_token_id"] = ends
    (folder / "generation_config.json").write_text(json.dumps(document))
    program = build_folder_spec(folder, options).program
    for ids in records:
        inputs = torch.tensor([ids], dtype=torch.int32), torch.tensor([len(ids)])
        assert program(*inputs).tolist() == [[-1] * MAX_NEW_TOKENS]


def test_a_text_is_rendered_in_the_chat_template_of_the_run(tmp_path: Path) -> None:
    run = train_model(tmp_path, "sft", datasets.write_chats)
    options = (*EAGER, "text.max_new_tokens=4", "buckets.max_batch_tokens=64")
    (run / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}w7 {{ m.content }} {% endfor %}w8"
    )
    artifact = export_run(run, tmp_path / "artifact", *options)
    program = json.loads((artifact / "manifest.json").read_text())["program"]
    assert program["tokenization"]["input_format"] == "chat"
    loaded = regauge.load(artifact)
    records = loaded._preprocessor.encode_records([["w9 w10"]]).records
    assert records.texts[0].ids.tolist() == [7, 9, 10, 8]
    assert len(loaded.predict(["w9 w10"])["generated_text"]) == 1
    record = {"messages": [{"role": "user", "content": "w9"}], "topic": "w10"}
    (tmp_path / "chat.jsonl").write_text(json.dumps(record) + "\n")
    command = ["predict", str(artifact), "--source", str(tmp_path / "chat.jsonl")]
    to = ("--to", str(tmp_path / "answers"), "execution.executor=inline")
    assert main([*command, *to]) == 0
    table = read_table(tmp_path / "answers")
    assert table.column_names == ["messages", "topic", "generated_text"]
    assert table["generated_text"].to_pylist() == [loaded.generate("w9")]
