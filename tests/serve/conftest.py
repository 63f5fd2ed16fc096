"""Tiny artifacts and a server of them, once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import httpx
import pytest

import regauge
from regauge.inference.export.model import LoadedModel
from serve.live_server import LiveServer, export_tiny_artifacts, start_server


@pytest.fixture(scope="session")
def tiny_artifacts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return the folders of a tiny artifact of each kind, by name."""
    return export_tiny_artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="session")
def server(
    tiny_artifacts: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Return a running server of the tiny artifacts; `encoder` is the default model."""
    with start_server(tiny_artifacts, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """Return a client of the server."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def load_model(tiny_artifacts: Mapping[str, Path]) -> Callable[[str], LoadedModel]:
    """Return a function that loads a tiny artifact in this process, by its name."""

    @cache
    def load(name: str) -> LoadedModel:
        return regauge.load(tiny_artifacts[name], batch_invariant=False, threads=1)

    return load
