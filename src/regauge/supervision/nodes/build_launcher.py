"""Selects the launcher for a run's attempts: one node or several."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from regauge.supervision.nodes.interface import LocalLauncher
from regauge.supervision.nodes.topology import resolve_topology

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.supervision.nodes.rendezvous import RendezvousLauncher
    from regauge.training.settings import TrainSettings

    Launcher = LocalLauncher | RendezvousLauncher


def build_launcher(settings: TrainSettings, folder: Path) -> Launcher:
    topology = resolve_topology(settings.execution.nodes, folder)
    if topology is None:
        return LocalLauncher(folder)
    with _silence_torch_log():
        from regauge.supervision.nodes.rendezvous import RendezvousLauncher

    return RendezvousLauncher(topology, settings, folder)


@contextmanager
def _silence_torch_log() -> Iterator[None]:
    """Set torch's log level for its import, so a lost node does not print C++ stacks."""
    is_unset = "TORCH_CPP_LOG_LEVEL" not in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        yield
    finally:
        if is_unset:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
