"""What every test is held to: it leaves nothing behind.

The largest error of each kind of proof is printed at the end.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

import support
from leaks import Before
from regauge import accelerators, choices
from regauge.log import logger

PROOFS = pytest.StashKey[support.Proofs]()
FIGURES = pytest.StashKey[dict[str, list[float]]]()

# The same examples every time, on a machine of any speed, and nothing written.
settings.register_profile("regauge", deadline=None, database=None, derandomize=True)
settings.load_profile("regauge")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--support", action="store_true", help="write what ran into the README")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # one of several processes, and the first of them tells for all
        output["figures"] = session.config.stash.get(FIGURES, {})
        output["proofs"] = session.config.stash.get(PROOFS, {})
        return
    proofs = session.config.stash.get(PROOFS, {})
    if proofs and session.config.getoption("--support"):
        support.merge(proofs)
        support.write()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process has noted; pytest-xdist calls this when it ends."""
    output = getattr(node, "workeroutput", {})
    kinds = node.config.stash.setdefault(FIGURES, {})
    for kind, values in output.get("figures", {}).items():
        kinds.setdefault(kind, []).extend(values)
    node.config.stash.setdefault(PROOFS, {}).update(output.get("proofs", {}))


@pytest.fixture
def supports(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Return a function that notes an accelerator, a strategy and a task as run here."""
    proofs = request.config.stash.setdefault(PROOFS, {})

    def note(accelerator: str, strategy: str, task: str) -> None:
        proofs[f"{accelerator}/{strategy}/{task}"] = support.proof(accelerator)

    return note


def pytest_sessionstart() -> None:
    """Use the lazy devices of this machine before any backward pass of a test.

    Their client has to start before the first one on the CPU, and sets variables of its own. A
    shell starts what it runs in the background deaf to Ctrl-C, and tests send that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind, found in accelerators.survey().items():
        accelerator = choices.load("accelerators", kind)()
        if accelerator.is_lazy and found.fitness > 0:
            torch.ones(2, device=accelerator.claim(0, 1)).add(1).cpu()


@pytest.fixture(autouse=True)
def _plain_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin each test with the logger as it is imported; the command line sets it up."""
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = Before()
    yield
    problems = before.leaks()
    if problems:
        pytest.fail("; ".join(problems))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Return a function that adds a measured value to the report, under the name of its kind."""
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
