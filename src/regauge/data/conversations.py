"""Conversations: the messages of a record, and the variables that its chat template reads.

A message is passed on with all its keys, as `apply_chat_template` of transformers passes it: keys
without a value are left out. A part of a conversation is a value that a template should write.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.data.sources import UNDECODABLE, is_unicode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from regauge.data.values import Value

ASSISTANT = "assistant"
ROLES = frozenset({"system", "developer", "user", ASSISTANT, "tool", "function", "ipython"})
"""Roles that a message may have under every template."""
TOOL_FIELDS = ("tools", "functions")
"""Fields of a record with the schemas of its tools."""
LIST_FIELDS = (*TOOL_FIELDS, "documents")
"""Fields of a record with a list of objects, which are variables of the template."""
KWARGS_FIELD = "chat_template_kwargs"
"""The field of a record with further variables of the template, by name."""
CALL_KEYS = ("tool_calls", "function_call")
"""Keys of a message that call tools."""
ANSWER_KEYS = ("content", *CALL_KEYS, "reasoning_content", "reasoning", "thinking")
"""Keys of a message that a model generates."""
LOSS_KEYS = ("weight", "train")
"""Keys of a message that exclude it from the loss if they are 0 or false."""
FUNCTION_KEYS = ("function", "function_call")
"""Keys of the object of a function: its name, its arguments, its parameters and others."""
MAX_DEPTH = 64
"""Maximum depth of nested lists and objects."""
Message = dict[str, Any]
PartPath = tuple[str | int, ...]
"""Keys and indices that lead to a part, from the variables of the template."""
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
ANSWERS = (CHOSEN, REJECTED)
"""Columns of tokens of a preference: the prompt with each of its answers."""
MASKS = tuple(f"{name}_mask" for name in ANSWERS)
"""Columns that mark the tokens of these answers."""


class ConversationError(Exception):
    """A record without a usable conversation: a short reason to count, and its detail."""

    def __init__(self, detail: str, reason: str = "no conversation") -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Conversation(NamedTuple):
    """Messages, and the other variables of their template by name."""

    messages: list[Message]
    variables: dict[str, Any]
    is_instruction: bool = False
    """Whether the record has an `instruction` instead of messages."""
    num_prompt_messages: int = 1
    """Number of messages at the start that are no answers, because they are the prompt."""

    def is_answer(self, number: int) -> bool:
        """Return whether a message is an answer to train on."""
        message = self.messages[number]
        return (
            number >= self.num_prompt_messages
            and message["role"] == ASSISTANT
            and all(message.get(key, True) for key in LOSS_KEYS)
            and any(not is_blank(message.get(key)) for key in ANSWER_KEYS)
        )

    def list_strings(self) -> Iterator[str]:
        """Yield all texts of the conversation, and the keys of all objects.

        Raises ConversationError if it is nested deeper than MAX_DEPTH.
        """
        return _list_strings([self.messages, self.variables], 0)

    def list_parts(self) -> Iterator[PartPath]:
        """Yield the path of every part that is not blank.

        Lists, their items and the functions of tool calls consist of several parts. The keys of an
        instruction have no parts, because a template reads either its content or the other keys.
        """
        for number, message in enumerate([] if self.is_instruction else self.messages):
            for key, value in message.items():
                is_used = key in LOSS_KEYS and (message["role"] == ASSISTANT or not value)
                if key != "role" and not is_used:
                    yield from _divide_part(value, ("messages", number, key))
        for name, value in self.variables.items():
            yield from _divide_part(value, (name,))

    def edit_parts(
        self, paths: list[PartPath], edit: Callable[[Any, str | int, int], None]
    ) -> Conversation:
        """Return a copy in which parts are edited, starting with the last one.

        `edit` gets the container of a part, the key of the part, and the index of its path.
        """
        document: Any = _copy_value({**self.variables, "messages": self.messages})
        for index, path in reversed(list(enumerate(paths))):
            container = document
            for key in path[:-1]:
                container = container[key]
            edit(container, path[-1], index)
        return self._replace(messages=document.pop("messages"), variables=document)

    def list_forms(self) -> Iterator[tuple[Conversation, list[Any]]]:
        """Yield the conversation in every form that templates read, the preferred one first.

        Templates read the arguments of a tool call as an object or as JSON text, and a content as
        text parts or as one text, here joined by line breaks. The second value lists the objects
        and the parts of a form that its template must not write as Python literals.
        """
        contents = [message.get("content") for message in self.messages]
        part_lists = [content for content in contents if isinstance(content, list)]
        arguments = [
            call["arguments"] for message in self.messages for call in _list_functions(message)
        ]
        objects = [json.loads(value) for value in arguments if isinstance(value, str)]
        for is_joined in (False, True) if part_lists else (False,):
            for is_text in (False, True) if arguments else (False,):
                form = _copy_value(self.messages) if is_joined or arguments else self.messages
                for message in form:
                    if is_joined and isinstance(message.get("content"), list):
                        message["content"] = "\n".join(part["text"] for part in message["content"])
                    for call in _list_functions(message):
                        call["arguments"] = _convert_arguments(call["arguments"], is_text=is_text)
                literals = [*([] if is_joined else part_lists), *([] if is_text else objects)]
                yield self._replace(messages=form), literals


def parse_conversation(
    record: Mapping[str, Value], extra_roles: Collection[str] = ()
) -> Conversation:
    """Return the conversation of a record; raises ConversationError.

    A record has `messages` as a list or as JSON text, or an `instruction` with its `output` and
    perhaps an `input`.
    `extra_roles` are permitted besides ROLES.
    """
    conversation = _parse_turns(record, extra_roles)
    if not conversation.is_instruction:
        return conversation
    output = record.get("output")
    if not isinstance(output, str):
        raise ConversationError("neither 'messages' nor 'instruction' and 'output'")
    answer = {"role": ASSISTANT, "content": output}
    return conversation._replace(messages=[*conversation.messages, answer])


def parse_request(record: Mapping[str, Value], extra_roles: Collection[str] = ()) -> Conversation:
    """Return the conversation that a model should answer; raises ConversationError.

    The record is as in `parse_conversation`, but it needs no answer: a last message of the
    assistant is left out, and so is an `output`.
    """
    conversation = _parse_turns(record, extra_roles)
    if conversation.messages[-1]["role"] != ASSISTANT:
        return conversation
    messages = conversation.messages[:-1]
    if not messages:
        raise ConversationError("no message precedes the answer")
    return conversation._replace(messages=messages)


def _parse_turns(record: Mapping[str, Value], extra_roles: Collection[str]) -> Conversation:
    """Return the messages of a record, or its instruction as one message."""
    variables = _parse_variables(record)
    if "messages" in record:
        items = _parse_json(record["messages"], "'messages'")
        if not isinstance(items, list) or not items:
            raise ConversationError("'messages' is no list of messages")
        messages = [
            _parse_message(item, f"message {number}") for number, item in enumerate(items, start=1)
        ]
        for number, message in enumerate(messages, start=1):
            if message["role"] not in ROLES and message["role"] not in extra_roles:
                raise ConversationError(f"message {number} has the role '{message['role']}'")
        return Conversation(messages, variables)
    instruction = record.get("instruction")
    if not isinstance(instruction, str):
        raise ConversationError("neither 'messages' nor 'instruction' and 'output'")
    value = record.get("input")
    context = value if isinstance(value, str) and value.strip() else ""
    content = f"{instruction}\n\n{context}" if context else instruction
    # A template with a separate section for the input reads `instruction` and `input`.
    request = {"role": "user", "content": content, "instruction": instruction, "input": context}
    return Conversation([request], variables, is_instruction=True)


def check_strings(conversation: Conversation, special_tokens: tuple[str, ...]) -> None:
    """Raise ConversationError for a text that has a special token or cannot be encoded."""
    for text in conversation.list_strings():
        if not is_unicode(text):
            raise ConversationError("lone surrogate", UNDECODABLE)
        for token in special_tokens:
            if token in text:
                raise ConversationError(token, "a special token in a message")


def is_blank(value: Any) -> bool:
    """Return whether a value is empty: None, white space, or a list or object without items."""
    return value is None or value in ([], {}) or (isinstance(value, str) and not value.strip())


def format_part(path: PartPath) -> str:
    """Return the name of a part, such as `tool_calls.function.name`."""
    names = [key for key in path if isinstance(key, str)]
    return ".".join(names[1:] if path[0] == "messages" else names)


def _parse_variables(record: Mapping[str, Value]) -> dict[str, Any]:
    """Return the variables of a record's template; raises ConversationError."""
    variables = _parse_json(record.get(KWARGS_FIELD), f"'{KWARGS_FIELD}'") or {}
    if not isinstance(variables, dict):
        raise ConversationError(f"'{KWARGS_FIELD}' is no object")
    for name in LIST_FIELDS:
        value = _parse_json(record.get(name), f"'{name}'")
        if value is not None and name in variables:
            raise ConversationError(f"'{name}' is also in '{KWARGS_FIELD}'")
        if value is not None:
            variables[name] = _parse_objects(value, f"'{name}'")
    return variables


def _parse_message(value: Any, name: str) -> Message:
    """Return a message without null values; raises ConversationError. `name` is for its detail."""
    if not isinstance(value, dict):
        raise ConversationError(f"{name} is no object")
    message = {key: item for key, item in value.items() if item is not None}
    if not isinstance(message.get("role"), str) or is_blank(message["role"]):
        raise ConversationError(f"{name} has no role")
    message |= _parse_calls(message, name)
    if "content" in message:
        _check_content(message["content"], name)
    elif all(is_blank(message.get(key)) for key in CALL_KEYS):
        state = "is null" if "content" in value else "is missing"
        raise ConversationError(f"the content of {name} {state}, and it has no tool calls")
    for key in LOSS_KEYS:
        if message.get(key, 1) not in (0, 1):
            raise ConversationError(f"'{key}' of {name} is {message[key]!r}, not 0 or 1")
    return message


def _parse_calls(message: Message, name: str) -> Message:
    """Return the keys of a message that call tools; raises ConversationError."""
    calls = {key: message[key] for key in CALL_KEYS if key in message}
    if "tool_calls" in calls:
        items = _parse_json(calls["tool_calls"], f"'tool_calls' of {name}")
        calls["tool_calls"] = _parse_objects(items, f"'tool_calls' of {name}")
    if not isinstance(calls.get("function_call", {}), dict):
        raise ConversationError(f"'function_call' of {name} is no object")
    for call in _list_functions(calls):
        if not isinstance(_parse_json(call["arguments"], f"a call's arguments in {name}"), dict):
            raise ConversationError(f"a call's arguments in {name} are no object")
    return calls


def _check_content(content: Any, name: str) -> None:
    """Raise ConversationError unless a content is a text or a list of text parts."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ConversationError(f"the content of {name} is neither a text nor a list")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ConversationError(f"the content of {name} has a part without a type")
        if kind != "text":
            raise ConversationError(f"{kind} in {name}", "a part that is no text")
        if not isinstance(part.get("text"), str):
            raise ConversationError(f"the content of {name} has a text part without a text")


def _list_functions(message: Message) -> Iterator[dict[str, Any]]:
    """Yield the functions of a message's calls that have arguments."""
    for call in (*message.get("tool_calls", ()), message.get("function_call", {})):
        function = call.get("function")
        function = function if isinstance(function, dict) else call
        if function.get("arguments") is not None:
            yield function


def _convert_arguments(arguments: Any, *, is_text: bool) -> Any:
    """Return the arguments of a call as an object or as JSON text."""
    if isinstance(arguments, str):
        return arguments if is_text else json.loads(arguments)
    return json.dumps(arguments, ensure_ascii=False) if is_text else arguments


def _parse_objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of objects, each of which may be JSON text; raises ConversationError."""
    items: list[Any] = [None]
    if isinstance(value, list):
        items = [_parse_json(item, name) for item in value]
    if not all(isinstance(item, dict) for item in items):
        raise ConversationError(f"{name} is no list of objects")
    return items


def _parse_json(value: Any, name: str) -> Any:
    """Return the value of a JSON text, None for a blank one, and any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise ConversationError(f"{name} is no JSON") from None


def _list_strings(value: Any, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise ConversationError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _list_strings(item, depth + 1)


def _copy_value(value: Any) -> Any:
    """Return a copy whose lists and objects have one place each, also if the value shares them."""
    if isinstance(value, dict):
        return {key: _copy_value(item) for key, item in value.items()}
    return [_copy_value(item) for item in value] if isinstance(value, list) else value


def _divide_part(value: Any, path: PartPath) -> Iterator[PartPath]:
    """Yield the paths of the parts of a value; a constant `type` is no part."""
    if is_blank(value) or path[-1] == "type":
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _divide_part(item, (*path, index))
    elif isinstance(value, dict) and (isinstance(path[-1], int) or path[-1] in FUNCTION_KEYS):
        for key, item in value.items():
            yield from _divide_part(item, (*path, key))
    else:
        yield path
