"""The tensors that a program takes, described; nothing here imports torch."""

from __future__ import annotations

from typing import Final, Literal

from regauge.config import Settings

ROWS: Final = "rows"
LENGTH: Final = "length"
"""The sizes of a tensor that are not fixed."""


class Input(Settings):
    """One tensor that a program takes."""

    name: str
    """Name of the argument."""
    shape: tuple[int | Literal["rows", "length"], ...]
    """Sizes; those that change from call to call have names."""
    dtype: Literal["int32", "int64", "float32"] = "float32"
    """What it consists of."""


TEXTS = (
    Input(name="tokens", shape=(ROWS, LENGTH), dtype="int32"),
    Input(name="lengths", shape=(ROWS,), dtype="int32"),
)
"""Of a program that reads a text a row: its tokens, and how many of them are real."""
