"""Models without an export: runs and model folders in `predict`, `load` and `generate`."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import regauge
from distributed import datasets
from end_to_end.predicting import (
    random_texts,
    read_output_files,
    read_table,
    train_model,
    vector_column,
    write_records,
)
from regauge.cli import main
from regauge.inference.export.trained_task import find_task_with_dataset
from regauge.inference.export.uncompiled import open_model
from regauge.system.errors import DataError, SettingsError

TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'w11 ', 'user': 'w7 '}.get(m.role, 'w8 ') }}"
    "{{ m.content }} {% endfor %}w8"
)
"""A chat template whose roles are words of the vocabulary."""
INLINE = "execution.executor=inline"
DRAWN = ("generation.temperature=1.0", "generation.max_new_tokens=6", "generation.seed=3")
TIMEOUT_SECONDS = 120.0


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model(tmp_path_factory.mktemp("writer"), "sft", datasets.write_chats)


@pytest.fixture(scope="module")
def chat(writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a causal model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(writer / "model", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def predict(model: Path, source: Path, to: Path, *more: str) -> int:
    return main(["predict", str(model), "--source", str(source), "--to", str(to), INLINE, *more])


def read_answers(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "shards").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_a_run_and_its_model_folder_have_the_vectors_of_python(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_records(tmp_path / "texts.jsonl", 12)
    expected = regauge.load(encoder).encode(random_texts(12))
    for model, command in ((encoder, ""), (encoder / "model", "--model ")):
        folder = tmp_path / f"out-{model.name}"
        assert predict(model, source, folder, "output.dtype=float32") == 0
        message = f"runs uncompiled (eager fp32); for speed, run: regauge export {command}{model}"
        assert capsys.readouterr().err.count(message) == 1
        assert np.array_equal(vector_column(read_table(folder)), expected)


def test_other_weights_of_a_folder_are_another_job(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, source = tmp_path / "model", write_records(tmp_path / "texts.jsonl", 4)
    shutil.copytree(encoder / "model", model)
    assert predict(model, source, tmp_path / "out") == 0
    before = read_output_files(tmp_path / "out")
    assert predict(model, source, tmp_path / "out") == 0
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    capsys.readouterr()
    assert predict(model, source, tmp_path / "out") == 64
    assert "artifact_sha256" in capsys.readouterr().err
    assert read_output_files(tmp_path / "out") == before


def test_a_run_reads_the_fields_of_its_task(tmp_path: Path) -> None:
    run = train_model(tmp_path, "rank", datasets.write_groups)
    trained = find_task_with_dataset(run)
    assert trained is not None
    program = open_model(str(run)).program
    assert program.fields == trained.input_spec
    assert program.output_kind == "scores"


def test_text_generation_needs_a_backend_with_loops(writer: Path) -> None:
    with pytest.raises(SettingsError, match="cannot generate text; use backend 'eager'"):
        regauge.load(writer, backend="torch-compile")


@pytest.mark.full
def test_drawn_texts_do_not_depend_on_shards_workers_or_python(
    writer: Path, tmp_path: Path
) -> None:
    source, texts = write_records(tmp_path / "texts.jsonl", 21), random_texts(21)
    options = ("output.format=jsonl", *DRAWN)
    assert predict(writer, source, tmp_path / "whole", *options) == 0
    answers = read_answers(tmp_path / "whole")
    small = (*options, "predict.shard_records=4")
    assert predict(writer, source, tmp_path / "small", *small) == 0
    assert read_answers(tmp_path / "small") == answers
    command = ["predict", str(writer), "--source", str(source), "--to", str(tmp_path / "many")]
    assert main([*command, *small, "execution.workers=2"]) == 0
    assert read_output_files(tmp_path / "many") == read_output_files(tmp_path / "small")
    model = regauge.load(writer)
    drawn = model.generate(texts, temperature=1.0, max_new_tokens=6, seed=3)
    assert [line["generated_text"] for line in answers] == drawn
    assert [line["id"] for line in answers] == list(range(21))
    assert len(set(drawn)) > 15
    assert model.generate(texts, temperature=1.0, max_new_tokens=6, seed=4) != drawn
    assert model.generate(texts[0], temperature=1.0, max_new_tokens=6, seed=3) == drawn[0]
    assert predict(writer, source, tmp_path / "whole", *options, "generation.seed=4") == 64


def test_draws_depend_on_the_piece_and_on_no_job(writer: Path, tmp_path: Path) -> None:
    source, whole, shared = tmp_path / "a.parquet", tmp_path / "whole", tmp_path / "shared"
    rows = {"id": list(range(10)), "text": ["w9"] * 10}
    pq.write_table(pa.table(rows), source, row_group_size=5)
    options = ("output.format=jsonl", *DRAWN)
    assert predict(writer, source, whole, *options) == 0
    for index in (1, 0):
        assert predict(writer, source, shared, *options, "--count", "2", "--index", str(index)) == 0
    assert read_output_files(shared) == read_output_files(whole)
    answers = [line["generated_text"] for line in read_answers(whole)]
    assert len(set(answers)) == 10
    assert answers[:5] == regauge.load(writer).generate(
        ["w9"] * 5, temperature=1.0, max_new_tokens=6, seed=3
    )


def test_stop_texts_end_answers_exactly(writer: Path, tmp_path: Path) -> None:
    model, texts = regauge.load(writer), random_texts(9)
    whole = model.generate(texts, temperature=1.0, max_new_tokens=8)
    stop = whole[0].split()[3]
    stopped = model.generate(texts, temperature=1.0, max_new_tokens=8, stop=stop)
    assert stopped == [text.partition(stop)[0] for text in whole]
    assert len(stopped[0]) < len(whole[0])
    source = write_records(tmp_path / "texts.jsonl", 9)
    options = ("output.format=jsonl", "generation.temperature=1.0", "generation.max_new_tokens=8")
    more = (*options, f'generation.stop=["{stop}"]')
    assert predict(writer, source, tmp_path / "out", *more) == 0
    assert [line["generated_text"] for line in read_answers(tmp_path / "out")] == stopped


CONVERSATIONS: list[Any] = [
    {"id": 1, "messages": [{"role": "user", "content": "w9"}]},
    {
        "id": 2,
        "messages": [{"role": "system", "content": "w12"}, {"role": "user", "content": "w9"}],
    },
    {
        "id": 3,
        "messages": [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w20"}],
    },
    {
        "id": 4,
        "messages": [
            {"role": "user", "content": "w9"},
            {"role": "assistant", "content": "w20"},
            {"role": "user", "content": "w21"},
        ],
    },
    {"id": 5, "messages": [{"role": "assistant", "content": "w20"}]},
    {"id": 6, "messages": [{"role": "user", "content": "a [SEP] b"}]},
    {"id": 7, "messages": "no list"},
    {"id": 8, "messages": json.dumps([{"role": "user", "content": "w9"}])},
]


def test_conversations_are_answered_as_in_python(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(f"{json.dumps(record)}\n" for record in CONVERSATIONS))
    assert predict(chat, source, tmp_path / "out", "output.format=jsonl") == 0
    answers = {line["id"]: line["generated_text"] for line in read_answers(tmp_path / "out")}
    assert list(answers) == [1, 2, 3, 4, 8]
    model = regauge.load(chat)
    assert answers[1] == answers[3] == answers[8] == model.generate("w9")
    assert answers[2] == model.generate(CONVERSATIONS[1]["messages"])
    assert answers[4] == model.generate(CONVERSATIONS[3])
    [path] = (tmp_path / "out" / "quarantine").iterdir()
    reasons = [json.loads(line)["reason"] for line in path.read_text().splitlines()]
    assert reasons == ["no conversation", "a special token in a message", "no conversation"]
    assert "ignores" not in capsys.readouterr().err


def test_prompts_have_the_tokens_of_the_template(chat: Path) -> None:
    model = regauge.load(chat)
    preprocessor: Any = model._preprocessor
    request = preprocessor.render_request(CONVERSATIONS[3])
    ids = preprocessor.encode_requests([request]).records.texts[0].ids.tolist()
    assert ids == [7, 9, 8, 20, 7, 21, 8]


def test_instructions_are_answered_and_their_outputs_kept(chat: Path, tmp_path: Path) -> None:
    records = [
        {"instruction": "w9", "input": "w10", "output": "w3"},
        {"instruction": "w9", "input": "", "output": "w4"},
    ]
    source = tmp_path / "alpaca.jsonl"
    source.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert predict(chat, source, tmp_path / "out", "output.format=jsonl") == 0
    answers, model = read_answers(tmp_path / "out"), regauge.load(chat)
    assert [line["output"] for line in answers] == ["w3", "w4"]
    assert [line["generated_text"] for line in answers] == model.generate(["w9\n\nw10", "w9"])
    assert model.generate(records[0]) == answers[0]["generated_text"]


def test_ignored_parts_of_conversations_are_reported(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"messages": [{"role": "user", "content": "w9"}], "tools": [{"name": "w12"}]}
    source = tmp_path / "tools.jsonl"
    source.write_text(f"{json.dumps(record)}\n" * 3)
    assert predict(chat, source, tmp_path / "out") == 0
    assert capsys.readouterr().err.count("chat template of the model ignores 'tools.name'") == 1


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([{"role": "user"}], "the content of message 1 is missing"),
        ([{"role": "assistant", "content": "w9"}], "no message precedes the answer"),
        (CONVERSATIONS[2], "ends with an answer of the assistant; end it with the message"),
        ({"text": "w9"}, "neither 'messages' nor 'instruction'"),
        (7, "a prompt is of type int; pass a text"),
        ("half \ud83d", "lone surrogate"),
    ],
)
def test_invalid_prompts_are_refused(chat: Path, prompt: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        regauge.load(chat).generate(prompt)


def test_only_models_that_generate_text_answer(encoder: Path, writer: Path) -> None:
    with pytest.raises(SettingsError, match="returns vectors, not generated text; call encode"):
        regauge.load(encoder).generate("w9")
    with pytest.raises(DataError, match="no chat template, so it cannot answer a conversation"):
        regauge.load(writer).generate([{"role": "user", "content": "w9"}])
    with pytest.raises(SettingsError, match=r"'generation': top_p has no effect at temperature 0"):
        regauge.load(writer).generate("w9", temperature=0, top_p=0.5)
    with pytest.raises(SettingsError, match="on_text is for one prompt, got 2"):
        regauge.load(writer).generate(["w9", "w8"], on_text=print)


def test_no_prompt_has_no_answer_and_one_prompt_streams(writer: Path) -> None:
    model, parts = regauge.load(writer), list[str]()
    assert model.generate([]) == []
    options: Any = {"temperature": 1.0, "max_new_tokens": 5, "seed": 2}
    [answer] = model.generate(["w9"], **options, on_text=parts.append)
    assert "".join(parts) == answer == model.generate("w9", **options)
    assert len(parts) > 1


def test_generate_prints_one_answer(
    chat: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = regauge.load(chat).generate(CONVERSATIONS[1]["messages"], max_new_tokens=5)
    command = ["generate", str(chat), "--system", "w12", "--max-new-tokens", "5"]
    assert main([*command, "--prompt", "w9"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("w9\n"))
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"model": str(chat), "prompt": "w9", "answer": expected}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--prompt", " "], "the prompt is empty"),
        (
            ["--prompt", "w9", "--temperature", "0", "generation.top_k=3"],
            "top_k has no effect at temperature 0",
        ),
        (["--prompt", "w9", "stop.steps=3"], "'stop' is not an option of generate"),
        (["--prompt", "w9", "--system", "w12"], "has no chat template, so it cannot read a system"),
    ],
)
def test_wrong_options_of_generate_are_refused(
    writer: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(writer), *arguments]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.full
def test_a_chat_in_a_terminal_ends_cleanly(chat: Path) -> None:
    terminal, child = pty.openpty()
    command = [sys.executable, "-m", "regauge", "generate", str(chat), "--max-new-tokens", "4"]
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, start_new_session=True
    )
    os.close(child)
    shown = _read_until(terminal, "> ")
    os.write(terminal, b"\x03")  # Ctrl-C: the terminal is not the controlling one
    os.write(terminal, b"w9\n")
    shown += _read_until(terminal, "> ")
    os.write(terminal, b"/exit\n")
    assert process.wait(TIMEOUT_SECONDS) == 0
    os.close(terminal)
    assert "Ctrl-C ends an answer" in shown
    assert regauge.load(chat).generate("w9", max_new_tokens=4) in shown


def _read_until(terminal: int, text: str) -> str:
    """Return the output of a terminal up to a text at its end."""
    shown, until = "", time.monotonic() + TIMEOUT_SECONDS
    while not shown.endswith(text):
        assert time.monotonic() < until, shown
        shown += os.read(terminal, 4096).decode()
    return shown


def test_a_backend_that_compiles_ahead_of_time_needs_an_export(encoder: Path) -> None:
    with pytest.raises(SettingsError, match="runs only what 'regauge export' has compiled; export"):
        regauge.load(encoder, backend="inductor")
