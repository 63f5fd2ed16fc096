"""Imports of libraries that tests compare with."""

from __future__ import annotations

import os
from types import ModuleType

import pytest


def import_sentence_transformers() -> ModuleType:
    """Return sentence-transformers; undo the OpenMP variables that scikit-learn sets on import."""
    reason = "not proved here: equal vectors in sentence-transformers, which is not installed"
    before = set(os.environ)
    library: ModuleType = pytest.importorskip("sentence_transformers", reason=reason)
    for name in set(os.environ) - before:
        del os.environ[name]
    return library
