"""Only `accelerators/`, `inference/backends/` and documentation name a device or its vendor."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from architecture.tree import Source, docstrings, sources

WORDS = {"cuda", "nccl", "rocm", "hip", "mps", "xpu", "hpu", "hccl", "habana", "gaudi"} | {
    "xla",
    "tpu",
    "neuron",
    "trainium",
    "inferentia",
}
FOLDERS = ("accelerators", "inference/backends")


def find_device_words(source: Source) -> list[str]:
    """Return every device word in the code of a file."""
    documentation = docstrings(source.tree)
    return [
        f"{source.path}:{getattr(node, 'lineno', '?')} contains {text!r}"
        for node in ast.walk(source.tree)
        if id(node) not in documentation
        for text in _texts(node)
        if WORDS & set(re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()))
    ]


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers and strings that a node holds."""
    for name in ("id", "attr", "name", "arg", "asname", "module", "value"):
        text = getattr(node, name, None)
        if isinstance(text, str):
            yield text


def test_no_device_word_outside_of_its_packages() -> None:
    problems = [
        line
        for source in sources()
        if not source.is_in(*FOLDERS)
        for line in find_device_words(source)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "text",
    [
        "x.cuda()",
        "device = 'cuda:0'",
        "import torch_xla",
        "from torch_xla.core import xla_model",
        "def on_tpu(): ...",
        "call(hpu=True)",
        "message = f'{n} neuron cores'",
        "class CudaLoop: ...",
    ],
)
def test_a_device_word_is_detected(text: str) -> None:
    assert find_device_words(Source("regauge/training/trainer.py", text))


@pytest.mark.parametrize("text", ['"""As on cuda."""', "x = 1  # tpu", "relax = barracuda"])
def test_documentation_and_other_words_are_free(text: str) -> None:
    assert not find_device_words(Source("regauge/training/trainer.py", text))
