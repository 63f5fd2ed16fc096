"""Chat templates: tokens of conversations, and the loss mask of answer tokens."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from regauge import config
from regauge.commands import prepare as verb
from regauge.data import chat_templates, dataset
from regauge.data.conversations import parse_conversation
from regauge.data.layouts import _templated
from regauge.data.tokenizer import MORE_TEMPLATES
from regauge.system.errors import SettingsError
from regauge.system.wording import format_count
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
        messages = parse_conversation(record).messages
        token_ids = loaded.apply_chat_template(messages)["input_ids"]
        assert token_ids in [tokens for tokens, _ in rows]


def test_unusable_conversations_are_counted_and_rejected(tmp_path: Path) -> None:
    good = build_conversations(20)
    turn = good[0]["messages"][-2:]
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "b"}]
    tool = {"function": {"name": "<|im_end|>", "arguments": "{}"}}
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
        {"messages": [{**turn[0], "content": parts}, turn[1]]},
        {"messages": [turn[0], {**turn[1], "tool_calls": [tool]}]},
        {"messages": json.dumps([{**turn[0], "content": "half \ud800"}, turn[1]])},
    ]
    write_records(tmp_path / "a.jsonl", [*good, *bad])
    save_tokenizer(tmp_path / "tokenizer")
    cut = prepare_dataset(tmp_path, "cut")
    expected = {"a special token in a message": 2, "no answer": 2, "no conversation": 5}
    expected |= {"a part that is not text": 1, "undecodable bytes": 1}
    assert cut.manifest.skipped == {**expected, "no answer within 192 tokens": 1}
    assert cut.manifest.truncated == {"messages": 1}
    assert len(read_conversations(cut)) == 21
    whole = prepare_dataset(tmp_path, "whole", rows={"too_long": "reject"})
    assert whole.manifest.skipped == {**expected, "longer than 192 tokens": 2}
    assert whole.manifest.truncated == {}
    lines = (whole.folder / "rejected.jsonl").read_text().splitlines()
    details = {item["location"]: item["detail"] for item in map(json.loads, lines)}
    numbers = (21, 22, 23, 24, 25, 26, 29, 30, 31, 32, 33)
    assert details.keys() == {f"line {number}" for number in numbers}
    assert [details[f"line {number}"] for number in numbers[-3:]] == [
        "image_url in message 1",
        "<|im_end|>",
        "lone surrogate",
    ]


def test_conversations_whose_earlier_turns_are_rewritten_are_rejected(tmp_path: Path) -> None:
    single_turn = [talk for talk in build_conversations(90, seed=1) if len(talk["messages"]) == 3]
    write_records(tmp_path / "a.jsonl", [*build_conversations(30), *single_turn])
    save_tokenizer(tmp_path / "tokenizer", FORGETFUL)
    data = prepare_dataset(tmp_path)
    assert data.manifest.skipped == {"the chat template cannot render it": 20}
    assert len(read_conversations(data)) == 10 + len(single_turn)


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
        ({"rows": {"chat_template": "endless.jinja"}}, "end answers with a special token of"),
        ({"rows": {"chat_template": "broken.jinja"}}, "cannot be used: Expected an expression"),
        ({"rows": {"chat_template": "latin.jinja"}}, "latin.jinja is not UTF-8: 'utf-8' codec"),
        ({"rows": {"chat_template": "failing.jinja"}}, "cannot be used: division by zero; set"),
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
    Path("latin.jinja").write_bytes("{{ 'ä' }}".encode("latin-1"))
    Path("failing.jinja").write_text("{{ 1 / 0 }}")
    with pytest.raises(SettingsError) as caught:
        prepare_dataset(tmp_path, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


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


PLAIN = """{%- for message in messages -%}
{{- message.role + ': ' + message.content -}}
{{- '<|im_end|>' if message.role == 'assistant' else '\n' -}}
{%- endfor -%}
{{- 'assistant:' if add_generation_prompt -}}
"""
CALLS = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- call.function.name + call.function.arguments | tojson -}}
{%- endfor -%}{{- '<|im_end|>' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt -}}
"""


def build_turns(count: int) -> list[list[dict[str, Any]]]:
    """Return the last question and answer of conversations."""
    return [talk["messages"][-2:] for talk in build_conversations(count)]


def build_calls(count: int, **changes: Any) -> list[dict[str, Any]]:
    """Return conversations with a call of a tool, and with a second answer."""
    records = []
    for number in range(count):
        arguments = json.dumps({"day": number})
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call], **changes}
        question = {"role": "user", "content": f"{number} {WORDS[number % 11]}"}
        result = {"role": "tool", "content": f"sunny {number}"}
        answer = {"role": "assistant", "content": f"It is sunny on {number}."}
        records.append({"messages": [question, turn, result, answer]})
    return records


def test_a_call_is_trained_on_unless_its_weight_is_0(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", CALLS)
    for weight in (0, 1):
        write_records(tmp_path / "a.jsonl", build_calls(30, weight=weight))
        data = prepare_dataset(tmp_path, f"out{weight}")
        assert data.manifest.skipped == data.manifest.warnings == {}
        texts = sorted(
            tokenizer.decode([token for token, mark in zip(*pair, strict=True) if mark])
            for pair in read_conversations(data)
        )
        call = 'weather{{"day": {}}}<|im_end|>' if weight else ""
        expected = [f"{call.format(n)}It is sunny on {n}.<|im_end|>" for n in range(30)]
        assert texts == sorted(expected)


def test_the_order_of_keys_reaches_the_text_but_not_the_hash(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", CALLS)
    arguments = {"to": "b", "from": "a", "by": {"z": 1, "m": 2}}
    call = {"function": {"name": "move", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    records = build_conversations(20)
    record = {"messages": [{"role": "user", "content": "Move."}, turn], "number": 1}
    reordered = json.loads(json.dumps(record, sort_keys=True))
    write_records(tmp_path / "a.jsonl", [*records, record, reordered])
    data = prepare_dataset(tmp_path, source={"columns": [], "duplicates": "drop"})
    assert data.manifest.skipped == {"exact duplicate": 1}
    texts = [tokenizer.decode(tokens) for tokens, _ in read_conversations(data)]
    assert sum(f"move{json.dumps(arguments)}<|im_end|>" in text for text in texts) == 1


def test_parts_that_the_template_ignores_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [*build_calls(20, name="a", reasoning_content="Ask."), *build_conversations(10)]
    records[0]["tools"] = [{"type": "function", "function": {"name": "weather"}}]
    write_records(tmp_path / "a.jsonl", records)
    save_tokenizer(tmp_path / "tokenizer", CALLS)
    data = prepare_dataset(tmp_path, source={"columns": ["messages", "tools"]})
    counts = {"name": 20, "reasoning_content": 20, "tools.function.name": 1}
    expected = {
        f"the chat template ignores '{name}'; set rows.chat_template to one that writes it, or"
        " remove it from the source": count
        for name, count in counts.items()
    }
    assert data.manifest.warnings == expected
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings[-3:] == [
        f"{data.folder}: in {format_count(n, 'record')}, {text}" for text, n in expected.items()
    ]
    again = verb.run(build_settings(tmp_path, source={"columns": ["messages", "tools"]}))
    assert again["warnings"] == expected


@pytest.mark.parametrize(
    ("prompt", "answer", "count"),
    [
        ("assistant:", "the river", 0),
        ("assistant: ", "the river", 20),
        ("assistant: ", "?!", 20),  # a test answer changes the tokens
        ("assistant: th", "e river", 20),  # only the answers of the records change them
        ("assistant: th", "?!", 0),
    ],
)
def test_a_prompt_whose_tokens_depend_on_the_answer_is_a_warning(
    tmp_path: Path, prompt: str, answer: str, count: int
) -> None:
    turns = [[question, {**turn, "content": answer}] for question, turn in build_turns(20)]
    write_records(tmp_path / "a.jsonl", [{"messages": messages} for messages in turns])
    start = f"'{prompt}' if message.role == 'assistant' else message.role + ': '"
    template = PLAIN.replace("message.role + ': ' + ", f"({start}) + ")
    save_tokenizer(tmp_path / "tokenizer", template.replace("'assistant:' if", f"'{prompt}' if"))
    warnings = prepare_dataset(tmp_path).manifest.warnings
    problem = "the generation prompt of the chat template has other tokens when answers follow"
    assert warnings == ({f"{problem}; {_templated.REMEDY_PROMPT}": count} if count else {})


def test_a_template_that_reads_the_clock_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_records(tmp_path / "a.jsonl", build_conversations(5))
    save_tokenizer(tmp_path / "tokenizer", "{{ strftime_now('%d %b %Y') }}" + MARKED)
    verb.plan(build_settings(tmp_path))
    problem = "the chat template of the tokenizer uses strftime_now: rows differ between days or"
    assert problem in caplog.text
    file = tmp_path / "mine.jinja"
    file.write_text("{{ ['a'] | random }}" + MARKED)
    verb.plan(build_settings(tmp_path, rows={"chat_template": str(file)}))
    assert "mine.jinja uses random" in caplog.text
    caplog.clear()
    file.write_text(MARKED)
    verb.plan(build_settings(tmp_path, rows={"chat_template": str(file)}))
    assert not caplog.text


def test_a_second_dataset_in_one_process_has_its_own_tokenizer_and_template(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", build_conversations(20))
    contents = []
    for template in (MARKED, MARKED.replace("bos_token", "'' ")):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        save_tokenizer(tmp_path / "tokenizer", template)
        contents.append(read_conversations(prepare_dataset(tmp_path)))
    assert [tokens[1:] for tokens, _ in contents[0]] == [tokens for tokens, _ in contents[1]]


def test_the_template_for_tools_belongs_to_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", CALLS)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    tokenizer.chat_template = {"default": CALLS, "tool_use": "{{ tools | tojson }}" + CALLS}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert (tmp_path / "tokenizer" / MORE_TEMPLATES / "tool_use.jinja").is_file()
    records = [{**record, "tools": tools} for record in build_calls(10)]
    write_records(tmp_path / "a.jsonl", [*records, *build_calls(10)])
    data = prepare_dataset(tmp_path, source={"columns": ["messages", "tools"]})
    loaded = transformers.AutoTokenizer.from_pretrained(data.folder / "tokenizer")
    expected = [
        loaded.apply_chat_template(
            parse_conversation(record).messages, tools=record.get("tools"), tokenize=False
        )
        for record in map(parse_arguments, [*records, *build_calls(10)])
    ]
    assert sum(text.startswith(json.dumps(tools)) for text in expected) == 10
    texts = [loaded.decode(tokens) for tokens, _ in read_conversations(data)]
    assert sorted(texts) == sorted(expected)
    named = prepare_dataset(tmp_path, "named", rows={"chat_template": "chatml"})
    assert not (named.folder / "tokenizer" / MORE_TEMPLATES).exists(), "it was not used"


def parse_arguments(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of `build_calls` with the arguments of its call as an object."""
    record = copy.deepcopy(record)
    function = record["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])
    return record


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
