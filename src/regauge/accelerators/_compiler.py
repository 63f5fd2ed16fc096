"""The compiler of C++ that torch.compile calls for code of the host."""

from __future__ import annotations

import shutil

NAMES = ("g++", "clang++")


def obstacle() -> str | None:
    """Return what is missing, or None."""
    if any(map(shutil.which, NAMES)):
        return None
    return f"no C++ compiler is installed ({' or '.join(NAMES)})"
