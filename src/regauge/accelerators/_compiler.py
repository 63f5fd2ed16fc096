"""The C++ compiler that torch.compile needs for host code."""

from __future__ import annotations

import shutil

COMPILERS = ("g++", "clang++")


def obstacle() -> str | None:
    """Return the reason why no C++ code can be compiled, or None."""
    if any(map(shutil.which, COMPILERS)):
        return None
    return f"no C++ compiler is installed ({' or '.join(COMPILERS)})"
