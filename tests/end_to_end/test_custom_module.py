"""Export of a custom module: the artifact takes tensors and its outputs do not change."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import regauge
from end_to_end.predicting import QUICK
from regauge.cli import main
from regauge.system import choices
from regauge.system.errors import DataError, SettingsError

CODE = """
import torch
from torch import nn


class Scored(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.pixels, self.kinds = nn.Conv2d(2, 3, 3), nn.Embedding(7, 4)

    def forward(self, image, kind):
        scores = torch.cat([self.pixels(image).mean((2, 3)), self.kinds(kind)], 1)
        named = {"scores": scores, "kind": kind}
        forms = {"tensor": scores, "tuple": (scores, kind), "dict": named}
        return forms[self.form]


def build(form):
    torch.manual_seed(0)
    return Scored(form), {"image": torch.randn(3, 2, 8, 8), "kind": torch.tensor([1, 5, 2])}


def tensor():
    return build("tensor")


def tuple():
    return build("tuple")


def dict():
    return build("dict")


def alone():
    return Scored("tensor")


def more():
    module, examples = build("tensor")
    return module, {**examples, "third": examples["kind"]}


def broken():
    raise ValueError("no file of mine")


def fewer():
    module, examples = build("tensor")
    return module, {**examples, "kind": examples["kind"].bool()}
"""
Export = Callable[..., int]


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Export]:
    """Return a function that exports the module of a function in the working folder."""
    (tmp_path / "custom_scored.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(choices, "_allowed_paths", set())
    monkeypatch.setattr(choices, "_module_folders", [])

    def run_export(function: str, *more: str) -> int:
        options = ["--module", f"custom_scored:{function}", "--to", "out", *more, *QUICK]
        return main(["export", *options, 'candidates.precisions=["fp32"]'])

    yield run_export
    sys.modules.pop("custom_scored", None)


@pytest.mark.parametrize(
    ("form", "backend"),
    [
        ("tensor", "onnx"),
        ("dict", "eager"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("tuple", "openvino"), ("dict", "onnx"))
        ),
    ],
)
def test_the_artifact_of_a_module_gives_the_same_outputs(
    export: Export, capsys: pytest.CaptureFixture[str], form: str, backend: str
) -> None:
    assert export(form, f'candidates.backends=["{backend}"]') == 0
    program = json.loads(Path("out/manifest.json").read_text())["program"]
    assert (program["output_kind"], program["output_size"]) == ("tensor", 7)
    assert f"selected: {backend} fp32 1 thread\n" in capsys.readouterr().out
    loaded = regauge.load("out", module="custom_scored", threads=1)
    module, examples = sys.modules["custom_scored"].tensor()
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
        (image,): "got 1 tensors; pass 2: image, kind",
        (kind, image): r"'image' is int64 \[3\]; pass float32 \[rows, 2, 8, 8\]",
        (image, kind.int()): r"'kind' is int32 \[3\]; pass int64 \[rows\]",
        (image, kind[:2]): "the tensors have 2, 3 rows; pass the same number of rows in each",
    }
    for tensors, message in wrong.items():
        with pytest.raises(DataError, match=message):
            loaded(*tensors)
    with pytest.raises(
        DataError, match="'kin' is not a remaining input of the program; did you mean 'kind'"
    ):
        loaded(image, kin=kind)
    with pytest.raises(DataError, match="'image' is of type ndarray; pass a tensor"):
        loaded(image.numpy(), kind)
    with pytest.raises(SettingsError, match="does not read texts; call it with tensors"):
        loaded.predict(["a text"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("alone", "returns Scored; return (module, {name: example tensor})"),
        ("more", "Scored fails on its examples: "),
        ("fewer", "kind is torch.bool; convert it to one of "),
        ("broken", "'custom_scored:broken' fails: no file of mine; correct the function"),
        ("tensors", "did you mean 'tensor'?"),
    ],
)
def test_an_invalid_function_is_refused(
    export: Export, capsys: pytest.CaptureFixture[str], function: str, message: str
) -> None:
    assert export(function, 'candidates.backends=["eager"]') in (2, 64)
    progress, *error = capsys.readouterr().err.strip().splitlines()
    assert progress.startswith("load: ")
    assert len(error) == 1
    assert message in error[0]
    assert not Path("out").exists()
