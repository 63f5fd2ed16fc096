"""Generation from held-out prompts: equal on any world, and without effect on training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed import datasets
from distributed.jobs import lines, losses, weights
from distributed.runs import FULL, Runs, cases, evaluation, settings, strategy_table
from regauge.data.dataset import Dataset
from regauge.evaluation.offline import evaluate_models
from regauge.system.errors import SettingsError
from regauge.system.processes import World

PROMPTS, MOST = 5, 6
SAMPLES = {"prompts": PROMPTS, "max_new_tokens": MOST, "prompt_tokens": 5}
WRITING: dict[str, Any] = {
    "evaluation": {"every_steps": 10, "samples": SAMPLES},
    "stop": {"steps": 20},
    "output": {"checkpoint": {"every_steps": 1000}},
}
SILENT = {**WRITING, "evaluation": {"every_steps": 10}}


def read_samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def encode(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "size", "strategy"),
    cases(
        [
            ("sft", 2, "fsdp"),
            ("sft", 2, "ddp"),
            ("sft", 3, "zero1"),
            ("clm", 3, "fsdp"),
            ("dpo", 2, "fsdp"),
        ],
        [("sft", 2, "fsdp")],
    ),
)
def test_samples_do_not_depend_on_the_world(
    runs: Runs, size: int, strategy: str, task: str
) -> None:
    alone = read_samples(runs.train_once(1, task, **WRITING))
    assert [line["step"] for line in alone] == [0] * PROMPTS + [10] * PROMPTS + [20] * PROMPTS
    assert alone[0]["completion"] != alone[-PROMPTS]["completion"], "nothing was learnt"
    folder = runs.train_once(size, task, strategy=strategy_table(strategy), **WRITING)
    assert read_samples(folder) == alone


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "strategy"),
    cases([(2, "fsdp"), (2, "zero1"), (4, "ddp")], [(2, "fsdp")]),
)
def test_drawn_samples_do_not_depend_on_the_world(runs: Runs, size: int, strategy: str) -> None:
    drawn = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 7}
    options = {**WRITING, "evaluation": {"every_steps": 10, "samples": {**SAMPLES, **drawn}}}
    alone = read_samples(runs.train_once(1, "clm", **options))
    assert len({line["completion"] for line in alone}) > PROMPTS
    table = strategy_table(strategy)
    assert read_samples(runs.train_once(size, "clm", strategy=table, **options)) == alone
    other = {**options, "evaluation": {"samples": {**SAMPLES, **drawn, "seed": 8}}}
    last = [line["completion"] for line in alone if line["step"] == 20]
    again = read_samples(runs.train_once(1, "clm", **other))
    assert [line["completion"] for line in again if line["step"] == 20] != last


def test_a_stop_text_ends_a_completion(runs: Runs) -> None:
    greedy = list(read_samples(runs.train_once(1, "clm", **WRITING)))
    line = next(line for line in greedy if len(line["completion"].split()) == MOST)
    stop = line["completion"].split()[2]
    samples = {**SAMPLES, "stop": (stop,)}
    options = {**WRITING, "evaluation": {"every_steps": 10, "samples": samples}}
    stopped = read_samples(runs.train_once(1, "clm", **options))
    for before, after in zip(greedy, stopped, strict=True):
        start = before["completion"].find(stop)
        assert after["completion"] == before["completion"][: start if start >= 0 else None]
        assert after["is_complete"] == (before["is_complete"] or start >= 0)
    assert any(line["is_complete"] for line in stopped)


@pytest.mark.parametrize("task", ["sft", "clm"])
def test_completions_equal_greedy_generation_of_transformers(runs: Runs, task: str) -> None:
    folder = runs.train_once(1, task, **WRITING)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    last = [line for line in read_samples(folder) if line["step"] == 20]
    assert len({line["prompt"] for line in last}) == PROMPTS
    for line in last:
        prompt = torch.tensor([encode(line["prompt"])])
        room = min(MOST, datasets.LENGTH - prompt.shape[1])
        with torch.no_grad():
            options = {"do_sample": False, "max_new_tokens": room}
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            expected = output[0, prompt.shape[1] :].tolist()
        ended = expected[-1] == datasets.FACTS.sep_token_id
        assert line["is_complete"] == ended
        assert encode(line["completion"]) == expected[: len(expected) - ended]


def test_prompts_and_references_are_held_out_rows(runs: Runs) -> None:
    rows = Dataset(runs.data["chat"]).rows("heldout")
    known = {}
    for row in rows.take(range(len(rows))):
        for segment in (1, 2, 3):
            inside = row["segments"] == segment
            tokens, marks = row["tokens"][inside], row["loss_mask"][inside]
            cut = int(marks.argmax())
            known[tuple(tokens[:cut].tolist())] = tokens[cut:][:MOST].tolist()
    for line in read_samples(runs.train_once(1, "sft", **WRITING)):
        assert known[tuple(encode(line["prompt"]))] == encode(line["reference"])
    short = {**WRITING, "evaluation": {"samples": {"prompts": 3, "prompt_tokens": 4}}}
    samples = read_samples(runs.train_once(1, "clm", **short))
    beginnings = {
        tuple(row["tokens"][row["segments"] == segment][:4].tolist())
        for row in rows.take(range(len(rows)))
        for segment in (1, 2, 3)
    }
    assert {tuple(encode(line["prompt"])) for line in samples} <= beginnings
    assert all(len(encode(line["prompt"])) == 4 for line in samples)


@pytest.mark.parametrize(
    ("size", "dropout"),
    cases(
        [(size, dropout) for size in (1, 2) for dropout in ("counter", "native")],
        [(2, "counter")],
    ),
)
def test_generation_does_not_change_training(runs: Runs, size: int, dropout: str) -> None:
    model = {"model": {"dropout_kind": dropout}}
    plain, writing = (
        runs.train_once(size, "clm", **model, **options) for options in (SILENT, WRITING)
    )
    assert losses(lines(plain)) == losses(lines(writing))
    before, after = weights(plain), weights(writing)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    books = [
        json.loads((folder / "ledger.jsonl").read_text().splitlines()[-1])
        for folder in (plain, writing)
    ]
    assert books[0]["tokens"] == books[1]["tokens"] > 0
    assert not (plain / "samples.jsonl").exists()


@FULL
def test_generation_compiles_no_additional_graph(runs: Runs) -> None:
    counts = []
    for changes in (SILENT, WRITING):
        compiled = {**changes, "stop": {"steps": 2}, "execution": {"compile": "blocks"}}
        folder = runs.folder("compiled")
        counts += runs.job("train_counting_graphs", 1, folder, "sft", compiled)
    assert len(read_samples(folder)) == 2 * PROMPTS
    assert counts[0] == counts[1] > 0


@pytest.mark.full
def test_a_full_row_ends_a_completion(runs: Runs) -> None:
    most: dict[str, Any] = {"prompts": 10, "max_new_tokens": 200, "prompt_tokens": 2}
    samples = read_samples(
        runs.train_once(1, "clm", **{**WRITING, "evaluation": {"samples": most}})
    )
    lengths = [len(encode(line["prompt"])) + len(encode(line["completion"])) for line in samples]
    open_ended = [
        length for length, line in zip(lengths, samples, strict=True) if not line["is_complete"]
    ]
    assert set(open_ended) == {datasets.LENGTH}


def test_rows_without_a_prompt_are_logged(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"packed": datasets.write_packed(tmp_path / "data", 8, 2)}
    (tmp_path / "runs").mkdir()
    few = Runs(tmp_path / "runs", data, runs.world)
    long = {"samples": {"prompts": 1, "prompt_tokens": datasets.LENGTH}}
    few.train_once(1, "clm", evaluation=long, stop={"steps": 1})
    assert "no held-out row has a prompt: see evaluation.samples" in caplog.text


def test_samples_of_a_non_generative_task_are_refused(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"'mlm' generates no text; leave evaluation.samples out"
    ):
        settings(tmp_path, runs.data["packed"], "mlm", **WRITING)


def test_saved_models_generate_the_same_completions(runs: Runs, tmp_path: Path) -> None:
    folder = runs.train_once(1, "sft", **WRITING)
    options = {"evaluation": {"microbatch_rows": 2, "samples": SAMPLES}}
    table = evaluation(tmp_path / "table", runs.data["chat"], "sft", {"mine": folder}, **options)
    for _ in range(2):  # a second measurement replaces the first
        evaluate_models(table, World())
    last = [line for line in read_samples(folder) if line["step"] == 20]
    for line in last:
        del line["attempt"], line["step"]
    assert read_samples(tmp_path / "table") == [{"model": "mine", **line} for line in last]
