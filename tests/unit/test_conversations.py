"""Conversations: what a record may have, and what is refused with its cause."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.data.conversations import (
    Conversation,
    ConversationError,
    check_strings,
    format_part,
    parse_conversation,
)

USER = {"role": "user", "content": "Weather?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"day": 3}}}
TEXT_CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"day": 3}'}}
ANSWER = {"role": "assistant", "content": "Sunny."}


def parse(*messages: Any, **fields: Any) -> Conversation:
    return parse_conversation({"messages": json.dumps(messages), **fields})


def change(**keys: Any) -> dict[str, Any]:
    return {**ANSWER, **keys}


def test_messages_keep_all_keys_that_have_a_value() -> None:
    message = change(name="a", reasoning_content="r", weight=0, extra={"deep": [1]}, refusal=None)
    conversation = parse(USER, message)
    assert conversation.messages == [USER, {k: v for k, v in message.items() if v is not None}]
    assert conversation.variables == {}


def test_lists_may_be_values_or_json_text() -> None:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    as_values: Any = {"messages": messages, "tools": tools}
    as_texts = {name: json.dumps(value) for name, value in as_values.items()}
    item_texts = {"messages": json.dumps(messages), "tools": json.dumps([json.dumps(tools[0])])}
    first = parse_conversation(as_values)
    assert first.messages[1] == {"role": "assistant", "tool_calls": [CALL]}
    assert first == parse_conversation(as_texts) == parse_conversation(item_texts)
    assert first.variables == {"tools": tools}
    assert parse(USER, ANSWER, tools=" ").variables == {}


def test_variables_of_a_record_are_passed_on() -> None:
    record: Any = {
        "instruction": "i",
        "output": "o",
        "documents": [{"text": "t"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    expected = {"documents": [{"text": "t"}], "enable_thinking": False}
    assert parse_conversation(record).variables == expected
    record["chat_template_kwargs"]["documents"] = []
    with pytest.raises(ConversationError, match="'documents' is also in 'chat_template_kwargs'"):
        parse_conversation(record)


@pytest.mark.parametrize(
    ("messages", "detail"),
    [
        ("x", "'messages' is not JSON"),
        ('"text"', "'messages' is not a list of messages"),
        ("[]", "'messages' is not a list of messages"),
        ([3], "message 1 is not an object"),
        ([{"content": "a"}], "message 1 has no role"),
        ([{"role": None, "content": "a"}], "message 1 has no role"),
        ([USER, change(role="asistant")], "message 2 has the role 'asistant'"),
        ([{"role": "user"}], "the content of message 1 is missing, and it has no tool calls"),
        (
            [USER, change(content=None)],
            "the content of message 2 is null, and it has no tool calls",
        ),
        (
            [USER, change(content=None, tool_calls=[])],
            "the content of message 2 is null, and it has no tool calls",
        ),
        ([change(content=3)], "the content of message 1 is neither a text nor a list"),
        ([change(content=["a"])], "the content of message 1 has a part without a type"),
        ([change(content=[{"type": "text"}])], "has a text part without a text"),
        ([change(tool_calls=CALL)], "'tool_calls' of message 1 is not a list of objects"),
        ([change(tool_calls=["x"])], "'tool_calls' of message 1 is not JSON"),
        (
            [change(tool_calls=[{"function": {"arguments": "{"}}])],
            "a call's arguments in message 1 is not JSON",
        ),
        (
            [change(function_call={"arguments": "[1]"})],
            "a call's arguments in message 1 are not an object",
        ),
        ([change(weight=0.5)], "'weight' of message 1 is 0.5, not 0 or 1"),
        ([change(train="no")], "'train' of message 1 is 'no', not 0 or 1"),
    ],
)
def test_a_malformed_message_is_refused_with_its_cause(messages: Any, detail: str) -> None:
    text = messages if isinstance(messages, str) else json.dumps(messages)
    with pytest.raises(ConversationError) as caught:
        parse_conversation({"messages": text})
    assert detail in caught.value.detail
    assert caught.value.reason == "no conversation"


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video", "file"])
def test_parts_that_are_no_text_are_refused(kind: str) -> None:
    with pytest.raises(ConversationError) as caught:
        parse({**USER, "content": [{"type": "text", "text": "a"}, {"type": kind, kind: "b"}]})
    assert caught.value.reason == "a part that is not text"
    assert caught.value.detail == f"{kind} in message 1"


def test_a_role_that_the_template_names_is_permitted() -> None:
    messages = json.dumps([{"role": "critic", "content": "a"}])
    assert parse_conversation({"messages": messages}, {"critic"}).messages[0]["role"] == "critic"


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ConversationError, match="nested deeper than 64 levels"):
        check_strings(parse(change(extra=deep)), ())


@pytest.mark.parametrize(
    ("keys", "is_answer"),
    [
        ({}, True),
        ({"content": " "}, False),
        ({"content": "", "tool_calls": [CALL]}, True),
        ({"content": "", "reasoning_content": "r"}, True),
        ({"content": "", "name": "n"}, False),
        ({"weight": 0}, False),
        ({"weight": 1}, True),
        ({"train": False}, False),
        ({"weight": 1, "train": False}, False),
        ({"role": "user", "weight": 1}, False),
    ],
)
def test_an_answer_is_a_turn_with_content_in_the_loss(
    keys: dict[str, Any], *, is_answer: bool
) -> None:
    conversation = parse(USER, change(**keys))
    assert conversation.is_answer(1) is is_answer
    assert not parse(change(**keys), USER).is_answer(0), "no prompt precedes the first message"


def test_parts_are_named_by_their_keys() -> None:
    message = change(tool_calls=[{**CALL, "id": "c"}], weight=1, metadata={"a": 1}, tags=[])
    conversation = parse({**USER, "weight": 1}, message, tools=json.dumps([CALL]))
    assert [format_part(path) for path in conversation.list_parts()] == [
        "content",
        "weight",
        "content",
        "tool_calls.function.name",
        "tool_calls.function.arguments",
        "tool_calls.id",
        "metadata",
        "tools.function.name",
        "tools.function.arguments",
    ]


def test_forms_of_arguments_and_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    conversation = parse({**USER, "content": parts}, change(tool_calls=[TEXT_CALL]))
    forms = list(conversation.list_forms())
    shown = [
        (form.messages[0]["content"], form.messages[1]["tool_calls"][0]["function"]["arguments"])
        for form, _ in forms
    ]
    assert shown == [
        (parts, {"day": 3}),
        (parts, '{"day": 3}'),
        ("a\nb", {"day": 3}),
        ("a\nb", '{"day": 3}'),
    ]
    assert [literals for _, literals in forms] == [[parts, {"day": 3}], [parts], [{"day": 3}], []]
    assert conversation.messages[0]["content"] == parts, "the conversation itself is unchanged"
    with_object = parse(USER, change(tool_calls=[CALL]))
    assert [literals for _, literals in with_object.list_forms()] == [[], []]
    assert len(list(parse(USER, ANSWER).list_forms())) == 1


def test_an_edit_changes_one_part_of_a_copy() -> None:
    call = {"name": "weather"}
    conversation = Conversation([USER, {**ANSWER, "tool_calls": [call, call]}], {"tools": [call]})

    def count(container: Any, key: str | int, index: int) -> None:
        container[key] += str(index)

    paths = list(conversation.list_parts())
    edited = conversation.edit_parts(paths, count)
    assert edited.messages[1]["tool_calls"] == [{"name": "weather2"}, {"name": "weather3"}]
    assert edited.variables == {"tools": [{"name": "weather4"}]}
    assert call == {"name": "weather"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "function"]), values)
    ),
    max_leaves=8,
)
KEYS = ("role", "content", "tool_calls", "function_call", "weight", "train", "name")


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES) | VALUES, max_size=4), VALUES)
def test_any_json_is_a_conversation_or_is_refused(messages: list[Any], tools: Any) -> None:
    record: Any = {"messages": json.dumps(messages), "tools": json.dumps(tools)}
    try:
        conversation = parse_conversation(record)
    except ConversationError:
        return
    assert len(conversation.messages) == len(messages)
    for form, _ in conversation.list_forms():
        assert len(form.messages) == len(messages)
    paths = list(conversation.list_parts())
    assert len(set(paths)) == len(paths)
