"""The contract of every backend: it computes like eager PyTorch, or states why it is unusable."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._inductor import config as inductor

from regauge import accelerators, config
from regauge.accelerators import Availability, Precision
from regauge.accelerators.cpu import Cpu
from regauge.inference.backends import (
    Backend,
    Calibration,
    CompileJob,
    ExecutionContext,
    Payload,
    Shape,
    check_usable,
    list_usable,
    to_array,
)
from regauge.inference.backends._int8 import quantize
from regauge.inference.backends._int8.linear import Int8Linear
from regauge.inference.backends._int8.quantize import quantize_linear_layers
from regauge.models import architectures
from regauge.models.inference_modules import TextProgram, cast_program, named_tensors
from regauge.models.io_spec import TensorSpec
from regauge.models.modules import Encoder
from regauge.models.settings import Model
from regauge.system import choices
from regauge.system.errors import PreflightError, SettingsError
from regauge.system.safetensors_io import write_tensors

KINDS = choices.names("backends")
LIBRARIES = ("onnxruntime", "onnx", "onnxscript", "openvino")
VENDORS = ("torch_xla", "torch_neuronx", "torch_neuron", "habana_frameworks")
COMPILERS_OF_TORCH = {"inductor", "torch-compile"}
QUICK_KINDS = [pytest.param(k, marks=[pytest.mark.full] * (k in COMPILERS_OF_TORCH)) for k in KINDS]
WEIGHTLESS = {"inductor", "onnx", "openvino"}
"""Backends whose payloads contain no weights."""
SHAPES = (Shape(6, 8), Shape(4, 16), Shape(3, 24))
VOCABULARY = 60
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.half}
ERRORS = {"fp32": 1e-5, "tf32": 3e-3, "bf16": 3e-2, "fp16": 3e-3}
INT8_ERROR = 0.1
"""Largest difference from eager in fp32, as a share of the largest value."""
MAX_QUALITY_LOSS = 0.001
"""Share of the quality that int8 may lose; the default of an export."""
MAX_INLINED_NUMBERS = 8
"""Size of a vector that a compiler may copy into its code."""
Format = tuple[Any, Any]
EXACT: Format = ("fp32", "none")


class TableModel(nn.Module):
    """A model of numbers and a category, with two outputs, a buffer, and no text."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(7, 8)
        self.inner, self.outer = nn.Linear(5, 8), nn.Linear(8, 2)
        self.register_buffer("offset", torch.full((5,), 0.25))

    def forward(self, numbers: Tensor, kind: Tensor) -> Tensor:
        hidden = self.inner(numbers.to(self.inner.weight.dtype) - self.offset)
        return self.outer(torch.tanh(hidden) + self.kinds(kind)).float()


def encoder() -> nn.Module:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32}
    widths = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.2}
    settings = Model(architecture="bert", config={**sizes, **widths}, attention="sdpa")
    model, keys = architectures.build_model(settings, "none", VOCABULARY, 0)
    return TextProgram(Encoder(model, keys), "vectors")


def text_batch(rows: int, length: int) -> tuple[Tensor, ...]:
    """Return padded texts of all lengths; the third one is empty."""
    draw = torch.Generator().manual_seed(rows)
    tokens = torch.randint(1, VOCABULARY, (rows, length), generator=draw, dtype=torch.int32)
    lengths = torch.randint(1, length + 1, (rows,), generator=draw, dtype=torch.int32)
    lengths[0] = length
    lengths[2:3] = 0
    return tokens * (torch.arange(length)[None] < lengths[:, None]).int(), lengths


def table_batch(rows: int, length: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(rows + length)
    return torch.randn(rows, 5, generator=draw), torch.randint(0, 7, (rows,), generator=draw)


@dataclass(frozen=True)
class Example:
    """A program with its inputs."""

    make: Callable[[], nn.Module]
    inputs: tuple[TensorSpec, ...]
    batch: Callable[[int, int], tuple[Tensor, ...]]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval().requires_grad_(False)  # noqa: FBT003 - the API of torch

    def batches(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield batches of every length: full, with one row less, and with one row."""
        for shape in SHAPES:
            for rows in (shape.rows, shape.rows - 1, 1):
                yield self.batch(rows, shape.length)


TEXT = Example(
    encoder,
    (
        TensorSpec(name="tokens", shape=("rows", "length"), dtype="int32"),
        TensorSpec(name="lengths", shape=("rows",), dtype="int32"),
    ),
    text_batch,
)
TABLE = Example(
    TableModel,
    (
        TensorSpec(name="numbers", shape=("rows", 5)),
        TensorSpec(name="kind", shape=("rows",), dtype="int64"),
    ),
    table_batch,
)
EXAMPLES = {"text": TEXT, "table": TABLE}
ALL_FORMATS = pytest.mark.parametrize(
    "all_formats", [False, pytest.param(True, marks=pytest.mark.full)]
)


@pytest.fixture(autouse=True)
def _restore_torch_settings() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.backends.cuda.matmul.fp32_precision
    with inductor.patch(compile_threads=1):  # worker processes would stay alive
        yield
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.fp32_precision = precision
    torch._dynamo.reset()


def find_usable(kind: str) -> tuple[Backend, ExecutionContext]:
    """Return a backend and the fittest device that it supports; skip the test if there is none."""
    backend: Backend = choices.load("backends", kind)()
    reason: str | None = backend.available().reason
    if backend.available().fitness > 0:
        survey = accelerators.survey()
        for name in sorted(survey, key=lambda kind: -survey[kind].fitness):
            accelerator = choices.load("accelerators", name)()
            reason = backend.obstacle(accelerator)
            if reason is None and survey[name].fitness > 0:
                return backend, ExecutionContext(accelerator, 0, 2)
    pytest.skip(f"not proved here: {kind}: {reason}")


@pytest.fixture(params=KINDS)
def usable(request: pytest.FixtureRequest) -> tuple[Backend, ExecutionContext]:
    return find_usable(request.param)


Export = Callable[[Backend, ExecutionContext, Example, Format], Path]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return a function that exports a payload, once for all tests."""
    folders: dict[tuple[Any, ...], Path] = {}

    def export_once(
        backend: Backend, context: ExecutionContext, example: Example, number_format: Format
    ) -> Path:
        key = backend.kind, example.make, number_format
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(backend.kind)
            program = example.build()
            cast_program(program, TYPES[number_format[0]])
            calibration = Calibration(example.build(), [example.batch(64, 24)], MAX_QUALITY_LOSS)
            job = CompileJob(program, example.inputs, SHAPES, *number_format, None, calibration)
            backend.export(job, context, folders[key])
        return folders[key]

    return export_once


def load_payload(
    backend: Backend,
    context: ExecutionContext,
    example: Example,
    folder: Path,
    program: nn.Module,
    number_format: Format,
) -> Any:
    """Load a payload; a backend that compiles ahead of time does not get the program."""
    program = copy.deepcopy(program)
    cast_program(program, TYPES[number_format[0]])

    def refuse() -> NoReturn:
        raise AssertionError(f"{backend.kind} compiles ahead of time but requests the program")

    def read_weights() -> dict[str, Tensor]:
        return {name: value.detach() for name, value in named_tensors(program).items()}

    build = refuse if backend.is_ahead_of_time else (lambda: program)
    payload = Payload(folder, example.inputs, SHAPES, number_format[0], read_weights, build)
    return backend.load(payload, context)


def max_difference(runner: Any, example: Example, plain: nn.Module) -> float:
    """Return the largest difference from eager, relative to the largest value of a batch."""
    largest = 0.0
    for inputs in example.batches():
        with torch.no_grad():
            expected = plain(*inputs)
        output = torch.from_numpy(to_array(runner(*inputs)))
        assert output.shape == expected.shape
        assert output.isfinite().all()
        error = (output - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        largest = max(largest, float(error))
    return largest


@pytest.mark.parametrize("kind", KINDS)
def test_availability_has_a_reason_and_never_raises(kind: str) -> None:
    backend: Backend = choices.load("backends", kind)()
    availability = backend.available()
    assert isinstance(availability, Availability)
    assert availability.reason
    cpu = choices.load("accelerators", "cpu")()
    obstacle = backend.obstacle(cpu)
    assert obstacle is None or obstacle.strip()
    is_usable = availability.fitness > 0 and obstacle is None
    assert (kind in [other.kind for other in list_usable(cpu)]) == is_usable
    if not is_usable:
        with pytest.raises(
            SettingsError, match=f"'{kind}' is not usable here: .*use one of: .*eager"
        ):
            check_usable(backend, cpu)


BLOCKED = f"""
import sys
for name in {(*LIBRARIES, *VENDORS)}:
    sys.modules[name] = None
from regauge.system import choices
from regauge.inference.backends import list_usable
for kind in choices.names("backends"):
    backend = choices.load("backends", kind)()
    availability = backend.available()
    print(kind, availability.fitness, availability.reason, sep="|")
usable = [backend.kind for backend in list_usable(choices.load("accelerators", "cpu")())]
print("usable", *usable, sep="|")
"""


class Abacus(Cpu):
    """The CPU under another name, as another package may provide it."""

    kind: ClassVar[str] = "abacus"


class Sundial(Cpu):
    """A device that no backend supports."""

    kind: ClassVar[str] = "sundial"
    on_host: ClassVar[bool] = False
    supports_aot: ClassVar[bool] = False
    onnx_provider: ClassVar[str | None] = None


@pytest.mark.parametrize("kind", ["inductor", "onnx", "openvino"])
def test_backends_decide_by_the_properties_of_a_device_and_not_by_its_name(kind: str) -> None:
    backend: Backend = choices.load("backends", kind)()
    assert backend.obstacle(Abacus()) is None
    assert "sundial" in (backend.obstacle(Sundial()) or "")


def test_onnx_runtime_gets_the_options_of_the_device() -> None:
    for kind in choices.names("accelerators"):
        accelerator = choices.load("accelerators", kind)()
        provider = accelerator.onnx_provider
        options = accelerator.onnx_options(1, "tf32")
        assert not options or provider is not None
        assert all(isinstance(value, str) for value in options.values())
        assert (provider, options) in (
            (None, {}),
            ("CPUExecutionProvider", {}),
            ("CUDAExecutionProvider", {"device_id": "1", "use_tf32": "1"}),
        )


def test_a_missing_library_is_reported_with_its_install_command() -> None:
    command = [sys.executable, "-c", BLOCKED]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    *lines, usable = process.stdout.splitlines()
    rows = (line.split("|") for line in lines)
    survey = {kind: (int(fitness), reason) for kind, fitness, reason in rows}
    assert survey.keys() == set(KINDS)
    assert survey["onnx"] == (0, "onnxruntime is not installed: pip install 'regauge[onnx]'")
    assert survey["openvino"] == (0, "openvino is not installed: pip install 'regauge[openvino]'")
    assert all(reason for _, reason in survey.values())
    assert {"onnx", "openvino"}.isdisjoint(usable.split("|"))
    assert {"eager", "inductor"} <= set(usable.split("|"))


@pytest.mark.parametrize(
    ("usable", "name"),
    [
        # Compilers of torch take long, and compile the program again for each shape.
        pytest.param(
            kind,
            name,
            marks=[pytest.mark.full] * (kind in COMPILERS_OF_TORCH),
        )
        for kind in KINDS
        for name in EXAMPLES
    ],
    indirect=["usable"],
)
def test_outputs_equal_eager_and_are_bitwise_repeatable(
    usable: tuple[Backend, ExecutionContext], name: str, export: Export
) -> None:
    """All shapes are tested, with padding; no graph is added after each shape was computed once."""
    backend, context = usable
    example = EXAMPLES[name]
    plain = example.build()
    runner = load_payload(
        backend, context, example, export(backend, context, example, EXACT), plain, EXACT
    )
    assert max_difference(runner, example, plain) < ERRORS["fp32"]
    num_graphs = runner.num_graphs()
    assert num_graphs <= 1 or not backend.is_ahead_of_time
    for inputs in example.batches():
        first = to_array(runner(*inputs)).copy()
        assert np.array_equal(to_array(runner(*inputs)), first)
    assert runner.num_graphs() == num_graphs


@pytest.mark.full
@ALL_FORMATS
def test_every_supported_format_is_computed(
    usable: tuple[Backend, ExecutionContext], export: Export, *, all_formats: bool
) -> None:
    backend, context = usable
    forms = backend.supported_formats(context.accelerator)
    assert len(set(forms)) == len(forms) > 0
    assert {precision for precision, _ in forms} <= set(context.accelerator.precisions())
    for number_format, example in cases(backend, context, all_formats=all_formats):
        plain, folder = example.build(), export(backend, context, example, number_format)
        runner = load_payload(backend, context, example, folder, plain, number_format)
        error, max_error = max_difference(runner, example, plain), ERRORS[number_format[0]]
        assert error < (max_error if number_format[1] == "none" else max_error + INT8_ERROR), (
            number_format
        )
        is_exact = number_format == EXACT or not context.accelerator.is_deterministic
        assert is_exact or error > ERRORS["fp32"], f"{number_format} is computed in fp32"


def cases(
    backend: Backend, context: ExecutionContext, *, all_formats: bool
) -> list[tuple[Format, Example]]:
    """Return every format with attention; or the default formats of an export.

    Only int8 needs attention then: a program without it compiles faster.
    """
    forms = backend.supported_formats(context.accelerator)
    if all_formats:
        return [(number_format, TEXT) for number_format in forms]
    precisions = context.accelerator.precisions()
    defaults = precisions[: precisions.index("fp32") + 1]
    return [
        (number_format, TABLE if number_format[1] == "none" else TEXT)
        for number_format in forms
        if number_format[0] in defaults
    ]


@pytest.mark.parametrize("usable", QUICK_KINDS, indirect=True)
def test_an_output_is_not_overwritten_by_the_next_one(
    usable: tuple[Backend, ExecutionContext], export: Export
) -> None:
    backend, context = usable
    folder = export(backend, context, TABLE, EXACT)
    runner = load_payload(backend, context, TABLE, folder, TABLE.build(), EXACT)
    first = runner(*table_batch(3, 8))
    copied = to_array(first).copy()
    runner(*table_batch(3, 16))
    assert np.array_equal(to_array(first), copied)


@pytest.mark.parametrize("usable", QUICK_KINDS, indirect=True)
def test_the_weights_of_the_payload_are_used(
    usable: tuple[Backend, ExecutionContext], export: Export
) -> None:
    backend, context = usable
    folder, changed = export(backend, context, TABLE, EXACT), TABLE.build()
    for index, value in enumerate(named_tensors(changed).values(), start=1):
        if value.numel() > MAX_INLINED_NUMBERS:
            value.add_(0.1 * index)
    runner = load_payload(backend, context, TABLE, folder, changed, EXACT)
    assert max_difference(runner, TABLE, changed) < ERRORS["fp32"]
    assert max_difference(runner, TABLE, TABLE.build()) > 0.1


@pytest.mark.full
@ALL_FORMATS
@pytest.mark.parametrize("kind", sorted(WEIGHTLESS))
def test_a_payload_contains_no_weights(kind: str, export: Export, *, all_formats: bool) -> None:
    backend, context = find_usable(kind)
    for number_format, example in cases(backend, context, all_formats=all_formats):
        program = example.build()
        cast_program(program, TYPES[number_format[0]])
        weights = [
            value.contiguous()
            .view(torch.uint8)
            .numpy()
            .tobytes()[-64:]  # the padding row is 0 and comes first
            for value in program.parameters()
            if value.ndim > 1
        ]
        assert weights
        for path in export(backend, context, example, number_format).rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert not any(weight in content for weight in weights), path


LOAD_PAYLOADS = """
import faulthandler, json, signal, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from regauge.system import choices
from regauge.inference.backends import ExecutionContext, Payload, Shape, to_array
from regauge.models.io_spec import TensorSpec

faulthandler.enable()  # it gives signals a separate stack
request = json.loads(sys.argv[1])
inputs = [TensorSpec.model_validate_json(spec) for spec in request["inputs"]]
batch, out = load_file(request["batch"]), Path(request["batch"]).parent
for kind, device, folder in request["payloads"]:
    accelerator = choices.load("accelerators", device)()
    context = ExecutionContext(accelerator, 0, 2)
    weights = lambda: load_file(request["weights"])
    payload = Payload(Path(folder), inputs, [Shape(6, 8)], "fp32", weights, None)
    runners = [choices.load("backends", kind)().load(payload, context) for _ in range(2)]
    save_file({"output": torch.from_numpy(to_array(runners[0](*batch.values())))}, out / kind)
    while runners:  # the first one is destroyed first
        del runners[0]
signal.signal(signal.SIGTERM, lambda *_: None)
signal.raise_signal(signal.SIGTERM)
print(*(name for name in ("transformers", "openvino_telemetry") if sys.modules.get(name)))
"""


@pytest.mark.full
def test_a_payload_and_its_weights_are_enough_for_another_process(
    export: Export, tmp_path: Path
) -> None:
    """The process does not import transformers, sends no telemetry, and still handles signals."""
    plain, payloads = TEXT.build(), []
    for backend in (choices.load("backends", kind)() for kind in KINDS):
        cpu = Cpu()
        ready = (
            backend.is_ahead_of_time
            and backend.available().fitness
            and backend.obstacle(cpu) is None
        )
        if ready and backend.supported_formats(cpu):
            context = ExecutionContext(cpu, 0, 2)
            payloads.append((backend.kind, "cpu", str(export(backend, context, TEXT, EXACT))))
    inputs = dict(zip(("a", "b"), text_batch(4, 16), strict=True))
    write_tensors(tmp_path / "weights", named_tensors(plain))
    write_tensors(tmp_path / "batch", inputs)
    request = {
        "inputs": [spec.model_dump_json() for spec in TEXT.inputs],
        "payloads": payloads,
        "weights": str(tmp_path / "weights"),
        "batch": str(tmp_path / "batch"),
    }
    command = [sys.executable, "-c", LOAD_PAYLOADS, json.dumps(request)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert process.stdout.split() == []
    assert payloads
    expected = plain(*inputs.values())
    for kind, _, _ in payloads:
        output = load_file(tmp_path / kind)["output"]
        assert float((output - expected).abs().max()) < ERRORS["fp32"], kind


def test_required_features_are_features_of_the_machine(
    usable: tuple[Backend, ExecutionContext],
) -> None:
    backend, context = usable
    features = context.accelerator.features()
    assert backend.required_features(context, None) <= features
    try:
        required = backend.required_features(context, "x86-64-v3")
    except SettingsError:
        return
    assert not required or "avx2" in required


def test_settings_survive_the_run_file(usable: tuple[Backend, ExecutionContext]) -> None:
    backend, _ = usable
    saved = backend.model_dump(mode="json")
    assert saved["kind"] in KINDS
    assert config.parse_choice("backends", saved) == backend
    assert "torch" in backend.versions()


# int8


def two_layers(scale: float) -> nn.Module:
    """Return two linear layers for inputs whose first feature is multiplied by `scale`."""
    torch.manual_seed(0)
    program = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    program.requires_grad_(False)[0].weight[:, 0] /= scale  # noqa: FBT003 - the API of torch
    return program


def scaled_inputs(rows: int, scale: float) -> Tensor:
    inputs = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
    inputs[:, 0] *= scale
    return inputs


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_int8_is_accurate_if_features_have_different_scales(scale: float) -> None:
    plain = two_layers(scale)
    quantized = quantize_linear_layers(
        plain, Calibration(plain, [(scaled_inputs(200, scale),)], MAX_QUALITY_LOSS)
    )
    assert [type(layer) for layer in quantized] == [Int8Linear, nn.GELU, Int8Linear]
    assert named_tensors(plain).keys() <= named_tensors(quantized).keys()
    assert type(plain[0]) is nn.Linear
    inputs = scaled_inputs(50, scale)
    error = (quantized(inputs) - plain(inputs)).norm() / plain(inputs).norm()
    assert 0 < float(error) < INT8_ERROR
    nested = quantized(inputs.unflatten(0, (5, 10)))
    torch.testing.assert_close(nested.flatten(0, 1), quantized(inputs))


def test_an_inaccurate_layer_stays_unquantized() -> None:
    """In one row of a thousand, all features are a million times as large."""
    plain, inputs = two_layers(1.0), scaled_inputs(1000, 1.0)
    inputs[0] *= 1e6
    with pytest.raises(ValueError, match="no linear layer is accurate enough"):
        quantize_linear_layers(plain[:1], Calibration(plain[:1], [(inputs,)], MAX_QUALITY_LOSS))
    bounded = nn.Sequential(plain[0], nn.Tanh(), nn.Linear(32, 4))
    quantized = quantize_linear_layers(bounded, Calibration(bounded, [(inputs,)], MAX_QUALITY_LOSS))
    assert [type(layer) for layer in quantized] == [nn.Linear, nn.Tanh, Int8Linear]


def test_int8_needs_samples() -> None:
    with pytest.raises(ValueError, match="there is no sample"):
        quantize_linear_layers(two_layers(1.0), Calibration(two_layers(1.0), [], MAX_QUALITY_LOSS))


def test_one_plan_is_used_for_weights_of_lower_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, inputs = two_layers(1000.0), scaled_inputs(50, 1000.0)
    calibration = Calibration(plain, [(scaled_inputs(200, 1000.0),)], MAX_QUALITY_LOSS)
    quantize_linear_layers(plain, calibration)
    monkeypatch.setattr(quantize, "_build_plan", None)
    program = copy.deepcopy(plain)
    cast_program(program, torch.bfloat16)
    cast_program(program, torch.float32)
    quantized = quantize_linear_layers(program, calibration)
    assert [type(layer) for layer in quantized] == [Int8Linear, nn.GELU, Int8Linear]
    assert torch.equal(quantized[0].weight, program[0].weight)
    assert not torch.equal(quantized[0].weight, plain[0].weight)
    error = (quantized(inputs) - program(inputs)).norm() / program(inputs).norm()
    assert float(error) < INT8_ERROR
    with pytest.raises(TypeError):
        quantize_linear_layers(plain, calibration, max_weight=63)


def build_cpu(features: set[str], *precisions: Precision) -> Cpu:
    """Return a processor with these features, which prefers the first precision."""

    class OtherCpu(Cpu):
        kind = "cpu"

        def features(self) -> frozenset[str]:
            return frozenset({"x86_64", *features})

        def precisions(self) -> tuple[Precision, ...]:
            return precisions

    return OtherCpu()


def test_int8_is_refused_on_processors_whose_sums_could_overflow(tmp_path: Path) -> None:
    backend, _ = find_usable("openvino")
    adds_in_32_bits, adds_in_16_bits = (
        build_cpu({"avx512_vnni"}, "bf16", "fp32"),
        build_cpu({"avx2"}, "fp32", "bf16"),
    )
    exact, inexact = (ExecutionContext(cpu, 0, 2) for cpu in (adds_in_32_bits, adds_in_16_bits))
    for order, accelerator in (
        (["none", "int8"], inexact.accelerator),
        (["int8", "none"], exact.accelerator),
    ):
        formats = backend.supported_formats(accelerator)
        assert list(dict.fromkeys(quantization for _, quantization in formats)) == order
        usable = list(dict.fromkeys(precision for precision, _ in formats))
        assert usable == [name for name in accelerator.precisions() if name in usable]
        assert "fp32" in usable
    program = TABLE.build()
    calibration = Calibration(program, [table_batch(64, 8)], MAX_QUALITY_LOSS)
    job = CompileJob(program, TABLE.inputs, SHAPES, "fp32", "int8", None, calibration)
    for name, context in (("exact", exact), ("inexact", inexact)):
        (tmp_path / name).mkdir()
        backend.export(job, context, tmp_path / name)
    arguments = backend, inexact, TABLE
    assert load_payload(*arguments, tmp_path / "inexact", program, EXACT).num_graphs() == 0
    with pytest.raises(PreflightError, match=r"32-bit integer sums.*export it again"):
        load_payload(*arguments, tmp_path / "exact", program, EXACT)
    runner = load_payload(backend, exact, TABLE, tmp_path / "exact", program, EXACT)
    assert runner(*table_batch(3, 8)).shape == (3, 2)
