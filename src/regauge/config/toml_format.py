"""Writes settings as TOML, as overrides and run files have them."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def format_toml(value: Any) -> str:
    """Return a value in TOML, with inline tables: `{ rows = 8, labels = ["a"] }`."""
    if isinstance(value, dict):
        items = (f"{format_key(key)} = {format_toml(item)}" for key, item in value.items())
        return f"{{ {', '.join(items)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # As in JSON, except that only TOML escapes the character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_key(key: str) -> str:
    """Return a key in TOML, with quotes if it needs them."""
    return key if _BARE_KEY.fullmatch(key) else format_toml(key)
