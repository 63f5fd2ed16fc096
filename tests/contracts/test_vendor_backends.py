"""Backends with one graph per shape: XLA if it is installed, AWS and Intel against stand-ins.

The stand-ins compute the results of the vendor's functions with torch, reject the same arguments,
and record all calls. They check that a backend uses the vendor's documented names, order and
shapes. They do not prove that it works on the device, and no result enters the support table.
"""

from __future__ import annotations

import copy
import importlib.machinery
import json
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regauge import accelerators, config
from regauge.accelerators import _environment
from regauge.inference.backends import (
    Backend,
    Calibration,
    CompileJob,
    ExecutionContext,
    Payload,
    Shape,
    check_usable,
    list_usable,
)
from regauge.inference.backends import neuron as neuron_backend
from regauge.inference.backends._runners import StaticShapeRunner
from regauge.models.dropout import DropoutKeys
from regauge.models.inference_modules import TextProgram, cast_program, named_tensors
from regauge.models.io_spec import LENGTH, ROWS, InputSpec, TensorSpec, program_inputs
from regauge.models.modules import Encoder
from regauge.system import choices
from regauge.system.errors import DataError, SettingsError

# torch 2.14 deprecates what AWS's libraries need; they do not support that version.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.(save|load|trace). is deprecated")
KINDS = ("xla", "neuron", "gaudi")
PACKAGES = {"xla": "torch_xla", "neuron": "torch_neuronx", "gaudi": "habana_frameworks"}
INPUTS = program_inputs(InputSpec())
SHAPES = (Shape(8, 8), Shape(4, 16), Shape(2, 24))
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ERRORS = {"fp32": 1e-6, "bf16": 1e-2}
"""Largest difference from eager in the same type, as a share of the largest value."""
Calls = list[tuple[Any, ...]]
Make = Callable[..., Payload]
VOCABULARY = 60


class Tied(nn.Module):
    """A model of tokens whose embedding and output weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        real = torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]
        summed = (self.embed(tokens) * real[:, :, None]).sum(1)
        return self.head(torch.tanh(summed))


def bert(**changes: Any) -> Any:
    from transformers import BertConfig, BertModel

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    return BertModel(BertConfig(**{**_widths(), **sizes, **changes}, attn_implementation="sdpa"))


def distilbert() -> Any:
    from transformers import DistilBertConfig, DistilBertModel

    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
    return DistilBertModel(DistilBertConfig(vocab_size=VOCABULARY, **sizes))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaModel(LlamaConfig(**_widths(), **sizes, pad_token_id=0))


def _widths() -> dict[str, int]:
    return {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}


def texts(model: nn.Module) -> nn.Module:
    return TextProgram(Encoder(model, DropoutKeys()), "vectors").eval()


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().eval().requires_grad_(False)  # noqa: FBT003 - the API of torch


def batch(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (rows, length), generator=draw, dtype=torch.int32)
    lengths = torch.randint(1, length + 1, (rows,), generator=draw, dtype=torch.int32)
    return tokens, lengths


def payload(program: nn.Module, folder: Path, precision: Any = "fp32") -> Payload:
    return Payload(
        folder, INPUTS, SHAPES, precision, lambda: named_tensors(program), lambda: program
    )


def job(program: nn.Module) -> CompileJob:
    return CompileJob(program, INPUTS, SHAPES, "fp32", "none", None, Calibration(program, (), 0.0))


class HostContext(ExecutionContext):
    """A context of a stand-in accelerator, whose tensors are on the CPU."""

    device = torch.device("cpu")


def parse(room: str, kind: str, **table: Any) -> Any:
    return config.parse_choice(room, {"kind": kind, **table})


def max_difference(runner: Callable[..., Tensor], program: nn.Module) -> float:
    """Return the largest difference, relative to the largest value of a batch.

    The batches of each length are full, have one row less, and have one row.
    """
    largest = 0.0
    for shape in SHAPES:
        for rows in {shape.rows, shape.rows - 1, 1}:
            inputs = batch(rows, shape.length, rows)
            with torch.no_grad():
                expected = program(*inputs)
            output = runner(*inputs)
            assert output.shape == expected.shape
            assert output.device.type == "cpu"
            error = (output.float() - expected.float()).abs().max() / expected.abs().max()
            largest = max(largest, float(error))
    return largest


# Every backend


@pytest.mark.parametrize("kind", KINDS)
def test_availability_names_the_vendor_s_package_and_imports_nothing(kind: str) -> None:
    choice: type[Backend] = choices.load("backends", kind)
    before = set(sys.modules)
    availability = choice.available()
    assert PACKAGES[kind] in availability.reason
    imported = {name.split(".")[0] for name in set(sys.modules) - before}
    assert not imported & {"torch_xla", "torch_neuronx", "torch_neuron", "habana_frameworks"}
    backend = choice()
    assert not backend.has_dynamic_shapes
    assert config.parse_choice("backends", backend.model_dump()) == backend
    if availability.fitness == 0:
        with pytest.raises(SettingsError, match=f"backend '{kind}' is not usable here"):
            check_usable(backend, accelerators.choose()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_vendor_backends_support_neither_the_cpu_nor_a_named_instruction_set(kind: str) -> None:
    backend, cpu = parse("backends", kind), parse("accelerators", "cpu")
    assert "not for cpu" in backend.obstacle(cpu)
    assert kind not in [backend.kind for backend in list_usable(cpu)]
    with pytest.raises(SettingsError, match="cannot compile for a named instruction set"):
        backend.required_features(ExecutionContext(cpu, 0, 1), "x86-64-v3")


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("neuron", {"cores": 0}),
        ("neuron", {"parallelism": "heads"}),
        ("gaudi", {"tensor_cache": "sometimes"}),
    ],
)
def test_settings_are_strict(kind: str, table: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        parse("backends", kind, **table)


# Batches in declared shapes


def test_a_batch_is_computed_in_the_smallest_shape_that_holds_it() -> None:
    computed: list[tuple[Shape, list[int], int]] = []

    def compute(shape: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
        computed.append((shape, list(inputs[0].shape), int(inputs[1].sum())))
        return inputs[1] * 10

    shapes = [Shape(8, 16), Shape(2, 16), Shape(8, 8)]
    runner = StaticShapeRunner(INPUTS, shapes, compute, lambda: 3).warm_up()
    assert [shape for shape, *_ in computed] == [Shape(2, 16), Shape(8, 8), Shape(8, 16)]
    tokens, lengths = torch.ones(3, 16, dtype=torch.int32), torch.tensor([5, 6, 7])
    assert runner(tokens, lengths).tolist() == [50, 60, 70]
    assert computed[-1] == (Shape(8, 16), [8, 16], 18)
    runner(tokens[:2], lengths[:2])
    assert computed[-1] == (Shape(2, 16), [2, 16], 11)
    assert runner.num_graphs() == 3


def test_a_batch_without_a_graph_is_refused() -> None:
    runner = StaticShapeRunner(INPUTS, SHAPES, lambda _, inputs: inputs[1], lambda: 0)
    for rows, length in ((9, 8), (1, 9)):
        with pytest.raises(DataError, match=f"no graph for {rows} rows of {length} tokens"):
            runner(*batch(rows, length))


def test_inputs_of_a_custom_module_are_padded_along_their_rows() -> None:
    inputs = (TensorSpec(name="table", shape=(3, 3)), TensorSpec(name="values", shape=(2, ROWS)))
    runner = StaticShapeRunner(
        inputs, [Shape(4, 1)], lambda _, values: values[1].T @ torch.ones(2), lambda: 0
    )
    assert runner(torch.eye(3), torch.ones(2, 3)).tolist() == [2, 2, 2]
    by_length = StaticShapeRunner(
        (TensorSpec(name="x", shape=(2, LENGTH)),), SHAPES, lambda _, values: values[0], int
    )
    assert by_length(torch.ones(2, 16)).shape == (2, 16)


# XLA, on the CPU


@pytest.fixture
def xla() -> ExecutionContext:
    availability = choices.load("backends", "xla").available()
    if availability.fitness == 0:
        pytest.skip(f"not proved here: xla: {availability.reason}")
    accelerator = parse("accelerators", "xla")
    return ExecutionContext(accelerator, 0, 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_xla_equals_eager_with_one_graph_per_shape(
    precision: Any, xla: ExecutionContext, tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    program = build(lambda: texts(bert()))
    cast_program(program, TYPES[precision])
    plain = copy.deepcopy(program)
    backend = parse("backends", "xla")
    assert backend.obstacle(xla.accelerator) is None
    assert backend.required_features(xla, None) == frozenset()
    backend.export(job(program), xla, tmp_path)
    assert not list(tmp_path.iterdir())
    fallbacks = xla.accelerator.counters()["cpu_fallbacks"]
    runner = backend.load(payload(program, tmp_path, precision), xla)
    assert runner.num_graphs() == len(SHAPES)
    error = max_difference(runner, plain)
    figure(f"xla against eager, {precision}", error)
    assert error < ERRORS[precision]
    assert runner.num_graphs() == len(SHAPES)
    assert xla.accelerator.counters()["cpu_fallbacks"] == fallbacks


def test_xla_keeps_tied_weights_tied(xla: ExecutionContext, tmp_path: Path) -> None:
    program: Any = build(Tied)
    plain = copy.deepcopy(program)
    runner = parse("backends", "xla").load(payload(program, tmp_path), xla)
    assert program.head.weight is program.embed.weight
    assert program.head.weight.device.type == "xla"
    assert max_difference(runner, plain) < ERRORS["fp32"]


CACHED = """
import sys, torch
from pathlib import Path
from regauge import config
from regauge.inference.backends import ExecutionContext, Payload, Shape
from regauge.models.io_spec import TensorSpec
cache = sys.argv[1]
accelerator = config.parse_choice("accelerators", "xla")
context = ExecutionContext(accelerator, 0, 1)
inputs = (TensorSpec(name="x", shape=("rows", 4)),)
def load(cache, rows):
    backend = config.parse_choice("backends", {"kind": "xla", "cache": cache})
    shapes = [Shape(count, 1) for count in rows]
    build = lambda: torch.nn.Linear(4, 3)
    return backend.load(Payload(Path(), inputs, shapes, "fp32", dict, build), context)
first, second = load(cache, (2, 3)), load(cache, (4,))
try:
    load(cache + "-other", (5,))
except Exception as error:
    print(first.num_graphs(), accelerator.graph_cache_counts(), type(error).__name__, error)
"""


def test_xla_graphs_are_stored_in_the_cache_folder(xla: ExecutionContext, tmp_path: Path) -> None:
    """XLA's CPU client writes each graph, but does not read it in another process."""
    del xla
    cache = tmp_path / "graphs"
    for _ in range(2):
        command = [sys.executable, "-c", CACHED, str(cache)]
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        last = process.stdout.splitlines()[-1]
        assert last.startswith("3 (0, 3) SettingsError cache = ")
        assert "has no effect: this process has already compiled graphs" in last
        assert len(list(cache.iterdir())) == 3


# Stand-ins


class StandIn(ModuleType):
    """A stand-in for a vendor's module that is not installed."""

    def __init__(self, name: str, **contents: Any) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []
        vars(self).update(contents)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install_stand_in(name: str, **contents: Any) -> None:
        module = StandIn(name, **contents)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            monkeypatch.setattr(sys.modules[parent], last, module, raising=False)

    return install_stand_in


def trace_program(program: Any, inputs: tuple[Tensor, ...]) -> Any:
    """Return a program as TorchScript, the result of all of AWS's tracers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer reads deprecated attributes of transformers
        return torch.jit.trace(copy.deepcopy(program), inputs, check_trace=False)


# Intel


@pytest.fixture
def gaudi() -> Callable[[str], ExecutionContext]:
    return lambda mode: HostContext(parse("accelerators", "gaudi", mode=mode), 0, 1)


@pytest.mark.parametrize(("tensor_cache", "is_disabled"), [(False, True), (True, False)])
def test_gaudi_records_and_replays_a_graph_for_each_shape(
    install: Callable[..., None],
    gaudi: Callable[[str], ExecutionContext],
    tmp_path: Path,
    *,
    tensor_cache: bool,
    is_disabled: bool,
) -> None:
    calls: Calls = []
    recorded: dict[torch.Size, Tensor] = {}

    def wrap_in_hpu_graph(module: nn.Module, **options: Any) -> Callable[..., Tensor]:
        calls.append(("wrap_in_hpu_graph", options))

        def replay(*inputs: Tensor) -> Tensor:
            shape = inputs[0].shape
            output = module(*inputs)
            if shape not in recorded:
                assert len(recorded) < options["max_graphs"]
                recorded[shape] = output.clone()
            return recorded[shape].copy_(output)  # at the same address every time

        return replay

    root = "habana_frameworks"
    install(root)
    install(f"{root}.torch")
    install(f"{root}.torch.hpu", wrap_in_hpu_graph=wrap_in_hpu_graph)
    program = build(lambda: texts(bert()))
    plain, context = copy.deepcopy(program), gaudi("lazy")
    backend = parse("backends", "gaudi", tensor_cache=tensor_cache)
    assert backend.obstacle(context.accelerator) is None
    runner = backend.load(payload(program, tmp_path), context)
    assert calls == [("wrap_in_hpu_graph", {"disable_tensor_cache": is_disabled, "max_graphs": 3})]
    assert [tuple(shape) for shape in recorded] == sorted(SHAPES)
    assert runner.num_graphs() == len(SHAPES)
    assert max_difference(runner, plain) == 0
    assert len(recorded) == runner.num_graphs() == len(SHAPES)
    first = runner(*batch(8, 8, 1))
    copied = first.clone()
    runner(*batch(8, 8, 2))
    assert first.equal(copied)


def test_gaudi_compiles_each_shape_in_eager_mode(
    gaudi: Callable[[str], ExecutionContext], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._dynamo.backends import registry as compilers

    shapes: list[tuple[int, ...]] = []

    def hpu_backend(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        shapes.extend(tuple(value.shape) for value in inputs if value.dtype == torch.int32)
        return graph.forward

    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    monkeypatch.setitem(compilers._BACKENDS, "hpu_backend", None)
    monkeypatch.setitem(compilers._COMPILER_FNS, "hpu_backend", hpu_backend)
    torch._dynamo.reset()
    program = build(Tied)
    plain = copy.deepcopy(program)
    runner = parse("backends", "gaudi").load(payload(program, tmp_path), gaudi("eager"))
    assert sorted(shapes) == sorted([*SHAPES, *((rows,) for rows, _ in SHAPES)])
    assert runner.num_graphs() == len(SHAPES)
    assert max_difference(runner, plain) < ERRORS["fp32"]
    assert runner.num_graphs() == len(SHAPES)
    torch._dynamo.reset()


# AWS


@pytest.fixture
def neuron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ExecutionContext]:
    """Return a function that builds a context of a device from settings alone."""
    monkeypatch.setattr("regauge.accelerators._xla.version", lambda _: "2.9.0")
    monkeypatch.setattr("regauge.accelerators.neuron.PRODUCT", tmp_path / "none")
    return lambda **table: HostContext(parse("accelerators", "neuron", **table), 0, 1)


@pytest.fixture
def trn1(neuron: Callable[..., ExecutionContext]) -> ExecutionContext:
    return neuron(target="trn1")


class NeuronX:
    """A stand-in for the functions of torch_neuronx for traced programs."""

    def __init__(self) -> None:
        self.calls: Calls = []

    def trace(
        self,
        func: nn.Module,
        example_inputs: tuple[Tensor, ...],
        *,
        compiler_args: list[str],
        inline_weights_to_neff: bool,
    ) -> Any:
        shapes = [tuple(value.shape) for value in example_inputs]
        self.calls.append(("trace", shapes[0], " ".join(compiler_args), inline_weights_to_neff))
        graph = trace_program(func, example_inputs)
        if not inline_weights_to_neff:  # the weights are replaced when the graph is loaded
            for weight in graph.parameters():
                weight.zero_()
        return graph

    def lazy_load(self, trace: Any) -> None:
        assert isinstance(trace, torch.jit.ScriptModule)
        self.calls.append(("lazy_load",))

    def replace_weights(self, neuron_model: Any, weights: dict[str, Tensor]) -> None:
        self.calls.append(("replace_weights",))
        missing, unexpected = neuron_model.load_state_dict(weights, strict=False)
        assert not unexpected
        assert not {*missing} & {name for name, _ in neuron_model.named_parameters()}

    def move_trace_to_device(self, trace: Any, device_id: int) -> None:
        assert isinstance(trace, torch.jit.ScriptModule)
        self.calls.append(("move_trace_to_device", device_id))

    def DataParallel(  # noqa: N802 - the name of AWS
        self, model: Any, device_ids: list[int], dim: int, *, set_dynamic_batching: bool = False
    ) -> Any:
        self.calls.append(("DataParallel", device_ids, dim, set_dynamic_batching))
        return Replicas(model, len(device_ids), self.calls)


class Replicas:
    """A graph on several cores, each of which computes an equal part of the rows."""

    def __init__(self, model: Any, cores: int, calls: Calls) -> None:
        self.model, self.cores, self.calls = model, cores, calls

    def __call__(self, *inputs: Tensor) -> Tensor:
        parts = zip(*(value.chunk(self.cores) for value in inputs), strict=True)
        outputs = [self.model(*part) for part in parts]
        assert len(outputs) == self.cores
        assert len({len(output) for output in outputs}) == 1
        return torch.cat(outputs)

    def disable_dynamic_batching(self) -> None:
        self.calls.append(("disable_dynamic_batching",))


@pytest.fixture
def neuronx(install: Callable[..., None]) -> NeuronX:
    neuronx = NeuronX()
    names = ("trace", "lazy_load", "replace_weights", "move_trace_to_device", "DataParallel")
    install("torch_neuronx", **{name: getattr(neuronx, name) for name in names})
    return neuronx


FLAGS = "--target trn1 --model-type transformer --auto-cast none --optlevel 2"
SCRIPT = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@SCRIPT
@pytest.mark.parametrize("make", [Tied, lambda: texts(bert())])
def test_neuron_traces_every_shape_and_replaces_the_weights_at_load(
    make: Callable[[], nn.Module], neuronx: NeuronX, trn1: ExecutionContext, tmp_path: Path
) -> None:
    backend = parse("backends", "neuron")
    assert parse("backends", "xla").obstacle(trn1.accelerator) is None
    assert backend.is_ahead_of_time
    assert backend.obstacle(trn1.accelerator) is None
    assert backend.required_features(trn1, None) == {"neuron", "trn1"}
    program, other = build(make), build(make, 1)
    backend.export(job(program), trn1, tmp_path)
    assert neuronx.calls == [("trace", tuple(shape), FLAGS, False) for shape in SHAPES]
    assert {path.name for path in tmp_path.iterdir()} == {"8x8.pt", "4x16.pt", "2x24.pt"}
    neuronx.calls.clear()
    runner = backend.load(payload(other, tmp_path), trn1)
    assert neuronx.calls == [("replace_weights",), ("move_trace_to_device", 0)] * len(SHAPES)
    assert max_difference(runner, other) < ERRORS["fp32"]
    assert max_difference(runner, program) > 0.01
    assert runner.num_graphs() == 0


@SCRIPT
def test_neuron_can_inline_the_weights(
    neuronx: NeuronX, trn1: ExecutionContext, tmp_path: Path
) -> None:
    backend = parse("backends", "neuron", inline_weights=True)
    program, other = build(Tied), build(Tied, 1)
    backend.export(job(program), trn1, tmp_path)
    assert [call[3] for call in neuronx.calls] == [True] * len(SHAPES)
    neuronx.calls.clear()
    runner = backend.load(payload(other, tmp_path), trn1)
    assert neuronx.calls == [("move_trace_to_device", 0)] * len(SHAPES)
    assert max_difference(runner, program) < ERRORS["fp32"]


@SCRIPT
def test_neuron_cores_share_rows(neuronx: NeuronX, trn1: ExecutionContext, tmp_path: Path) -> None:
    backend = parse("backends", "neuron", cores=2)
    program = build(lambda: texts(bert()))
    backend.export(job(program), trn1, tmp_path)
    traced = [("trace", (rows // 2, length), FLAGS, False) for rows, length in SHAPES]
    assert neuronx.calls == [call for trace in traced for call in (trace, ("lazy_load",))]
    neuronx.calls.clear()
    runner = backend.load(payload(program, tmp_path), trn1)
    replicated = ("DataParallel", [0, 1], 0, False)
    assert neuronx.calls == [("replace_weights",), replicated] * len(SHAPES)
    assert max_difference(runner, program) < ERRORS["fp32"]


def test_neuron_refuses_indivisible_rows_and_unsupported_parallelism(
    neuronx: NeuronX, trn1: ExecutionContext, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="cores = 4 does not divide 2 rows of 24 tokens"):
        parse("backends", "neuron", cores=4).export(job(build(Tied)), trn1, tmp_path)
    assert not neuronx.calls
    assert "only Inf1 supports pipeline parallelism" in parse(
        "backends", "neuron", parallelism="pipeline"
    ).obstacle(trn1.accelerator)
    tensor_parallel = parse("backends", "neuron", parallelism="tensor")
    assert "needs neuronx_distributed, which is not installed" in tensor_parallel.obstacle(
        trn1.accelerator
    )


def test_the_neuron_compiler_gets_the_settings(trn1: ExecutionContext) -> None:
    backend = parse(
        "backends",
        "neuron",
        auto_cast="matmult",
        auto_cast_type="fp16",
        optlevel=3,
        model_type="generic",
        compiler_flags=("--enable-fast-loading-neuron-binaries",),
    )
    assert " ".join(backend._build_options(trn1.accelerator).flags) == (
        "--target trn1 --model-type generic --auto-cast matmult --auto-cast-type fp16 "
        "--optlevel 3 --enable-fast-loading-neuron-binaries"
    )


def test_an_unknown_generation_is_refused_before_compilation(
    neuronx: NeuronX, neuron: Callable[..., ExecutionContext], tmp_path: Path
) -> None:
    context, backend = neuron(), parse("backends", "neuron")
    message = re.escape("set accelerator.target to one of inf2, trn1, trn2")
    with pytest.raises(SettingsError, match=message):
        backend.export(job(build(Tied)), context, tmp_path)
    with pytest.raises(SettingsError, match=message):
        backend.required_features(context, None)
    assert not neuronx.calls


# AWS: tensor parallelism


class CoreOfThread(threading.local):
    """The core that a thread simulates while a program runs on all cores."""

    rank = 0


class Distributed:
    """A stand-in for neuronx_distributed with its compiler and its parallel layers."""

    def __init__(self, install: Callable[..., None]) -> None:
        self.calls: Calls = []
        self.size = 0
        self.core = CoreOfThread()
        self.saved: dict[str, nn.Module] = {}
        owner = self

        class ColumnParallelLinear(nn.Module):
            def __init__(
                self,
                input_size: int,
                output_size: int,
                bias: bool = True,  # noqa: FBT001, FBT002 - the API of AWS
                gather_output: bool = True,  # noqa: FBT001, FBT002 - the API of AWS
                dtype: torch.dtype = torch.float32,
            ) -> None:
                super().__init__()
                assert owner.size
                assert not gather_output
                size = output_size // owner.size
                self.weight = nn.Parameter(torch.full((size, input_size), torch.nan, dtype=dtype))
                empty = torch.full((size,), torch.nan, dtype=dtype)
                self.bias = nn.Parameter(empty) if bias else None
                self.axes = {"weight": 0, "bias": 0}

            def forward(self, value: Tensor) -> Tensor:
                return nn.functional.linear(value, self.weight, self.bias)

        class RowParallelLinear(nn.Module):
            def __init__(
                self,
                input_size: int,
                output_size: int,
                bias: bool = True,  # noqa: FBT001, FBT002 - the API of AWS
                input_is_parallel: bool = False,  # noqa: FBT001, FBT002 - the API of AWS
                dtype: torch.dtype = torch.float32,
            ) -> None:
                super().__init__()
                assert owner.size
                assert input_is_parallel
                size = input_size // owner.size
                self.weight = nn.Parameter(torch.full((output_size, size), torch.nan, dtype=dtype))
                empty = torch.full((output_size,), torch.nan, dtype=dtype)
                self.bias = nn.Parameter(empty) if bias else None
                self.axes = {"weight": 1}

            def forward(self, value: Tensor) -> Tensor:
                total = owner.all_reduce(nn.functional.linear(value, self.weight))
                return total if self.bias is None else total + self.bias

        @contextmanager
        def world(*, world_size: int, tensor_model_parallel_size: int) -> Iterator[None]:
            assert world_size == tensor_model_parallel_size
            self.calls.append(("NxDParallelState", world_size))
            self.size = world_size
            yield
            self.size = 0

        self.columns, self.rows = ColumnParallelLinear, RowParallelLinear
        install(
            "neuronx_distributed",
            ModelBuilder=lambda model: Builder(self, model),
            NxDModel=StandIn("NxDModel", load=lambda path: CompiledProgram(self, path)),
            NxDParallelState=world,
            shard_checkpoint=self.shard_checkpoint,
        )
        layers = {"ColumnParallelLinear": self.columns, "RowParallelLinear": self.rows}
        install("neuronx_distributed.parallel_layers", **layers)
        install("neuronx_distributed.utils")
        install("neuronx_distributed.utils.model_utils", init_on_device=torch.device)

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of a value over the cores, in the order of the cores."""
        self.parts[self.core.rank] = part
        self.barrier.wait()
        total = torch.stack(self.parts).sum(0)
        self.barrier.wait()
        return total

    def shard_checkpoint(
        self, checkpoint: dict[str, Tensor], model: nn.Module
    ) -> list[dict[str, Tensor]]:
        """Return the shard of the weights for each core, as the parallel layers need it."""
        shards: list[dict[str, Tensor]] = [dict(checkpoint) for _ in range(self.size)]
        on_meta = 0
        for name, layer in model.named_modules():
            if isinstance(layer, self.columns | self.rows):
                on_meta += layer.weight.is_meta
                for kind, axis in layer.axes.items():
                    weight = checkpoint.get(f"{name}.{kind}")
                    if weight is not None:
                        parts = weight.chunk(self.size, axis)
                        for rank, part in enumerate(parts):
                            shards[rank][f"{name}.{kind}"] = part
        self.calls.append(("shard_checkpoint", on_meta))
        return shards

    def run_on_all_cores(self, models: list[nn.Module], inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the output of each core; all cores compute at the same time."""
        self.barrier = threading.Barrier(len(models), timeout=60)
        self.parts = [torch.empty(0)] * len(models)
        outputs = [torch.empty(0)] * len(models)

        def compute(rank: int) -> None:
            self.core.rank = rank
            with torch.no_grad():
                outputs[rank] = models[rank](*inputs)

        threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(len(models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outputs


class Builder:
    """Collects the shapes of a model and compiles them into one program."""

    def __init__(self, owner: Distributed, model: nn.Module) -> None:
        self.owner, self.model = owner, model
        self.tags: dict[str, list[int]] = {}

    def trace(self, *, args: tuple[Tensor, ...], tag: str) -> Builder:
        assert self.owner.size
        self.owner.calls.append(("trace", tag, tuple(args[0].shape)))
        self.tags[tag] = list(args[0].shape)
        return self

    def compile(self, *, compiler_workdir: str, compiler_args: str) -> Builder:
        assert Path(compiler_workdir).is_dir()
        self.owner.calls.append(("compile", compiler_args))
        return self

    def save(self, path: str) -> None:
        """Write the shapes; the graphs, which have no weights, stay in memory."""
        Path(path).write_text(json.dumps(self.tags))
        self.owner.saved[path] = self.model
        self.owner.calls.append(("save",))


class CompiledProgram:
    """A compiled program that was loaded."""

    def __init__(self, owner: Distributed, path: str) -> None:
        self.owner, self.is_ready = owner, False
        self.tags = json.loads(Path(path).read_text())
        self.model = owner.saved[path]
        owner.calls.append(("load",))

    def set_weights(self, parts: list[dict[str, Tensor]]) -> None:
        assert not self.is_ready
        self.models = []
        for part in parts:
            model = copy.deepcopy(self.model)
            model.load_state_dict(part, assign=True)
            self.models.append(model)
        self.owner.calls.append(("set_weights", len(parts)))

    def to_neuron(self) -> None:
        self.is_ready = True
        self.owner.calls.append(("to_neuron",))

    def __call__(self, *inputs: Tensor, model_name: str) -> Tensor:
        assert self.is_ready
        assert list(inputs[0].shape) == self.tags[model_name]
        return self.owner.run_on_all_cores(self.models, inputs)[0]


@pytest.fixture
def neuronx_distributed(install: Callable[..., None], neuronx: NeuronX) -> Distributed:
    del neuronx
    return Distributed(install)


@pytest.mark.parametrize("make", [bert, distilbert, llama])
def test_neuron_cores_share_weights(
    make: Callable[[], Any],
    neuronx_distributed: Distributed,
    trn1: ExecutionContext,
    tmp_path: Path,
) -> None:
    backend = parse("backends", "neuron", cores=2, parallelism="tensor")
    assert backend.obstacle(trn1.accelerator) is None
    program = build(lambda: texts(make()))
    plain = copy.deepcopy(program)
    backend.export(job(program), trn1, tmp_path)
    traced = [("trace", f"{rows}x{length}", (rows, length)) for rows, length in SHAPES]
    assert neuronx_distributed.calls == [
        ("NxDParallelState", 2),
        *traced,
        ("compile", FLAGS),
        ("save",),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["program.pt"]
    assert all(map(torch.equal, program.parameters(), plain.parameters()))
    neuronx_distributed.calls.clear()
    runner = backend.load(payload(program, tmp_path), trn1)
    layers = {bert: 12, distilbert: 12, llama: 14}[make]
    assert neuronx_distributed.calls == [
        ("load",),
        ("NxDParallelState", 2),
        ("shard_checkpoint", layers),
        ("set_weights", 2),
        ("to_neuron",),
    ]
    assert max_difference(runner, plain) < ERRORS["fp32"]


@pytest.mark.parametrize(
    ("cores", "make", "message"),
    [
        (3, lambda: texts(bert()), r"cores = 3 does not divide 4 heads \(num_attention_heads\)"),
        (4, lambda: texts(llama()), r"cores = 4 does not divide 2 heads \(num_key_value_heads\)"),
        (4, lambda: texts(bert(intermediate_size=66)), "cores = 4 does not divide 66 features of"),
        (2, Tied, "Tied has no layers that tensor parallelism can split"),
    ],
)
def test_an_indivisible_program_is_refused(
    cores: int,
    make: Callable[[], nn.Module],
    message: str,
    neuronx_distributed: Distributed,
    trn1: ExecutionContext,
    tmp_path: Path,
) -> None:
    del neuronx_distributed
    backend = parse("backends", "neuron", cores=cores, parallelism="tensor")
    with pytest.raises(SettingsError, match=message):
        backend.export(job(build(make)), trn1, tmp_path)


# AWS: Inf1, the first generation


@pytest.fixture
def inf1_calls(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = []

    def trace(
        model: nn.Module, example_inputs: tuple[Tensor, ...], *, compiler_args: list[str]
    ) -> Any:
        calls.append(("trace", tuple(example_inputs[0].shape), " ".join(compiler_args)))
        return trace_program(model, example_inputs)

    def data_parallel(model: Any, device_ids: list[int], dim: int) -> Replicas:
        calls.append(("DataParallel", device_ids, dim))
        return Replicas(model, len(device_ids), calls)

    monkeypatch.delitem(sys.modules, "torch_neuronx", raising=False)
    install("torch_neuron", trace=trace, DataParallel=data_parallel)
    return calls


CPU = ExecutionContext(parse("accelerators", "cpu"), 0, 1)


@SCRIPT
def test_inf1_splits_a_program_into_a_pipeline(inf1_calls: Calls, tmp_path: Path) -> None:
    backend = parse("backends", "neuron", cores=4, parallelism="pipeline")
    assert backend.obstacle(CPU.accelerator) is None
    assert backend.required_features(CPU, None) == {"cpu"}
    assert backend.supported_formats(CPU.accelerator) == (("fp32", "none"),)
    program = build(Tied)
    backend.export(job(program), CPU, tmp_path)
    flags = "--fast-math none --neuroncore-pipeline-cores 4"
    assert inf1_calls == [("trace", tuple(shape), flags) for shape in SHAPES]
    inf1_calls.clear()
    runner = backend.load(payload(program, tmp_path), CPU)
    assert max_difference(runner, program) < ERRORS["fp32"]
    assert not inf1_calls


@SCRIPT
def test_inf1_cores_share_rows(inf1_calls: Calls, tmp_path: Path) -> None:
    backend = parse("backends", "neuron", cores=2, auto_cast="matmult")
    program = build(Tied)
    backend.export(job(program), CPU, tmp_path)
    flags = "--fast-math fp32-cast-matmult-bf16"
    assert inf1_calls == [("trace", (rows // 2, length), flags) for rows, length in SHAPES]
    inf1_calls.clear()
    runner = backend.load(payload(program, tmp_path), CPU)
    replicated = [("DataParallel", [0, 1], 0), ("disable_dynamic_batching",)]
    assert inf1_calls == replicated * len(SHAPES)
    assert max_difference(runner, program) < ERRORS["fp32"]
    assert "Inf1 does not support tensor parallelism" in parse(
        "backends", "neuron", parallelism="tensor"
    ).obstacle(CPU.accelerator)
    unsupported = parse("backends", "neuron", auto_cast="all", auto_cast_type="tf32")
    with pytest.raises(SettingsError, match="Inf1 does not support auto_cast_type = 'tf32'"):
        unsupported.export(job(program), CPU, tmp_path)


def test_inf1_reports_the_needed_torch_and_a_missing_device(
    inf1_calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del inf1_calls
    available = neuron_backend.NeuronBackend.available
    absent = accelerators.Availability(0, "torch_neuron is not installed as a package")
    assert available() == absent
    versions = {"torch": "2.13.0+cpu", "torch_neuron": "1.13.1.2.9"}
    for module in (neuron_backend, _environment):
        monkeypatch.setattr(module, "version", versions.__getitem__)
    problem = "torch_neuron 1.13.1.2.9 needs torch 1.13; torch 2.13.0+cpu is installed"
    assert available() == accelerators.Availability(0, problem)
    versions["torch"] = "1.13.1"
    monkeypatch.setattr(neuron_backend, "DEVICE", tmp_path / "none")
    assert "shows no device" in available().reason
    monkeypatch.setattr(neuron_backend, "DEVICE", tmp_path)
    assert available().fitness > 0
