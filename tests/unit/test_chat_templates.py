"""Chat templates: tokens of conversations, and the loss mask of answer tokens."""

from __future__ import annotations

import json
import shutil
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
from tokenizer_families import write_tokenizer
from unit.preparing import read_contents

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


def build_conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return conversations of one to three questions, some with a system message."""
    draw = np.random.default_rng(seed)

    def draw_text(min_words: int) -> str:
        words = draw.choice(WORDS, int(draw.integers(min_words, 12))).tolist()
        return ("\n" if draw.random() < 0.2 else " ").join(words)

    records = []
    for number in range(count):
        messages = [{"role": "system", "content": draw_text(2)}] if number % 3 == 0 else []
        for _ in range(1 + number % 3):
            messages.append({"role": "user", "content": f"{number} {draw_text(1)}"})
            messages.append({"role": "assistant", "content": draw_text(1)})
        records.append({"messages": messages, "number": number})
    return records


def write_records(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def save_tokenizer(folder: Path, template: str | None = MARKED) -> Any:
    """Save a tokenizer that starts every text with <s>, and return it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [message["content"] for talk in build_conversations(90) for message in talk["messages"]]
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **ROLES)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def build_settings(folder: Path, out: str = "out", **changes: Any) -> verb.PrepareSettings:
    base = {
        "data": {"path": str(folder / out)},
        "source": {
            "kind": "jsonl",
            "files": [str(folder / "*.jsonl")],
            "columns": ["messages"],
            "chunk_mib": 1,
        },
        "tokenizer": {"path": str(folder / "tokenizer")},
        "rows": {"layout": "chat", "length": 192},
        "split": {"heldout_fraction": 0.2},
        "prepare": {"processes": 1},
    }
    return config.build(verb.PrepareSettings, config.merge(base, changes))


def prepare_dataset(folder: Path, out: str = "out", **changes: Any) -> dataset.Dataset:
    verb.run(build_settings(folder, out, **changes))
    return dataset.Dataset(folder / out)


def read_conversations(data: dataset.Dataset) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and the loss mask of every conversation of all rows, sorted."""
    conversations = []
    for split in ("train", "heldout"):
        rows = data.rows(split)
        for row in rows.take(range(len(rows))):
            assert len(row["tokens"]) == len(row["segments"]) == len(row["loss_mask"]) == 192
            assert not row["loss_mask"][row["segments"] == 0].any()
            for segment in range(1, int(row["segments"].max()) + 1):
                is_segment = row["segments"] == segment
                conversations.append(
                    (row["tokens"][is_segment].tolist(), row["loss_mask"][is_segment].tolist())
                )
    return sorted(conversations)


ALPACA: dict[str, Any] = {
    "source": {"columns": ["instruction", "input", "output"]},
    "tokenizer": {"path": None, "vocab_size": 400},
    "rows": {"chat_template": "alpaca"},
}


def test_rows_have_the_tokens_and_the_loss_mask_of_the_template(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", build_conversations(60))
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    expected = []
    for talk in build_conversations(60):
        encoding = tokenizer.apply_chat_template(
            talk["messages"], return_assistant_tokens_mask=True
        )
        expected.append((encoding["input_ids"], encoding["assistant_masks"]))
    data = prepare_dataset(tmp_path)
    conversations = read_conversations(data)
    assert conversations == sorted(expected)
    assert all(tokens.count(1) == 1 for tokens, _ in conversations), "<s> occurs once"
    assert data.manifest.columns["loss_mask"].kind == "loss_mask"
    assert data.manifest.real_token_fraction > 0.8
    assert {split.rows for split in data.manifest.splits.values()} != {60}, "nothing was packed"


def test_a_prompt_has_the_same_tokens_with_and_without_its_answer(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", build_conversations(30))
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    loss_mask_by_tokens = {
        tuple(tokens): loss_mask
        for tokens, loss_mask in read_conversations(prepare_dataset(tmp_path))
    }
    for talk in build_conversations(30):
        token_ids = tokenizer.apply_chat_template(talk["messages"])["input_ids"]
        prompt = tokenizer.apply_chat_template(talk["messages"][:-1], add_generation_prompt=True)
        prompt_ids = prompt["input_ids"]
        assert token_ids[: len(prompt_ids)] == prompt_ids
        loss_mask = loss_mask_by_tokens[tuple(token_ids)]
        assert loss_mask[len(prompt_ids) - 1] == 0
        assert all(loss_mask[len(prompt_ids) :])


def test_a_named_template_or_a_file_is_stored_with_the_dataset(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", build_conversations(30))
    tokenizer = save_tokenizer(tmp_path / "tokenizer", None)
    named = prepare_dataset(tmp_path, "named", rows={"chat_template": "chatml"})
    file = tmp_path / "mine.jinja"
    file.write_text(chat_templates.find_template_file("chatml").read_text())
    mine = prepare_dataset(tmp_path, "mine", rows={"chat_template": str(file)})
    assert read_conversations(named) == read_conversations(mine)
    loaded = transformers.AutoTokenizer.from_pretrained(named.folder / "tokenizer")
    expected = sorted(
        loaded.apply_chat_template(talk["messages"])["input_ids"]
        for talk in build_conversations(30)
    )
    assert [tokens for tokens, _ in read_conversations(named)] == expected
    assert tokenizer.chat_template is None
    file.write_text(MARKED)
    with pytest.raises(Exception, match=r"rows.template_sha256 was '[0-9a-f]+' and is"):
        prepare_dataset(tmp_path, "mine", rows={"chat_template": str(file)})


def test_alpaca_records_have_headings_and_an_end_token(tmp_path: Path) -> None:
    records = [
        {"instruction": f"Add one to {n}.", "input": ["", "as a word"][n % 2], "output": f"{n + 1}"}
        for n in range(40)
    ]
    write_records(
        tmp_path / "a.jsonl", [*records, {**records[0], "output": "  "}, {"instruction": "?"}]
    )
    data = prepare_dataset(tmp_path, **ALPACA)
    assert data.manifest.skipped == {"no answer": 1, "no conversation": 1}
    decoder = Tokenizer.from_file(str(data.folder / "tokenizer" / "tokenizer.json"))
    loaded = transformers.AutoTokenizer.from_pretrained(data.folder / "tokenizer")
    answers, rows = {}, read_conversations(data)
    for tokens, loss_mask in rows:
        cut = loss_mask.index(1)
        prompt, answered = (
            decoder.decode(part, skip_special_tokens=False) for part in (tokens[:cut], tokens[cut:])
        )
        answers[prompt] = answered
    for n, record in enumerate(records):
        context = "### Input:\nas a word\n\n" if n % 2 else ""
        head = f"[CLS] ### Instruction:\n{record['instruction']}\n\n{context}### Response:\n"
        assert answers[head] == f"{record['output']}[SEP]"
        messages = chat_templates.parse_conversation(record)
        assert messages
        token_ids = loaded.apply_chat_template(messages)["input_ids"]
        assert token_ids in [tokens for tokens, _ in rows]


def test_unusable_conversations_are_counted_and_rejected(tmp_path: Path) -> None:
    good = build_conversations(20)
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
    write_records(tmp_path / "a.jsonl", [*good, *bad])
    save_tokenizer(tmp_path / "tokenizer")
    cut = prepare_dataset(tmp_path, "cut")
    expected = {"a special token in a message": 1, "no answer": 2, "no conversation": 5}
    assert cut.manifest.skipped == {**expected, "no answer within 192 tokens": 1}
    assert cut.manifest.truncated == {"messages": 1}
    assert len(read_conversations(cut)) == 21
    whole = prepare_dataset(tmp_path, "whole", rows={"too_long": "reject"})
    assert whole.manifest.skipped == {**expected, "longer than 192 tokens": 2}
    assert whole.manifest.truncated == {}
    lines = (whole.folder / "rejected.jsonl").read_text().splitlines()
    assert {item["location"] for item in map(json.loads, lines)} == {
        f"line {number}" for number in (21, 22, 23, 24, 25, 26, 29, 30)
    }


def test_conversations_whose_earlier_turns_are_rewritten_are_rejected(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", build_conversations(30))
    save_tokenizer(tmp_path / "tokenizer", FORGETFUL)
    data = prepare_dataset(tmp_path)
    assert data.manifest.skipped == {"the chat template cannot render it": 20}
    assert len(read_conversations(data)) == 10


@pytest.mark.full
def test_the_number_of_processes_does_not_change_the_bytes(tmp_path: Path) -> None:
    write_records(
        tmp_path / "a.jsonl", [{**talk, "note": "-" * 60_000} for talk in build_conversations(40)]
    )
    save_tokenizer(tmp_path / "tokenizer")
    one = prepare_dataset(tmp_path, "one")
    two = prepare_dataset(tmp_path, "two", prepare={"processes": 2})
    assert len(json.loads((two.folder / "inputs.json").read_text())["pieces"]) == 3
    assert read_contents(one.folder) == read_contents(two.folder)


ENDLESS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
ENDLESS += "{{ 'assistant: ' if add_generation_prompt }}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "has no chat template; set rows.chat_template to"),
        ({"tokenizer": {"path": None}}, "a trained tokenizer has no chat template; set rows."),
        ({"rows": {"chat_template": "alpca"}}, "no chat template 'alpca'; did you mean 'alpaca'"),
        (
            {"rows": {"too_long": "split"}},
            'cannot be split; set too_long to "truncate" or "reject"',
        ),
        ({"rows": {"text": "body"}}, "layout 'chat' does not use 'text'; remove it"),
        ({"rows": {"chat_template": "endless.jinja"}}, "no special token of the tokenizer"),
        ({"rows": {"chat_template": "broken.jinja"}}, "cannot be used: Expected an expression"),
        ({"source": {"columns": []}}, 'messages are lists, set source.columns = ["messages"]'),
    ],
)
def test_invalid_settings_are_one_line_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "a.jsonl", build_conversations(5))
    save_tokenizer(tmp_path / "tokenizer", MARKED if "source" in changes else None)
    Path("endless.jinja").write_text(ENDLESS)
    Path("broken.jinja").write_text("{{ }}")
    with pytest.raises(SettingsError) as caught:
        prepare_dataset(tmp_path, **changes)
    assert message.replace("no special", "no answer with a special") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists() == ("messages are lists" in message)


def test_without_a_template_nothing_is_started(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", build_conversations(5))
    save_tokenizer(tmp_path / "tokenizer", None)
    before = read_contents(tmp_path)
    for refuse in (verb.plan, verb.run):
        with pytest.raises(SettingsError, match="has no chat template"):
            refuse(build_settings(tmp_path))
    assert read_contents(tmp_path) == before


def test_parquet_files_may_have_messages(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    save_tokenizer(tmp_path / "tokenizer")
    write_records(tmp_path / "a.jsonl", build_conversations(20))
    pq.write_table(pa.Table.from_pylist(build_conversations(20)), tmp_path / "a.parquet")
    source = {"kind": "parquet", "files": [str(tmp_path / "a.parquet")], "columns": ["messages"]}
    other = prepare_dataset(tmp_path, "parquet", source=source)
    assert read_conversations(other) == read_conversations(prepare_dataset(tmp_path))


def test_the_end_of_an_answer_comes_before_the_declared_end(tmp_path: Path) -> None:
    folder = write_tokenizer("no pad", tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}<|turn|>\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "extra_special_tokens": ["<|turn|>"]})
    )
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded.add_special_tokens(["<|turn|>"])
    loaded.save(str(folder / "tokenizer.json"))
    end = loaded.token_to_id("</s>")
    assert chat_templates.find_end_token_ids(folder) == (end,)
    answer = "{% if add_generation_prompt %}assistant {% endif %}"
    chat = tmp_path / "chat"
    shutil.copytree(folder, chat)
    (chat / "chat_template.jinja").write_text(template + answer)
    turn = loaded.token_to_id("<|turn|>")
    assert chat_templates.find_end_token_ids(chat) == (turn, end)
