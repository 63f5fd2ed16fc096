"""Converts Python values to settings: JSON for whole tables, TOML for overrides."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from regauge.system.errors import SettingsError


def to_json(value: Any, key: str) -> Any:
    """Return a JSON-ready copy of a setting; `key` names it in messages.

    Paths become text, and numbers of numpy become numbers. Entries that are None are left out.
    Raises SettingsError for any other type.
    """
    if isinstance(value, Mapping):
        return {
            str(name): to_json(item, f"{key}.{name}")
            for name, item in value.items()
            if item is not None
        }
    if isinstance(value, list | tuple):
        return [to_json(item, key) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, str | bool | int | float):
        return value
    name = type(value).__name__
    raise SettingsError(f"'{key}' is of type {name}", "use text, numbers, lists and dictionaries")


def format_value(value: Any, key: str) -> str:
    """Return a setting as TOML; raises SettingsError for a value that TOML cannot express."""
    if value is None:
        raise SettingsError(f"'{key}' is None", "leave it out")
    return _format_toml(to_json(value, key))


def _format_toml(value: Any) -> str:
    if isinstance(value, dict):
        items = (f"{_quote(name)} = {_format_toml(item)}" for name, item in value.items())
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_toml, value))}]"
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


def _quote(text: str) -> str:
    """Return text as a basic string of TOML; only TOML escapes the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
