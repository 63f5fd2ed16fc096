"""One run file, any accelerator, and the proof that nothing was lost on the way.

Every verb is also a function: `regauge.train("run.toml", "stop.steps=10")`, and
`regauge.load("artifact").encode(texts)` answers in this process. Importing this package costs
nothing: a verb's file is imported when its function is first asked for.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_VERBS = frozenset(
    path.stem
    for path in (Path(__file__).parent / "verbs").glob("*.py")
    if not path.stem.startswith("_")
)

# The file of a verb is its registration, here too: a new verb edits no list.
__all__ = ["__version__", *sorted({"load", *_VERBS})]  # noqa: PLE0604 (a star expression of names)


def __getattr__(name: str) -> Any:
    """Return the `main` of the verb whose file has this name, or what loads artifacts."""
    if name == "load":
        return importlib.import_module("regauge.artifacts.model").load
    if name not in _VERBS:
        raise AttributeError(f"module 'regauge' has no attribute '{name}'")
    return importlib.import_module(f"regauge.verbs.{name}").main


def __dir__() -> list[str]:
    return __all__
