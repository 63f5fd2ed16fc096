"""Texts that are longer than the model reads: refused, truncated, or split."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regauge
from regauge.data.tokenizer import LoadedTokenizer
from serve.servers import LENGTHS, ServerProcess, encoder, start_server

__all__ = ["encoder"]

ROOM = LENGTHS[-1] - 1
"""Words of a text that the model reads; each is a token, and the last token is special."""
WORDS = [f"w{5 + index % 90}" for index in range(2 * ROOM + 7)]
SHORT, LONG = "w5 w6", " ".join(WORDS)


@pytest.fixture
def embed(encoder: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that embeds texts with a setting of `overflow`."""

    def send(overflow: str, texts: list[str]) -> Any:
        with start_server(tmp_path, f"model={encoder}", f"serve.overflow={overflow}") as server:
            return read_answer(server, texts)

    return send


def read_answer(server: ServerProcess, texts: list[str]) -> Any:
    return server.post("/embed", {"inputs": texts})


def test_a_long_text_is_refused_with_its_index(embed: Callable[..., Any]) -> None:
    response = embed("refuse", [SHORT, LONG])
    assert response.status_code == 413
    assert "record 1 is longer" in response.json()["error"]


def test_a_text_of_megabytes_is_refused_before_it_is_tokenized(
    encoder: Path, tmp_path: Path
) -> None:
    text = "w5 " * 5_000_000
    tokenizer = LoadedTokenizer(encoder / "tokenizer")
    start = time.process_time()
    tokenizer.encode([text[: len(text) // 10]])
    seconds_of_a_tenth = time.process_time() - start
    with start_server(tmp_path, f"model={encoder}") as server:
        assert server.embed(SHORT).shape[0] == 1
        before = read_processor_seconds(server.process.pid)
        for path, body in (("/embed", {"inputs": text}), ("/tokenize", {"inputs": text})):
            assert server.post(path, body).status_code == 413
        assert read_processor_seconds(server.process.pid) - before < seconds_of_a_tenth


def read_processor_seconds(pid: int) -> float:
    """Return the processor time of a process, from its `stat` file."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_truncated_texts_are_counted(embed: Callable[..., Any], encoder: Path) -> None:
    response = embed("truncate", [SHORT, LONG, LONG])
    assert response.headers["regauge-truncated-records"] == "2"
    expected = regauge.load(encoder, threads=1).encode([SHORT, LONG, LONG])
    assert np.abs(np.array(response.json()) - expected).max() < 1e-3


def test_the_vector_of_a_split_text_is_the_mean_of_its_parts(
    embed: Callable[..., Any], encoder: Path
) -> None:
    response = embed("split", [SHORT, LONG])
    assert "regauge-truncated-records" not in response.headers
    parts = [" ".join(WORDS[start : start + ROOM]) for start in range(0, len(WORDS), ROOM)]
    model = regauge.load(encoder, threads=1)
    vectors = model.encode(parts)
    weights = np.array([len(part.split()) + 1 for part in parts])
    mean = weights @ vectors / weights.sum()
    expected = np.stack([model.encode(SHORT), mean / np.linalg.norm(mean)])
    assert np.abs(np.array(response.json()) - expected).max() < 1e-3
    assert np.abs(expected[1] - vectors[0]).max() > 1e-2, "the parts have different vectors"
