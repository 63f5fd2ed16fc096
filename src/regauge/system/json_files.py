"""Reads JSON documents, checking encoding, depth and shape.

A disk, another program or another user may damage a file. Each damage is reported in one line with
the file and the correction.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from regauge.system.errors import DataError
from regauge.system.expectations import describe_expectation, format_value
from regauge.system.files import TEXT, format_json, read_content, restore_non_finite, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_DEPTH = 100
"""Maximum nesting of a JSON document; Regauge's own have less than 20 levels."""
CHECKSUM = "document_sha256"
"""Key for the SHA-256 of a document's other keys and values."""
_NUMBER_LIST = re.compile(r"\[\s+((?:[-+.\deE]+,\s+)*[-+.\deE]+)\s+\]")
"""A list of numbers in indented JSON; JSON texts cannot contain line breaks."""
TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


class DocumentShape(BaseModel):
    """Keys and types required by readers of a JSON document; other keys are allowed."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def read_json(
    path: Path, remedy: str, shape: type[DocumentShape] = DocumentShape
) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises DataError, with the remedy, if the file is missing, not a regular file, not JSON in
    UTF-8, nested too deeply, or of another shape.
    """
    document = find_json(path, remedy)
    if document is None:
        raise DataError(f"{path} is missing", remedy)
    check_shape(document, path, remedy, shape)
    return document


def find_json(path: Path, remedy: str) -> dict[str, Any] | None:
    """Return the JSON object in a file as `read_json` does, or None without the file."""
    content = read_content(path, remedy)
    try:
        return None if content is None else parse_object(content)
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}", remedy) from None


def find_valid_json(
    path: Path, shape: type[DocumentShape] = DocumentShape
) -> dict[str, Any] | None:
    """Return a file's JSON object; None if it is missing, damaged or of another shape.

    For records that a command can write again, such as caches.
    """
    try:
        document = find_json(path, "remove it")
    except DataError:
        return None
    return None if document is None or find_mismatch(document, shape) else document


def read_json_list(path: Path, remedy: str) -> list[Any]:
    """Return the JSON list in a file; raises DataError as `read_json` does."""
    content = read_content(path, remedy)
    try:
        document = _parse(b"" if content is None else content)
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}", remedy) from None
    if not isinstance(document, list):
        raise DataError(f"{path} cannot be read: it does not contain a list", remedy)
    return document


def check_shape(
    document: object, path: Path | str, remedy: str, shape: type[DocumentShape]
) -> None:
    """Raise DataError, with the remedy, if the document of a file has another shape."""
    if problem := find_mismatch(document, shape):
        raise DataError(f"{path} is damaged: {problem}", remedy)


def find_mismatch(document: object, shape: type[BaseModel]) -> str | None:
    """Return the first key that does not fit a shape, with the reason, or None."""
    try:
        shape.model_validate(document)
    except ValidationError as error:
        return describe_mismatch(error)
    return None


def describe_mismatch(error: ValidationError) -> str:
    """Return the first key that does not fit a shape, with the reason."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"])) or "the whole document"
    if first["type"] == "missing":
        return f"'{key}' is missing"
    return f"'{key}' must be {describe_expectation(first)}, got {format_value(first['input'])}"


def parse_object(content: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a text; raises ValueError that names the damage.

    A sealed document's checksum is compared and removed.
    """
    document = _parse(content)
    if not isinstance(document, dict):
        raise ValueError(f"it contains {json.dumps(document)[:20]}, not an object")  # noqa: TRY004
    if CHECKSUM in document and document.pop(CHECKSUM) != hash_document(document):
        raise ValueError(f"its {CHECKSUM} differs, so it has changed since it was written")
    names_some = TEXT in content if isinstance(content, str) else TEXT.encode() in content
    return restore_non_finite(document) if names_some else document


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with a checksum for readers to compare."""
    stored: dict[str, Any] = json.loads(format_json(document))  # as it will be read
    return {**stored, CHECKSUM: hash_document(stored)}


def format_compact(document: Mapping[str, Any]) -> str:
    """Return a document as indented text, with each list of numbers in one line."""
    text = format_json(document, indent=1) + "\n"
    return _NUMBER_LIST.sub(lambda match: f"[{' '.join(match[1].split())}]", text)


def write_sealed(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document with checksum and sorted keys, atomically."""
    write_json(path, seal(document))


def hash_document(document: Mapping[str, Any]) -> str:
    """Return a document's SHA-256, whatever the key order."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _parse(content: str | bytes) -> Any:
    """Return the JSON document in a text; raises ValueError if there is none, or a deep one."""
    text = content if isinstance(content, str) else content.decode()
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_depth(document)
    return document


def check_depth(document: Any) -> None:
    """Raise ValueError if lists and tables are nested in more than MAX_DEPTH levels."""
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        nested = [value for value in level if isinstance(value, dict | list)]
        if not nested:
            return
        level = [
            item
            for value in nested
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    raise ValueError(TOO_DEEP)
