"""The default candidates of an export, the fast candidate, and the fallbacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regauge import config
from regauge.accelerators import Precision
from regauge.accelerators.cpu import Cpu
from regauge.inference.backends import Quantization
from regauge.inference.backends.eager import EagerBackend
from regauge.inference.backends.inductor import InductorBackend
from regauge.inference.backends.onnx import OnnxBackend
from regauge.inference.backends.openvino import OpenvinoBackend
from regauge.inference.backends.torch_compile import TorchCompileBackend
from regauge.inference.export import candidates as module
from regauge.inference.export.candidates import Candidate, list_candidates
from regauge.inference.export.export_settings import Candidates
from regauge.inference.export.programs import ProgramSpec, build_module_spec

ALL = (EagerBackend(), InductorBackend(), OnnxBackend(), OpenvinoBackend(), TorchCompileBackend())


def list_openvino_formats(
    _: OpenvinoBackend, accelerator: Cpu
) -> tuple[tuple[Precision, Quantization], ...]:
    quantizations: tuple[Quantization, ...] = ("int8", "none")
    return tuple((p, q) for q in quantizations for p in accelerator.precisions())


class Bf16Cpu(Cpu):
    """A processor with bf16 instructions, on any machine."""

    def precisions(self) -> tuple[Precision, ...]:
        return "bf16", "fp32"

    @property
    def kind(self) -> str:
        return "cpu"


@pytest.fixture
def spec() -> ProgramSpec:
    return build_module_spec("m:f", torch.nn.Linear(2, 2), {"x": torch.ones(1, 2)})


@pytest.fixture(autouse=True)
def _use_all_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every backend be usable, whatever is installed and the processor supports."""
    monkeypatch.setattr(OpenvinoBackend, "supported_formats", list_openvino_formats)
    monkeypatch.setattr(module, "list_usable", lambda _: list(ALL))
    monkeypatch.setattr(module, "available_threads", lambda: 2)


def describe(candidates: list[Candidate]) -> list[tuple[str, str, bool]]:
    return [(item.backend.kind, item.precision, item.is_fallback) for item in candidates]


def list_on_cpu(spec: ProgramSpec, **options: Any) -> list[tuple[str, str, bool]]:
    """Return the unquantized candidates."""
    settings = config.build(Candidates, {"quantization": ["none"]} | options, (), "the test")
    return describe(list_candidates(settings, Bf16Cpu(), spec)[0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            [
                ("openvino", "bf16", False),
                ("openvino", "fp32", False),
                ("onnx", "fp32", False),
                ("eager", "bf16", False),
                ("eager", "fp32", False),
            ],
        ),
        (
            {"backends": ["inductor", "eager"], "precisions": ["fp32"]},
            [("inductor", "fp32", False), ("eager", "fp32", False)],
        ),
        (
            {"backends": ["eager"], "precisions": ["fp32", "bf16"]},
            [("eager", "bf16", False), ("eager", "fp32", False)],
        ),
        (
            {"backends": ["inductor"], "threads": [1, 2]},
            [("inductor", "bf16", False), ("inductor", "fp32", True)] * 2,
        ),
        ({"fast": True}, [("openvino", "bf16", False), ("openvino", "fp32", True)]),
    ],
)
def test_candidates_are_the_named_ones_or_graphs(
    spec: ProgramSpec, options: dict[str, Any], expected: list[tuple[str, str, bool]]
) -> None:
    assert list_on_cpu(spec, **options) == expected


def test_a_backend_that_is_left_out_has_a_reason(spec: ProgramSpec) -> None:
    left_out = list_candidates(Candidates(), Bf16Cpu(), spec)[1]
    assert left_out == {"inductor": "compiles machine code; name it in candidates.backends"}


def test_by_default_every_quantization_and_every_fast_precision_is_tried(
    spec: ProgramSpec,
) -> None:
    candidates = list_candidates(Candidates(), Bf16Cpu(), spec)[0]
    formats = {(item.backend.kind, item.precision, item.quantization) for item in candidates}
    assert formats == {
        *(("openvino", p, q) for p in ("bf16", "fp32") for q in ("none", "int8")),
        *(("onnx", "fp32", q) for q in ("none", "int8")),
        *(("eager", p, "none") for p in ("bf16", "fp32")),
    }


def test_a_precision_that_is_not_faster_is_tried_only_if_it_is_named(spec: ProgramSpec) -> None:
    class Fp32Cpu(Bf16Cpu):
        def precisions(self) -> tuple[Precision, ...]:
            return "fp32", "bf16"

    options = {"backends": ["openvino"], "quantization": ["none"]}
    for named, expected in (([], ["fp32"]), (["bf16"], ["bf16"])):
        settings = config.build(Candidates, options | {"precisions": named}, (), "the test")
        candidates = list_candidates(settings, Fp32Cpu(), spec)[0]
        assert [item.precision for item in candidates] == expected


def test_machine_code_is_compiled_for_each_number_of_threads(spec: ProgramSpec) -> None:
    """The compiler writes the number of threads into the code."""
    settings = config.build(
        Candidates, {"backends": ["inductor"], "threads": [1, 2], "precisions": ["fp32"]}, (), "it"
    )
    candidates = list_candidates(settings, Bf16Cpu(), spec)[0]
    assert len({item.payload_key for item in candidates}) == 2


def test_candidates_of_a_graph_share_it_for_all_precisions(spec: ProgramSpec) -> None:
    candidates = list_candidates(Candidates(), Bf16Cpu(), spec)[0]
    keys = {item.payload_key for item in candidates if item.backend.kind == "openvino"}
    assert len(keys) == 2  # with and without int8
    assert len({item.payload_key for item in candidates if item.backend.kind == "eager"}) == 2


def test_without_a_graph_machine_code_is_compiled(
    spec: ProgramSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "list_usable", lambda _: [EagerBackend(), InductorBackend()])
    assert {kind for kind, _, _ in list_on_cpu(spec)} == {"eager", "inductor"}


def test_the_fast_candidate_is_not_compiled_to_machine_code(
    spec: ProgramSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "list_usable", lambda _: [EagerBackend(), InductorBackend()])
    assert list_on_cpu(spec, fast=True)[0] == ("eager", "bf16", False)


def test_the_fast_candidate_has_the_first_of_several_named_precisions(spec: ProgramSpec) -> None:
    options = {"backends": ["eager"], "precisions": ["fp32", "bf16"], "threads": [1, 2]}
    assert list_on_cpu(spec, fast=True, **options)[0] == ("eager", "bf16", False)
