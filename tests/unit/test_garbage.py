"""The pause of the garbage collector ends with its block."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from regauge.system.garbage import pause_collection

COUNT_COLLECTIONS = """
import gc
phases = []
gc.callbacks.append(lambda phase, info: phases.append(phase))
{code}
print(len(phases))
"""


def test_no_garbage_is_collected_in_the_block() -> None:
    assert gc.isenabled()
    with pause_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_pause_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="import"), pause_collection():
        raise ValueError("import")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_import_of_the_function_that_loads_a_model_collects_no_garbage() -> None:
    assert count_collections("import regauge\nphases.clear()\nregauge.load") < 10
    assert count_collections("import regauge.inference.export.model") > 100


def count_collections(code: str) -> int:
    """Return how often the collector of a new process ran during some code."""
    text = COUNT_COLLECTIONS.format(code=code)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return int(done.stdout)
