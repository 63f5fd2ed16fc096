"""Converts Python values to settings: JSON for whole tables, TOML for overrides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from regauge.config.toml_format import format_toml
from regauge.system.errors import SettingsError


def to_json(value: Any, key: str) -> Any:
    """Return a JSON-ready copy of a setting; `key` names it in messages.

    Paths become text, and numpy numbers become Python numbers. None entries are left out. Raises
    SettingsError for any other type.
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
    return format_toml(to_json(value, key))
