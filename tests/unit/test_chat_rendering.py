"""Rendering of conversations: their text, their answers, and what a template ignores."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.data import chat_templates
from regauge.data.chat_templates import ChatTemplate, TemplateError
from regauge.data.conversations import format_part, parse_conversation
from regauge.data.layouts import EncodedRecord, UnusableRecord, build_layout
from regauge.data.settings import RowLayout
from regauge.data.tokenizer import LoadedTokenizer
from regauge.inference.export.preprocess import Preprocessor
from regauge.models.io_spec import InputSpec
from regauge.models.sentence_transformers import Tokenization
from regauge.system.errors import DataError
from unit.test_chat_templates import WORDS, save_tokenizer

TOOLS = """{%- if tools -%}TOOLS {{ tools | tojson }}\n{% endif -%}
{%- for m in messages -%}
{{- m.role + ': ' -}}{{- m.content -}}
{%- for c in m.tool_calls or [] -%}
{{- ' CALL ' + c.function.name + ' ' + c.function.arguments | tojson -}}
{%- endfor -%}
{{- ' THINK ' + m.reasoning_content if m.reasoning_content -}}
{{- '<|im_end|>' if m.role == 'assistant' -}}{{- '\\n' -}}
{%- endfor -%}
{{- 'assistant:' if add_generation_prompt -}}
"""
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"day": 3}}}
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Weather on day 3?"}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
ANSWER = {"role": "assistant", "content": "It is bright."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rendering") / "tokenizer"
    save_tokenizer(folder, TOOLS)
    return folder


def ask(content: Any = "", **keys: Any) -> dict[str, Any]:
    """Return an assistant's turn that calls a tool."""
    return {"role": "assistant", "content": content, "tool_calls": [CALL], **keys}


def read(*messages: Any, **fields: Any) -> Any:
    return parse_conversation({"messages": json.dumps(messages), **fields})


def list_answers(template: ChatTemplate, *messages: Any, **fields: Any) -> list[str]:
    """Return the text of each answer."""
    rendered = template.render(read(*messages, **fields))
    return [rendered.text[start:stop] for start, stop in rendered.answers]


def list_ignored(template: ChatTemplate, *messages: Any, **fields: Any) -> list[str]:
    conversation = read(*messages, **fields)
    return [format_part(path) for path in template.list_ignored_parts(conversation)]


def test_a_text_is_that_of_transformers(tokenizer: Path) -> None:
    import transformers

    messages = [USER, ask(None, reasoning_content="Ask."), TOOL, ANSWER]
    expected = transformers.AutoTokenizer.from_pretrained(tokenizer).apply_chat_template(
        messages, tools=[SCHEMA], tokenize=False
    )
    template = ChatTemplate(tokenizer, None)
    assert template.render(read(*messages, tools=json.dumps([SCHEMA]))).text == expected
    for piece in (json.dumps(SCHEMA), 'CALL weather {"day": 3} THINK Ask.', "tool: sunny"):
        assert piece in expected


@pytest.mark.parametrize("content", ["", None])
def test_a_turn_that_only_calls_a_tool_is_an_answer(tokenizer: Path, content: str | None) -> None:
    template = ChatTemplate(tokenizer, None)
    answers = list_answers(template, USER, ask(content), TOOL, ANSWER)
    assert answers == ['  CALL weather {"day": 3}<|im_end|>\n', " It is bright.<|im_end|>\n"]
    deaf = ChatTemplate(tokenizer, TOOLS.replace("m.tool_calls or []", "[]"))
    assert list_answers(deaf, USER, ask(content), TOOL, ANSWER) == answers[1:], "it writes nothing"


@pytest.mark.parametrize("key", ["weight", "train"])
@pytest.mark.parametrize("value", [0, False])
def test_a_turn_without_weight_is_no_answer(tokenizer: Path, key: str, *, value: int) -> None:
    template = ChatTemplate(tokenizer, None)
    answers = list_answers(template, USER, ask("Wait.", **{key: value}), TOOL, ANSWER)
    assert answers == [" It is bright.<|im_end|>\n"]


def test_arguments_have_the_form_that_the_template_reads(tokenizer: Path) -> None:
    text_call = {**CALL, "function": {"name": "weather", "arguments": '{"day":3}'}}
    plain = TOOLS.replace("c.function.arguments | tojson", "c.function.arguments")
    printed = TOOLS.replace(" + c.function.arguments | tojson", "~ c.function.arguments")
    expected = {TOOLS: '{"day": 3}', plain: '{"day":3}', printed: '{"day":3}'}
    for template, arguments in expected.items():
        messages = [USER, ask(tool_calls=[text_call])]
        (answer,) = list_answers(ChatTemplate(tokenizer, template), *messages)
        assert arguments + "<|im_end|>" in answer
    (answer,) = list_answers(ChatTemplate(tokenizer, plain), USER, ask())
    assert '{"day": 3}<|im_end|>' in answer, "an object is passed as JSON text"


def test_text_parts_have_the_form_that_the_template_reads(tokenizer: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    loop = "{% for part in m.content %}{{ '[' + part.text + ']' }}{% endfor %}"
    expected = {
        TOOLS: "user: one\ntwo\n",
        TOOLS.replace("{{- m.content -}}", "{{- m.content | trim -}}"): "user: one\ntwo\n",
        TOOLS.replace("{{- m.content -}}", "{{- m.content + '' -}}"): "user: one\ntwo\n",
        TOOLS.replace("{{- m.content -}}", loop): "user: [one][two]\n",
    }
    for template, text in expected.items():
        answer = [{"type": "text", "text": "three"}]
        messages = [{"role": "user", "content": parts}, {**ANSWER, "content": answer}]
        assert ChatTemplate(tokenizer, template).render(read(*messages)).text.startswith(text)


def test_ignored_parts_are_listed(tokenizer: Path) -> None:
    messages = [USER, ask(reasoning_content="Ask."), {**TOOL, "name": "weather"}, ANSWER]
    tools = json.dumps([SCHEMA])
    ids = ["tool_calls.id", "tool_call_id", "name"]
    assert list_ignored(ChatTemplate(tokenizer, TOOLS), *messages, tools=tools) == ids
    changes = {
        "{{- m.content -}}": (
            "{{- m.content if m.role != 'tool' -}}",
            ["tool_calls.id", "tool_call_id", "content", "name"],
        ),
        "m.tool_calls or []": (
            "(m.tool_calls or [])[1:]",
            [
                "tool_calls.id",
                "tool_calls.function.name",
                "tool_calls.function.arguments",
                *ids[1:],
            ],
        ),
        "c.function.arguments": (
            "{}",
            ["tool_calls.id", "tool_calls.function.arguments", *ids[1:]],
        ),
        "if m.reasoning_content": ("if false", ["tool_calls.id", "reasoning_content", *ids[1:]]),
        "tools | tojson": ("'yes'", [*ids, "tools.function.name", "tools.function.parameters"]),
    }
    for old, (new, expected) in changes.items():
        template = ChatTemplate(tokenizer, TOOLS.replace(old, new))
        assert list_ignored(template, *messages, tools=tools) == expected


def test_a_part_that_only_decides_is_not_ignored(tokenizer: Path) -> None:
    template = TOOLS.replace("if tools", "if terse is not defined or not terse")
    ignored = list_ignored(
        ChatTemplate(tokenizer, template),
        USER,
        ANSWER,
        tools=json.dumps([SCHEMA]),
        chat_template_kwargs=json.dumps({"terse": True, "unknown": 1}),
    )
    assert ignored == ["unknown", "tools.function.name", "tools.function.parameters"]


def test_generation_blocks_limit_answers(tokenizer: Path) -> None:
    marked = TOOLS.replace(
        "{{- m.content -}}", "{% generation %}{{ m.content }}{% endgeneration %}"
    )
    template = ChatTemplate(tokenizer, marked)
    assert list_answers(template, USER, ask("Wait."), TOOL, ANSWER) == ["Wait.", "It is bright."]
    assert list_answers(template, USER, ask("Wait.", weight=0), TOOL, ANSWER) == ["It is bright."]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("'assistant: <think>'", "does not begin with its generation prompt, which ends in '"),
        ("1 / 0", "division by zero"),
        ("{}['a']['b']", "has no attribute 'a'"),
        ("'{a}'.format()", "'a'"),
        ("raise_exception('roles must alternate')", "roles must alternate"),
    ],
)
def test_a_failure_of_a_template_is_one_line(tokenizer: Path, prompt: str, problem: str) -> None:
    template = ChatTemplate(tokenizer, TOOLS.replace("'assistant:' if add", f"{prompt} if add"))
    with pytest.raises(TemplateError) as caught:
        template.render_test()
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_for_reasoning_passes_the_test(tokenizer: Path) -> None:
    """Its generation prompt opens the reasoning, which other answers lack."""
    text = TOOLS.replace("{{- m.role + ': ' -}}", "{{- m.role + ':' -}}")
    text = text.replace("'assistant:' if", "'assistant:<think>' if")
    reasoning = "{{- '<think>' + m.reasoning_content if m.reasoning_content -}}{{- m.content -}}"
    template = ChatTemplate(tokenizer, text.replace("{{- m.content -}}", reasoning))
    assert template.render_test().answers
    with pytest.raises(TemplateError, match="generation prompt"):
        template.render(read(USER, ANSWER))


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{{ strftime_now('%d %b %Y') }}", ["strftime_now"]),
        ("{% set now = strftime_now %}{{ now('%Y') }}", ["strftime_now"]),
        ("{% if strftime_now is defined %}{{ strftime_now ('%Y') }}{% endif %}", ["strftime_now"]),
        ("{{ ['a', 'b'] | random }}{{ lipsum() }}", ["lipsum", "random"]),
        ("{% if strftime_now is defined %}a{% endif %}", []),
        ("strftime_now('%Y') {{ 'strftime_now()' }} {# lipsum() #}", []),
        ("{% if %}{{ strftime_now }", []),
    ],
)
def test_names_that_differ_between_runs_are_found(template: str, names: list[str]) -> None:
    assert chat_templates.find_unstable_names(template) == names


def test_a_changed_template_is_loaded_again(tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jinja"
    for text in ("first", "second"):
        file.write_text(text)
        template = chat_templates.load_template(tokenizer, str(file))
        assert template.render_prompt("a") == text
        assert chat_templates.load_template(tokenizer, str(file)) is template


@pytest.mark.parametrize("name", ["alpaca", "chatml"])
def test_the_named_templates_write_every_turn(tokenizer: Path, name: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    messages = [system, USER, ask("Wait."), TOOL, TOOL, ANSWER, USER, ask(None), TOOL, ANSWER]
    template = chat_templates.load_template(tokenizer, name)
    fields = {"tools": json.dumps([SCHEMA])}
    ids = ["tool_calls.id", "tool_call_id"]
    assert set(list_ignored(template, *messages, **fields)) == set(ids)
    answers = list_answers(template, *messages, **fields)
    assert len(answers) == 4
    for answer, content in zip(
        answers, ("Wait.\n", ANSWER["content"], "", ANSWER["content"]), strict=True
    ):
        assert answer.startswith(content)
        assert answer.rstrip("\n").endswith("<|im_end|>")
        assert ('{"name": "weather", "arguments": {"day": 3}}' in answer) == (
            content in ("Wait.\n", "")
        )
    without_system = template.render(read(*messages[1:], **fields)).text
    assert "Be brief." not in without_system
    assert json.dumps(SCHEMA) in without_system


TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "words": st.integers(0, 3)},
        optional={
            "weight": st.sampled_from([0, 1]),
            "train": st.booleans(),
            "name": st.just("n"),
            "reasoning_content": st.just("r"),
            "other": st.none() | st.integers() | st.text(max_size=3),
        },
    ),
    min_size=1,
    max_size=6,
)


@given(TURNS)
@settings(max_examples=50, deadline=None)
def test_only_tokens_of_answers_with_weight_are_trained_on(
    tokenizer: Path, turns: list[dict[str, Any]]
) -> None:
    messages = []
    for number, turn in enumerate(turns):
        words = [WORDS[(number + index) % len(WORDS)] for index in range(turn["words"])]
        content = " ".join([f"turn {number}", *words] if words else [])
        messages.append({**turn, "content": content})
    conversation = read(*messages)
    template = chat_templates.load_template(tokenizer, "chatml")
    rendered = template.render(conversation)
    position = 0
    for message in messages:
        position = rendered.text.index(message["content"], position) + len(message["content"])
    expected = [
        message["content"]
        for number, message in enumerate(messages)
        if number
        and message["role"] == "assistant"
        and message["content"]
        and message.get("weight", 1)
        and message.get("train", True)
    ]
    layout = build_layout(RowLayout(layout="chat", length=512, chat_template="chatml"))
    loaded = LoadedTokenizer(tokenizer)
    record: Any = {"messages": messages}
    if not expected:
        with pytest.raises(UnusableRecord, match="no answer"):
            layout.select_texts(record, loaded)
        return
    ids = layout.encode_texts(layout.select_texts(record, loaded), loaded)
    encoded = EncodedRecord(record, ids, loaded, Counter(), Counter())
    ((tokens, marks),) = layout.build_cells(encoded)
    assert loaded.decode(tokens[marks > 0].tolist()) == "".join(f"{text}\n" for text in expected)


def test_a_prompt_that_cannot_be_rendered_is_one_line(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "{{ 1 / 0 }}")
    tokenization = Tokenization(max_length=16, input_format="chat")
    with pytest.raises(DataError, match="cannot render a text: division by zero; correct the"):
        Preprocessor(tmp_path, tokenization, InputSpec()).encode_records([["a"]])


def test_a_tokenizer_that_transformers_cannot_load_is_one_line(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, TOOLS)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": 3}')
    with pytest.raises(DataError, match=r"transformers cannot load the tokenizer .*; correct its"):
        ChatTemplate(tmp_path, None)
