"""Train, evaluate, compile, compare and batch-infer transformer models on any accelerator.

Every verb of the command line is also a function: `regauge.train("run.toml", "stop.steps=10")`. It
prints nothing, and returns a typed result. `regauge.load("artifact").encode(texts)` runs an
artifact in this process. The import is lazy: the module of a verb is imported when its function is
first used.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_PACKAGE = Path(__file__).parent
_VERBS = frozenset(
    path.stem
    for path in (_PACKAGE / "commands").glob("*.py")
    # The verb `models` has the name of a package; its functions are the methods of `Registry`.
    if not path.stem.startswith("_") and not (_PACKAGE / path.stem).is_dir()
)

_CLASSES = {
    "AsyncClient": "regauge.serving.client.client",
    "Callback": "regauge.training.callbacks",
    "Client": "regauge.serving.client.client",
    "Registry": "regauge.registry.registry",
    "TrainingEvent": "regauge.training.callbacks",
}
"""Public classes by their module."""

# The list follows from the files in commands/, so a new verb needs no change here.
__all__ = [*sorted({"__version__", "load", *_CLASSES, *_VERBS})]  # noqa: PLE0604 (a star expression of names)


def __getattr__(name: str) -> Any:
    """Return the function of a verb, the function that loads an artifact, or a class."""
    if name in _CLASSES:
        return getattr(importlib.import_module(_CLASSES[name]), name)
    if name == "load":
        with importlib.import_module("regauge.system.garbage").pause_collection():
            return importlib.import_module("regauge.inference.export.model").load
    if name not in _VERBS:
        raise AttributeError(f"module 'regauge' has no attribute '{name}'")
    return importlib.import_module("regauge.commands._python.functions").build_function(name)


def __dir__() -> list[str]:
    return __all__
