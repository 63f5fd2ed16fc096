"""Train, evaluate, compile, compare and batch-infer transformer models on any accelerator.

Every verb of the command line is also a function: `regauge.train("run.toml", "stop.steps=10")`.
`regauge.load("artifact").encode(texts)` runs an artifact in this process. The import is lazy: the
module of a verb is imported when its function is first used.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__version__ = "0.1.0"

_VERBS = frozenset(
    path.stem
    for path in (Path(__file__).parent / "verbs").glob("*.py")
    if not path.stem.startswith("_")
)

# The list follows from the files in verbs/, so a new verb needs no change here.
__all__ = ["__version__", *sorted({"load", *_VERBS})]  # noqa: PLE0604 (a star expression of names)


def __getattr__(name: str) -> Any:
    """Return the `main` function of a verb, or the function that loads an artifact."""
    if name == "load":
        return importlib.import_module("regauge.artifacts.model").load
    if name not in _VERBS:
        raise AttributeError(f"module 'regauge' has no attribute '{name}'")
    return _accept_strings(importlib.import_module(f"regauge.verbs.{name}").main)


def _accept_strings(main: Callable[..., Any]) -> Callable[..., Any]:
    """Return a verb as a Python function, whose path parameters also accept strings."""
    import inspect
    from typing import get_args, get_type_hints

    signature, hints = inspect.signature(main), get_type_hints(main)
    paths = {name for name, hint in hints.items() if Path in (hint, *get_args(hint))}

    @functools.wraps(main)
    def call(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*arguments, **keywords)
        for name, value in bound.arguments.items():
            if name in paths and isinstance(value, str):
                bound.arguments[name] = Path(value).expanduser()
        return main(*bound.args, **bound.kwargs)

    return call


def __dir__() -> list[str]:
    return __all__
