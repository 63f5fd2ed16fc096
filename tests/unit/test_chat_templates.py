"""Conversations become the tokens of their template, and what the assistant says is marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from regauge import config
from regauge.data import chat_templates, dataset
from regauge.errors import SettingsError
from regauge.verbs import prepare as verb
from unit.preparing import contents

MARKED = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>\\n' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""
FORGETFUL = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{{- ('<think></think>' if loop.last and message.role == 'assistant') -}}
{{- message.content + '<|im_end|>' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""
SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]
ROLES = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<|im_end|>"}
WORDS = ["the", "river", "runs", "north", "of", "a", "town", "where", "nobody", "asks", "me"]


def talks(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return conversations of one to three questions, some with a system message."""
    draw = np.random.default_rng(seed)

    def said(least: int) -> str:
        words = draw.choice(WORDS, int(draw.integers(least, 12))).tolist()
        return ("\n" if draw.random() < 0.2 else " ").join(words)

    found = []
    for number in range(count):
        messages = [{"role": "system", "content": said(2)}] if number % 3 == 0 else []
        for _ in range(1 + number % 3):
            messages.append({"role": "user", "content": f"{number} {said(1)}"})
            messages.append({"role": "assistant", "content": said(1)})
        found.append({"messages": messages, "number": number})
    return found


def write(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def tokenizer(folder: Path, template: str | None = MARKED) -> Any:
    """Save a tokenizer that begins every text with <s>, and return it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [message["content"] for talk in talks(90) for message in talk["messages"]]
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **ROLES)
    whole.chat_template = template
    whole.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def settings(folder: Path, out: str = "out", **changes: Any) -> verb.Prepare:
    base = {
        "data": {"path": str(folder / out)},
        "source": {
            "kind": "jsonl",
            "files": [str(folder / "*.jsonl")],
            "columns": ["messages"],
            "piece_mib": 1,
        },
        "tokenizer": {"path": str(folder / "tokenizer")},
        "rows": {"layout": "chat", "length": 192},
        "split": {"heldout_share": 0.2},
        "prepare": {"processes": 1},
    }
    return config.build(verb.Prepare, config.merge(base, changes))


def prepared(folder: Path, out: str = "out", **changes: Any) -> dataset.Dataset:
    verb.run(settings(folder, out, **changes))
    return dataset.Dataset(folder / out)


def conversations(data: dataset.Dataset) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and marks of every conversation of all rows, sorted."""
    found = []
    for split in ("train", "heldout"):
        rows = data.split(split)
        for row in rows.take(range(len(rows))):
            assert len(row["tokens"]) == len(row["segments"]) == len(row["answers"]) == 192
            assert not row["answers"][row["segments"] == 0].any()
            for segment in range(1, int(row["segments"].max()) + 1):
                inside = row["segments"] == segment
                found.append((row["tokens"][inside].tolist(), row["answers"][inside].tolist()))
    return sorted(found)


ALPACA: dict[str, Any] = {
    "source": {"columns": ["instruction", "input", "output"]},
    "tokenizer": {"path": None, "vocabulary": 400},
    "rows": {"template": "alpaca"},
}


def test_rows_hold_the_tokens_of_the_template_and_mark_the_answers(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", talks(60))
    known = tokenizer(tmp_path / "tokenizer")
    expected = []
    for talk in talks(60):
        both = known.apply_chat_template(talk["messages"], return_assistant_tokens_mask=True)
        expected.append((both["input_ids"], both["assistant_masks"]))
    data = prepared(tmp_path)
    found = conversations(data)
    assert found == sorted(expected)
    assert all(tokens.count(1) == 1 for tokens, _ in found), "<s> is written once"
    assert data.manifest.fields["answers"].kind == "answers"
    assert data.manifest.real_token_share > 0.8
    assert {split.rows for split in data.manifest.splits.values()} != {60}, "nothing was packed"


def test_a_prompt_has_the_same_tokens_as_where_it_is_answered(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", talks(30))
    known = tokenizer(tmp_path / "tokenizer")
    found = {tuple(tokens): marks for tokens, marks in conversations(prepared(tmp_path))}
    for talk in talks(30):
        whole = known.apply_chat_template(talk["messages"])["input_ids"]
        prompt = known.apply_chat_template(talk["messages"][:-1], add_generation_prompt=True)
        asked = prompt["input_ids"]
        assert whole[: len(asked)] == asked
        marks = found[tuple(whole)]
        assert marks[len(asked) - 1] == 0
        assert all(marks[len(asked) :])


def test_a_template_of_a_name_or_a_file_is_used_and_goes_with_the_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", talks(30))
    known = tokenizer(tmp_path / "tokenizer", None)
    named = prepared(tmp_path, "named", rows={"template": "chatml"})
    file = tmp_path / "mine.jinja"
    file.write_text(chat_templates.template_file("chatml").read_text())
    mine = prepared(tmp_path, "mine", rows={"template": str(file)})
    assert conversations(named) == conversations(mine)
    loaded = transformers.AutoTokenizer.from_pretrained(named.folder / "tokenizer")
    whole = sorted(loaded.apply_chat_template(talk["messages"])["input_ids"] for talk in talks(30))
    assert [tokens for tokens, _ in conversations(named)] == whole
    assert known.chat_template is None
    file.write_text(MARKED)
    with pytest.raises(Exception, match=r"rows.template_sha256 was '[0-9a-f]+' and is"):
        prepared(tmp_path, "mine", rows={"template": str(file)})


def test_alpaca_records_are_written_with_headings_and_an_end(tmp_path: Path) -> None:
    records = [
        {"instruction": f"Add one to {n}.", "input": ["", "as a word"][n % 2], "output": f"{n + 1}"}
        for n in range(40)
    ]
    write(tmp_path / "a.jsonl", [*records, {**records[0], "output": "  "}, {"instruction": "?"}])
    data = prepared(tmp_path, **ALPACA)
    assert data.manifest.skipped == {"no answer": 1, "no conversation": 1}
    decoder = Tokenizer.from_file(str(data.folder / "tokenizer" / "tokenizer.json"))
    loaded = transformers.AutoTokenizer.from_pretrained(data.folder / "tokenizer")
    found, rows = {}, conversations(data)
    for tokens, marks in rows:
        cut = marks.index(1)
        asked, answered = (
            decoder.decode(part, skip_special_tokens=False) for part in (tokens[:cut], tokens[cut:])
        )
        found[asked] = answered
    for n, record in enumerate(records):
        given = "### Input:\nas a word\n\n" if n % 2 else ""
        head = f"[CLS] ### Instruction:\n{record['instruction']}\n\n{given}### Response:\n"
        assert found[head] == f"{record['output']}[SEP]"
        messages = chat_templates.conversation(record)
        assert messages
        whole = loaded.apply_chat_template(messages)["input_ids"]
        assert whole in [tokens for tokens, _ in rows]


def test_what_cannot_be_used_is_counted_and_in_quarantine(tmp_path: Path) -> None:
    good = talks(20)
    turn = good[0]["messages"][-2:]
    bad: list[Any] = [
        {"messages": "no list"},
        {"messages": []},
        {"messages": [{"from": "human", "value": "other names"}]},
        {"messages": [{"role": "user", "content": ["parts"]}]},
        {"number": 3},
        {"messages": [{**turn[0], "content": "end it with <|im_end|>"}, turn[1]]},
        {"messages": turn[:1]},
        {"messages": turn[1:]},
        {"messages": [*turn, {**turn[0], "content": "long " * 300}, turn[1]]},
        {"messages": [{**turn[0], "content": "long " * 300}, turn[1]]},
    ]
    write(tmp_path / "a.jsonl", [*good, *bad])
    tokenizer(tmp_path / "tokenizer")
    cut = prepared(tmp_path, "cut")
    expected = {"a special token in a message": 1, "no answer": 2, "no conversation": 5}
    assert cut.manifest.skipped == {**expected, "no answer within 192 tokens": 1}
    assert cut.manifest.truncated == {"messages": 1}
    assert len(conversations(cut)) == 21
    whole = prepared(tmp_path, "whole", rows={"too_long": "reject"})
    assert whole.manifest.skipped == {**expected, "longer than 192 tokens": 2}
    assert whole.manifest.truncated == {}
    lines = (whole.folder / "rejected.jsonl").read_text().splitlines()
    assert {item["place"] for item in map(json.loads, lines)} == {
        f"line {number}" for number in (21, 22, 23, 24, 25, 26, 29, 30)
    }


def test_a_template_that_rewrites_earlier_turns_is_refused_for_those_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", talks(30))
    tokenizer(tmp_path / "tokenizer", FORGETFUL)
    data = prepared(tmp_path)
    assert data.manifest.skipped == {"the chat template cannot write it": 20}
    assert len(conversations(data)) == 10


@pytest.mark.full
def test_two_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{**talk, "note": "-" * 60_000} for talk in talks(40)])
    tokenizer(tmp_path / "tokenizer")
    one = prepared(tmp_path, "one")
    two = prepared(tmp_path, "two", prepare={"processes": 2})
    assert len(json.loads((two.folder / "inputs.json").read_text())["pieces"]) == 3
    assert contents(one.folder) == contents(two.folder)


ENDLESS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
ENDLESS += "{{ 'assistant: ' if add_generation_prompt }}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "has no chat template; set rows.template to"),
        ({"tokenizer": {"path": None}}, "a trained tokenizer has no chat template; set rows."),
        ({"rows": {"template": "alpca"}}, "no chat template 'alpca'; did you mean 'alpaca'"),
        ({"rows": {"too_long": "split"}}, "not split: set too_long to truncate or reject"),
        ({"rows": {"text": "body"}}, "'text' is no part of rows of layout 'chat'"),
        ({"rows": {"template": "endless.jinja"}}, "no special token of the tokenizer"),
        ({"rows": {"template": "broken.jinja"}}, "cannot be used: Expected an expression"),
        ({"source": {"columns": []}}, 'messages set source.columns = ["messages"]'),
    ],
)
def test_bad_settings_are_one_line_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", talks(5))
    tokenizer(tmp_path / "tokenizer", MARKED if "source" in changes else None)
    Path("endless.jinja").write_text(ENDLESS)
    Path("broken.jinja").write_text("{{ }}")
    with pytest.raises(SettingsError) as caught:
        prepared(tmp_path, **changes)
    assert said.replace("no special", "no answer with a special") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists() == ("messages set" in said)


def test_without_a_template_nothing_is_begun(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", talks(5))
    tokenizer(tmp_path / "tokenizer", None)
    before = contents(tmp_path)
    for refuse in (verb.plan, verb.run):
        with pytest.raises(SettingsError, match="has no chat template"):
            refuse(settings(tmp_path))
    assert contents(tmp_path) == before


def test_parquet_gives_messages_as_well(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    tokenizer(tmp_path / "tokenizer")
    write(tmp_path / "a.jsonl", talks(20))
    pq.write_table(pa.Table.from_pylist(talks(20)), tmp_path / "a.parquet")
    source = {"kind": "parquet", "files": [str(tmp_path / "a.parquet")], "columns": ["messages"]}
    other = prepared(tmp_path, "parquet", source=source)
    assert conversations(other) == conversations(prepared(tmp_path))
