"""Imports of libraries that tests compare with."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import transformers


def import_sentence_transformers() -> ModuleType:
    """Return sentence-transformers; undo the OpenMP variables that scikit-learn sets on import."""
    reason = "not proved here: equal vectors in sentence-transformers, which is not installed"
    before = set(os.environ)
    library: ModuleType = pytest.importorskip("sentence_transformers", reason=reason)
    for name in set(os.environ) - before:
        del os.environ[name]
    return library


@contextmanager
def record_warnings() -> Iterator[list[str]]:
    """Collect what transformers, sentence-transformers and peft warn of."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("transformers", "sentence_transformers")]
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            yield messages
        messages += [str(warning.message) for warning in recorded]
    finally:
        transformers.logging.set_verbosity(verbosity)
        for logger in loggers:
            logger.removeHandler(handler)
