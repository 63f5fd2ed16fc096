"""Fixtures of all tests, and a check that no test leaves a resource behind.

The terminal summary has the largest error of each kind of comparison.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

import support
from leaks import Snapshot
from regauge import accelerators
from regauge.planner.run_history import OFF, VARIABLE
from regauge.system import choices
from regauge.system.log import logger
from regauge.system.stop_signals import STOP_SIGNALS

PROOFS = pytest.StashKey[support.Proofs]()
FIGURES = pytest.StashKey[dict[str, list[float]]]()

# No run of a test is recorded for the plans of the user.
os.environ.setdefault(VARIABLE, OFF)

# A suite under `nohup` or in the background of a shell ignores signals, and so would every process
# that it starts.
for number in STOP_SIGNALS:
    if signal.getsignal(number) == signal.SIG_IGN:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)

# Hypothesis: equal examples in every run, no time limit, no database.
settings.register_profile("regauge", deadline=None, database=None, derandomize=True)
settings.load_profile("regauge")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--support",
        action="store_true",
        help="write the combinations that ran to docs/reference/accelerators.md",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a worker of pytest-xdist; the main process writes
        output["figures"] = session.config.stash.get(FIGURES, {})
        output["proofs"] = session.config.stash.get(PROOFS, {})
        return
    proofs = session.config.stash.get(PROOFS, {})
    if proofs and session.config.getoption("--support"):
        support.merge(proofs)
        support.write_table()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the figures and proofs of a worker; pytest-xdist calls this when the worker ends."""
    output = getattr(node, "workeroutput", {})
    kinds = node.config.stash.setdefault(FIGURES, {})
    for kind, values in output.get("figures", {}).items():
        kinds.setdefault(kind, []).extend(values)
    node.config.stash.setdefault(PROOFS, {}).update(output.get("proofs", {}))


@pytest.fixture
def supports(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Return a function that records that an accelerator ran a strategy and a task."""
    proofs = request.config.stash.setdefault(PROOFS, {})

    def record(accelerator: str, strategy: str, task: str) -> None:
        proofs[f"{accelerator}/{strategy}/{task}"] = support.proof(accelerator)

    return record


def pytest_sessionstart() -> None:
    """Start the lazy devices of this machine before any test, and restore the SIGINT handler.

    The client of a lazy device must start before the first backward pass on the CPU, and it sets
    environment variables. A shell ignores SIGINT in background jobs, but tests send SIGINT.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind, availability in accelerators.survey().items():
        accelerator = choices.load("accelerators", kind)()
        if accelerator.is_lazy and availability.fitness > 0:
            torch.ones(2, device=accelerator.claim(0, 1)).add(1).cpu()


@pytest.fixture(autouse=True)
def _plain_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the logger to its state after import; the command line configures it."""
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _check_leaks() -> Iterator[None]:
    before = Snapshot()
    yield
    problems = before.find_leaks()
    if problems:
        pytest.fail("; ".join(problems))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Return a function that adds a measured value of a kind to the terminal summary."""
    kinds = request.config.stash.setdefault(FIGURES, {})

    def add(kind: str, value: float) -> None:
        kinds.setdefault(kind, []).append(value)

    return add


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    kinds = config.stash.get(FIGURES, {})
    if kinds:
        terminalreporter.write_sep("-", "largest relative errors and longest seconds")
    for kind, values in sorted(kinds.items()):
        terminalreporter.write_line(f"{kind}: {max(values):.2g} ({len(values)} cases)")
