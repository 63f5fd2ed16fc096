"""A module of a user's own as an artifact: it takes tensors, and gives what it gave before."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import regauge
from end_to_end.predicting import QUICK
from regauge import choices
from regauge.cli import main
from regauge.errors import DataError, SettingsError

CODE = """
import torch
from torch import nn


class Scored(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.pixels, self.kinds = nn.Conv2d(2, 3, 3), nn.Embedding(7, 4)

    def forward(self, image, kind):
        found = torch.cat([self.pixels(image).mean((2, 3)), self.kinds(kind)], 1)
        forms = {"tensor": found, "tuple": (found, kind), "dict": {"scores": found, "kind": kind}}
        return forms[self.form]


def made(form):
    torch.manual_seed(0)
    return Scored(form), {"image": torch.randn(3, 2, 8, 8), "kind": torch.tensor([1, 5, 2])}


def tensor():
    return made("tensor")


def tuple():
    return made("tuple")


def dict():
    return made("dict")


def alone():
    return Scored("tensor")


def more():
    module, examples = made("tensor")
    return module, {**examples, "third": examples["kind"]}


def broken():
    raise ValueError("no file of mine")


def fewer():
    module, examples = made("tensor")
    return module, {**examples, "kind": examples["kind"].bool()}
"""
Export = Callable[..., int]


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Export]:
    """Return a function that exports what a function beside the working folder returns."""
    (tmp_path / "own_scored.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(choices, "_named", set())
    monkeypatch.setattr(choices, "_places", [])

    def exported(function: str, *more: str) -> int:
        given = ["--module", f"own_scored:{function}", "--to", "out", *more, *QUICK]
        return main(["export", *given, 'candidates.precisions=["fp32"]'])

    yield exported
    sys.modules.pop("own_scored", None)


@pytest.mark.parametrize(
    ("form", "backend"),
    [("tensor", "onnx"), ("tuple", "openvino"), ("dict", "eager"), ("dict", "onnx")],
)
def test_a_module_gives_what_it_gave(
    export: Export, capsys: pytest.CaptureFixture[str], form: str, backend: str
) -> None:
    assert export(form, f'candidates.backends=["{backend}"]') == 0
    program = json.loads(Path("out/manifest.json").read_text())["program"]
    assert (program["answers"], program["width"]) == ("tensor", 7)
    assert f"kept: {backend} fp32 1 threads\n" in capsys.readouterr().out
    loaded = regauge.load("out", module="own_scored", threads=1)
    module, examples = sys.modules["own_scored"].tensor()
    generator = torch.Generator().manual_seed(1)
    for rows in (0, 1, 50):
        image = torch.randn(rows, 2, 8, 8, generator=generator)
        kind = torch.randint(0, 7, (rows,), generator=generator)
        with torch.no_grad():
            assert torch.allclose(loaded(image, kind), module(image, kind), atol=1e-5)
    for other in (loaded(kind=kind, image=image), loaded(image, kind=kind)):
        assert torch.equal(other, loaded(image, kind))
    image, kind = examples.values()
    wrong = {
        (image,): "1 tensors are given; give 2: image, kind",
        (kind, image): r"'image' is int64 \[3\]; give float32 \[rows, 2, 8, 8\]",
        (image, kind.int()): r"'kind' is int32 \[3\]; give int64 \[rows\]",
        (image, kind[:2]): "the tensors have 2, 3 rows; give one row of each",
    }
    for given, told in wrong.items():
        with pytest.raises(DataError, match=told):
            loaded(*given)
    with pytest.raises(DataError, match="no input 'kin' left to give; did you mean 'kind'"):
        loaded(image, kin=kind)
    with pytest.raises(DataError, match="'image' is of type ndarray; give a tensor"):
        loaded(image.numpy(), kind)
    with pytest.raises(SettingsError, match="reads no texts; call it with tensors"):
        loaded.answer(["a text"])


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("alone", "returns Scored; let it return (module, {name: example tensor})"),
        ("more", "Scored fails on its examples: "),
        ("fewer", "kind is torch.bool; give it as one of "),
        ("broken", "'own_scored:broken' fails: no file of mine; correct it there"),
        ("tensors", "did you mean 'tensor'?"),
    ],
)
def test_a_function_that_returns_something_else_is_refused(
    export: Export, capsys: pytest.CaptureFixture[str], function: str, told: str
) -> None:
    assert export(function, 'candidates.backends=["eager"]') in (2, 64)
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert told in error[0]
    assert not Path("out").exists()
