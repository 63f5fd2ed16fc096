"""JSON bodies: each key is honoured, or the request is refused."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError
from pydantic_core import from_json, to_json

from regauge.serving.request_errors import (
    FieldError,
    TooLargeError,
    describe_validation_error,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_PARTS = 1 << 16
"""Maximum lists, objects and keys in a body; a million of them take seconds to build."""
PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)(\s*+:)?|([\[{])', re.DOTALL)
"""A JSON text, which may lack its end and may be a key, or the start of a list or an object."""
NULL = {"type": "null"}
"""Null schema."""


class RequestBody(BaseModel):
    """A request's JSON body: each key is honoured, or the request is refused.

    A key that is null counts as left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ignored_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys without an effect on the answer."""
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Unsupported key -> values that are as if it were left out."""
    forms: ClassVar[tuple[type[RequestBody], ...]] = ()
    """Bodies of other routes, of which a request has one."""

    @classmethod
    def parse(cls, raw_body: bytes, headers: Mapping[str, str]) -> Self:
        """Parse a body, in a form that headers may declare.

        Raises InvalidRequestError, or TooLargeError for too many lists.
        """
        del headers
        check_parts(raw_body)
        try:
            return cls.model_validate_json(raw_body or b"{}")
        except ValidationError as error:
            failure = error
        if failure.error_count() > 1 or failure.errors()[0]["type"] != "json_invalid":
            document = from_json(raw_body or b"{}")
            if isinstance(document, dict) and (kept := cls.select_keys(document)) != document:
                return cls.parse(to_json(kept), {})
        message, field = describe_validation_error(failure, raw_body)
        raise FieldError(message, field)

    @classmethod
    def select_keys(cls, document: dict[str, Any]) -> dict[str, Any]:
        """Return the keys with an effect; raises InvalidRequestError for an unsupported one."""
        kept = {}
        for name, value in document.items():
            if value is None or name in cls.ignored_keys:
                continue
            neutral = cls.neutral_values.get(name)
            field = cls.model_fields.get(name)
            if neutral is None:
                body = _find_body(field.annotation) if field else None
                kept[name] = value if body is None else _select_nested(body, value)
            elif not any(_is_equal(value, other) for other in neutral):
                raise FieldError(f"{name} is not supported; remove it", name)
        return kept

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe what is accepted: nulls for optional keys, and keys without an effect."""
        document: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        keys = document.setdefault("properties", {})
        for name in keys.keys() - set(document.get("required", ())):
            if NULL not in keys[name].get("anyOf", ()):
                keys[name] = {"anyOf": [keys[name], NULL]}
        keys |= {name: {"description": "Has no effect."} for name in sorted(cls.ignored_keys)}
        for name, values in cls.neutral_values.items():
            keys[name] = {"description": "Is not supported.", "enum": [*values, None]}
        return document


def _is_equal(value: object, other: object) -> bool:
    """Return whether two JSON values are equal; false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _select_nested(body: type[RequestBody], value: Any) -> Any:
    """Return a nested body, or a list of them, with the keys that have an effect."""
    if isinstance(value, list):
        return [_select_nested(body, item) for item in value]
    return body.select_keys(value) if isinstance(value, dict) else value


def _find_body(annotation: Any) -> type[RequestBody] | None:
    """Return the body in a field's type, if any."""
    if isinstance(annotation, type) and issubclass(annotation, RequestBody):
        return annotation
    return next(filter(None, map(_find_body, get_args(annotation))), None)


def check_parts(document: bytes) -> None:
    """Raise TooLargeError if JSON has too many lists, objects and keys, before they are built."""
    if sum(map(document.count, (b"[", b"{", b":"))) <= MAX_PARTS:
        return
    starts = (match for match in PART.finditer(document) if match.lastindex)
    if next(islice(starts, MAX_PARTS, None), None):
        raise TooLargeError(f"the body has more than {MAX_PARTS} lists, objects and keys")
