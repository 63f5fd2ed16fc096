"""Backends that make a graph for each shape: XLA where it is, AWS's and Intel's against stand-ins.

The stand-ins compute with torch what the vendor's functions would, refuse what those refuse, and
write down what is asked of them. This holds a backend to the vendor's documented names, order and
shapes. It is no proof that it works on the device, and nothing here enters the support table.
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

from regauge import accelerators, choices, config
from regauge.backends import Backend, Calibration, Job, Payload, Shape, Site, require, usable_for
from regauge.backends import neuron as neuron_backend
from regauge.backends._static import Static
from regauge.errors import DataError, SettingsError
from regauge.models.dropout import DropoutKeys
from regauge.models.inference_modules import TextProgram, cast, tensors
from regauge.models.io_spec import LENGTH, ROWS, Fields, Input, of_texts
from regauge.models.modules import Encoder

KINDS = ("xla", "neuron", "gaudi")
PACKAGES = {"xla": "torch_xla", "neuron": "torch_neuronx", "gaudi": "habana_frameworks"}
INPUTS = of_texts(Fields())
SHAPES = (Shape(8, 8), Shape(4, 16), Shape(2, 24))
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ERRORS = {"fp32": 1e-6, "bf16": 1e-2}
"""Largest difference from eager in the same type, as a share of the largest value."""
Said = list[tuple[Any, ...]]
Make = Callable[..., Payload]
VOCABULARY = 60


class Tied(nn.Module):
    """Words in, the scores of words out, by one weight with two names."""

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


def drawn(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().eval().requires_grad_(False)  # noqa: FBT003 - torch's own


def batch(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (rows, length), generator=draw, dtype=torch.int32)
    lengths = torch.randint(1, length + 1, (rows,), generator=draw, dtype=torch.int32)
    return tokens, lengths


def payload(program: nn.Module, folder: Path, precision: Any = "fp32") -> Payload:
    return Payload(folder, INPUTS, SHAPES, precision, lambda: tensors(program), lambda: program)


def job(program: nn.Module) -> Job:
    return Job(program, INPUTS, SHAPES, "fp32", "no", None, Calibration(program, (), 0.0))


def chosen(room: str, kind: str, **table: Any) -> Any:
    return config.choose(room, {"kind": kind, **table})


def differ(ours: Callable[..., Tensor], theirs: nn.Module) -> float:
    """Return the largest relative difference over full batches, fewer rows, and one, of a length.

    Relative to the largest value of a batch.
    """
    found = 0.0
    for shape in SHAPES:
        for rows in {shape.rows, shape.rows - 1, 1}:
            given = batch(rows, shape.length, rows)
            with torch.no_grad():
                expected = theirs(*given)
            output = ours(*given)
            assert output.shape == expected.shape
            assert output.device.type == "cpu"
            error = (output.float() - expected.float()).abs().max() / expected.abs().max()
            found = max(found, float(error))
    return found


# Every backend


@pytest.mark.parametrize("kind", KINDS)
def test_availability_is_told_with_the_vendor_s_package_and_imports_nothing(kind: str) -> None:
    choice: type[Backend] = choices.load("backends", kind)
    before = set(sys.modules)
    found = choice.available()
    assert PACKAGES[kind] in found.reason
    imported = {name.split(".")[0] for name in set(sys.modules) - before}
    assert not imported & {"torch_xla", "torch_neuronx", "torch_neuron", "habana_frameworks"}
    backend = choice()
    assert not backend.symbolic
    assert config.choose("backends", backend.model_dump()) == backend
    if found.fitness == 0:
        with pytest.raises(SettingsError, match=f"backend '{kind}' is not usable here"):
            require(backend, accelerators.choose()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_none_is_for_the_cpu_or_names_an_instruction_set(kind: str) -> None:
    backend, cpu = chosen("backends", kind), chosen("accelerators", "cpu")
    assert "not for cpu" in backend.fits(cpu)
    assert kind not in [each.kind for each in usable_for(cpu)]
    with pytest.raises(SettingsError, match="compiles for no instruction set by name"):
        backend.needs(Site(cpu, torch.device("cpu"), 1), "x86-64-v3")


@pytest.mark.parametrize(
    ("kind", "table"),
    [("neuron", {"cores": 0}), ("neuron", {"share": "heads"}), ("gaudi", {"tensor_cache": True})],
)
def test_settings_are_strict(kind: str, table: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        chosen("backends", kind, **table)


# Batches in declared shapes


def test_a_batch_is_computed_in_the_smallest_shape_that_holds_it() -> None:
    seen: list[tuple[Shape, list[int], int]] = []

    def compute(shape: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
        seen.append((shape, list(inputs[0].shape), int(inputs[1].sum())))
        return inputs[1] * 10

    shapes = [Shape(8, 16), Shape(2, 16), Shape(8, 8)]
    runner = Static(INPUTS, shapes, compute, lambda: 3).warmed()
    assert [shape for shape, *_ in seen] == [Shape(2, 16), Shape(8, 8), Shape(8, 16)]
    tokens, lengths = torch.ones(3, 16, dtype=torch.int32), torch.tensor([5, 6, 7])
    assert runner(tokens, lengths).tolist() == [50, 60, 70]
    assert seen[-1] == (Shape(8, 16), [8, 16], 18)
    runner(tokens[:2], lengths[:2])
    assert seen[-1] == (Shape(2, 16), [2, 16], 11)
    assert runner.graphs() == 3


def test_a_batch_that_has_no_graph_is_refused() -> None:
    runner = Static(INPUTS, SHAPES, lambda _, inputs: inputs[1], lambda: 0)
    for rows, length in ((9, 8), (1, 9)):
        with pytest.raises(DataError, match=f"no graph is there for {rows} rows of {length} "):
            runner(*batch(rows, length))


def test_inputs_of_an_own_module_are_filled_along_their_rows() -> None:
    inputs = (Input(name="table", shape=(3, 3)), Input(name="values", shape=(2, ROWS)))
    runner = Static(inputs, [Shape(4, 1)], lambda _, given: given[1].T @ torch.ones(2), lambda: 0)
    assert runner(torch.eye(3), torch.ones(2, 3)).tolist() == [2, 2, 2]
    whole = Static((Input(name="x", shape=(2, LENGTH)),), SHAPES, lambda _, given: given[0], int)
    assert whole(torch.ones(2, 16)).shape == (2, 16)


# XLA, for real


@pytest.fixture
def xla() -> Site:
    found = choices.load("backends", "xla").available()
    if found.fitness == 0:
        pytest.skip(f"not proved here: xla: {found.reason}")
    accelerator = chosen("accelerators", "xla")
    return Site(accelerator, accelerator.claim(0, 1), 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_xla_gives_what_eager_gives_by_one_graph_a_shape(
    precision: Any, xla: Site, tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    program = drawn(lambda: texts(bert()))
    cast(program, TYPES[precision])
    plain = copy.deepcopy(program)
    backend = chosen("backends", "xla")
    assert backend.fits(xla.accelerator) is None
    assert backend.needs(xla, None) == frozenset()
    backend.export(job(program), xla, tmp_path)
    assert not list(tmp_path.iterdir())
    earlier = xla.accelerator.counters()["fallen_back"]
    runner = backend.load(payload(program, tmp_path, precision), xla)
    assert runner.graphs() == len(SHAPES)
    error = differ(runner, plain)
    figure(f"xla against eager, {precision}", error)
    assert error < ERRORS[precision]
    assert runner.graphs() == len(SHAPES)
    assert xla.accelerator.counters()["fallen_back"] == earlier


def test_xla_keeps_tied_weights_tied(xla: Site, tmp_path: Path) -> None:
    program: Any = drawn(Tied)
    plain = copy.deepcopy(program)
    runner = chosen("backends", "xla").load(payload(program, tmp_path), xla)
    assert program.head.weight is program.embed.weight
    assert program.head.weight.device.type == "xla"
    assert differ(runner, plain) < ERRORS["fp32"]


CACHED = """
import sys, torch
from pathlib import Path
from regauge import config
from regauge.backends import Payload, Shape, Site
from regauge.models.io_spec import Input
cache = sys.argv[1]
accelerator = config.choose("accelerators", "xla")
site = Site(accelerator, accelerator.claim(0, 1), 1)
inputs = (Input(name="x", shape=("rows", 4)),)
def load(cache, rows):
    backend = config.choose("backends", {"kind": "xla", "cache": cache})
    shapes = [Shape(each, 1) for each in rows]
    make = lambda: torch.nn.Linear(4, 3)
    return backend.load(Payload(Path(), inputs, shapes, "fp32", dict, make), site)
first, second = load(cache, (2, 3)), load(cache, (4,))
try:
    load(cache + "-other", (5,))
except Exception as error:
    print(first.graphs(), accelerator.cached(), type(error).__name__, error)
"""


def test_xla_s_graphs_persist_where_cache_says(xla: Site, tmp_path: Path) -> None:
    """The client for the CPU writes each graph, and does not read it back in another process."""
    del xla
    cache = tmp_path / "graphs"
    for _ in range(2):
        command = [sys.executable, "-c", CACHED, str(cache)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        last = done.stdout.splitlines()[-1]
        assert last.startswith("3 (0, 3) SettingsError cache = ")
        assert "comes too late: this process has compiled graphs" in last
        assert len(list(cache.iterdir())) == 3


# Stand-ins


class StandIn(ModuleType):
    """A module of a vendor that is not installed; what it has not is not asked for."""

    def __init__(self, name: str, **contents: Any) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []
        vars(self).update(contents)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def stand_in(name: str, **contents: Any) -> None:
        made = StandIn(name, **contents)
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            monkeypatch.setattr(sys.modules[parent], last, made, raising=False)

    return stand_in


def scripted(program: Any, inputs: tuple[Tensor, ...]) -> Any:
    """Return a program as TorchScript, as every tracer of this vendor gives it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer reads what transformers no longer wants read
        return torch.jit.trace(copy.deepcopy(program), inputs, check_trace=False)


# Intel


@pytest.fixture
def gaudi() -> Callable[[str], Site]:
    return lambda mode: Site(chosen("accelerators", "gaudi", mode=mode), torch.device("cpu"), 1)


@pytest.mark.parametrize(("setting", "disabled"), [("no", True), ("yes", False)])
def test_gaudi_records_a_graph_for_each_shape_and_replays_it(
    setting: str,
    disabled: bool,  # noqa: FBT001 - a case
    install: Callable[..., None],
    gaudi: Callable[[str], Site],
    tmp_path: Path,
) -> None:
    said: Said = []
    recorded: dict[torch.Size, Tensor] = {}

    def wrap_in_hpu_graph(module: nn.Module, **options: Any) -> Callable[..., Tensor]:
        said.append(("wrap_in_hpu_graph", options))

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
    program = drawn(lambda: texts(bert()))
    plain, site = copy.deepcopy(program), gaudi("lazy")
    backend = chosen("backends", "gaudi", tensor_cache=setting)
    assert backend.fits(site.accelerator) is None
    runner = backend.load(payload(program, tmp_path), site)
    assert said == [("wrap_in_hpu_graph", {"disable_tensor_cache": disabled, "max_graphs": 3})]
    assert [tuple(shape) for shape in recorded] == sorted(SHAPES)
    assert runner.graphs() == len(SHAPES)
    assert differ(runner, plain) == 0
    assert len(recorded) == runner.graphs() == len(SHAPES)
    first = runner(*batch(8, 8, 1))
    kept = first.clone()
    runner(*batch(8, 8, 2))
    assert first.equal(kept)


def test_gaudi_compiles_each_shape_in_eager_mode(
    gaudi: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._dynamo.backends import registry as compilers

    shapes: list[tuple[int, ...]] = []

    def hpu_backend(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        shapes.extend(tuple(each.shape) for each in inputs if each.dtype == torch.int32)
        return graph.forward

    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    monkeypatch.setitem(compilers._BACKENDS, "hpu_backend", None)
    monkeypatch.setitem(compilers._COMPILER_FNS, "hpu_backend", hpu_backend)
    torch._dynamo.reset()
    program = drawn(Tied)
    plain = copy.deepcopy(program)
    runner = chosen("backends", "gaudi").load(payload(program, tmp_path), gaudi("eager"))
    assert sorted(shapes) == sorted([*SHAPES, *((rows,) for rows, _ in SHAPES)])
    assert runner.graphs() == len(SHAPES)
    assert differ(runner, plain) < ERRORS["fp32"]
    assert runner.graphs() == len(SHAPES)
    torch._dynamo.reset()


# AWS


@pytest.fixture
def neuron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Site]:
    """Return a function that makes a site, of which nothing but its settings is known."""
    monkeypatch.setattr("regauge.accelerators._xla.version", lambda _: "2.9.0")
    monkeypatch.setattr("regauge.accelerators.neuron.PRODUCT", tmp_path / "none")
    return lambda **table: Site(chosen("accelerators", "neuron", **table), torch.device("cpu"), 1)


@pytest.fixture
def trn1(neuron: Callable[..., Site]) -> Site:
    return neuron(target="trn1")


class NeuronX:
    """What torch_neuronx has for traced programs."""

    def __init__(self) -> None:
        self.said: Said = []

    def trace(
        self,
        func: nn.Module,
        example_inputs: tuple[Tensor, ...],
        *,
        compiler_args: list[str],
        inline_weights_to_neff: bool,
    ) -> Any:
        shapes = [tuple(each.shape) for each in example_inputs]
        self.said.append(("trace", shapes[0], " ".join(compiler_args), inline_weights_to_neff))
        graph = scripted(func, example_inputs)
        if not inline_weights_to_neff:  # what is put there later is what counts
            for weight in graph.parameters():
                weight.zero_()
        return graph

    def lazy_load(self, trace: Any) -> None:
        assert isinstance(trace, torch.jit.ScriptModule)
        self.said.append(("lazy_load",))

    def replace_weights(self, neuron_model: Any, weights: dict[str, Tensor]) -> None:
        self.said.append(("replace_weights",))
        missing, strange = neuron_model.load_state_dict(weights, strict=False)
        assert not strange
        assert not {*missing} & {name for name, _ in neuron_model.named_parameters()}

    def move_trace_to_device(self, trace: Any, device_id: int) -> None:
        assert isinstance(trace, torch.jit.ScriptModule)
        self.said.append(("move_trace_to_device", device_id))

    def DataParallel(  # noqa: N802 - its name
        self, model: Any, device_ids: list[int], dim: int, *, set_dynamic_batching: bool = False
    ) -> Any:
        self.said.append(("DataParallel", device_ids, dim, set_dynamic_batching))
        return Replicas(model, len(device_ids), self.said)


class Replicas:
    """A graph on several cores: rows are cut into equal parts, one for each."""

    def __init__(self, model: Any, cores: int, said: Said) -> None:
        self.model, self.cores, self.said = model, cores, said

    def __call__(self, *inputs: Tensor) -> Tensor:
        parts = zip(*(each.chunk(self.cores) for each in inputs), strict=True)
        answers = [self.model(*each) for each in parts]
        assert len(answers) == self.cores
        assert len({len(each) for each in answers}) == 1
        return torch.cat(answers)

    def disable_dynamic_batching(self) -> None:
        self.said.append(("disable_dynamic_batching",))


@pytest.fixture
def neuronx(install: Callable[..., None]) -> NeuronX:
    made = NeuronX()
    names = ("trace", "lazy_load", "replace_weights", "move_trace_to_device", "DataParallel")
    install("torch_neuronx", **{name: getattr(made, name) for name in names})
    return made


FLAGS = "--target trn1 --model-type transformer --auto-cast none --optlevel 2"
SCRIPT = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@SCRIPT
@pytest.mark.parametrize("make", [Tied, lambda: texts(bert())])
def test_neuron_traces_every_shape_and_puts_the_weights_in_when_it_loads(
    make: Callable[[], nn.Module], neuronx: NeuronX, trn1: Site, tmp_path: Path
) -> None:
    backend = chosen("backends", "neuron")
    assert chosen("backends", "xla").fits(trn1.accelerator) is None
    assert backend.ahead
    assert backend.fits(trn1.accelerator) is None
    assert backend.needs(trn1, None) == {"neuron", "trn1"}
    program, other = drawn(make), drawn(make, 1)
    backend.export(job(program), trn1, tmp_path)
    assert neuronx.said == [("trace", tuple(shape), FLAGS, False) for shape in SHAPES]
    assert {path.name for path in tmp_path.iterdir()} == {"8x8.pt", "4x16.pt", "2x24.pt"}
    neuronx.said.clear()
    runner = backend.load(payload(other, tmp_path), trn1)
    assert neuronx.said == [("replace_weights",), ("move_trace_to_device", 0)] * len(SHAPES)
    assert differ(runner, other) < ERRORS["fp32"]
    assert differ(runner, program) > 0.01
    assert runner.graphs() == 0


@SCRIPT
def test_neuron_can_leave_weights_inside(neuronx: NeuronX, trn1: Site, tmp_path: Path) -> None:
    backend = chosen("backends", "neuron", weights="inside")
    program, other = drawn(Tied), drawn(Tied, 1)
    backend.export(job(program), trn1, tmp_path)
    assert [each[3] for each in neuronx.said] == [True] * len(SHAPES)
    neuronx.said.clear()
    runner = backend.load(payload(other, tmp_path), trn1)
    assert neuronx.said == [("move_trace_to_device", 0)] * len(SHAPES)
    assert differ(runner, program) < ERRORS["fp32"]


@SCRIPT
def test_neuron_s_cores_share_rows(neuronx: NeuronX, trn1: Site, tmp_path: Path) -> None:
    backend = chosen("backends", "neuron", cores=2)
    program = drawn(lambda: texts(bert()))
    backend.export(job(program), trn1, tmp_path)
    traced = [("trace", (rows // 2, length), FLAGS, False) for rows, length in SHAPES]
    assert neuronx.said == [step for each in traced for step in (each, ("lazy_load",))]
    neuronx.said.clear()
    runner = backend.load(payload(program, tmp_path), trn1)
    spread = ("DataParallel", [0, 1], 0, False)
    assert neuronx.said == [("replace_weights",), spread] * len(SHAPES)
    assert differ(runner, program) < ERRORS["fp32"]


def test_neuron_says_what_cores_cannot_share(neuronx: NeuronX, trn1: Site, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="4 cores cannot share 2 rows of 24 tokens evenly"):
        chosen("backends", "neuron", cores=4).export(job(drawn(Tied)), trn1, tmp_path)
    assert not neuronx.said
    assert "Inf1 alone" in chosen("backends", "neuron", share="layers").fits(trn1.accelerator)
    divided = chosen("backends", "neuron", share="weights")
    assert "neuronx_distributed is not installed" in divided.fits(trn1.accelerator)


def test_neuron_s_compiler_gets_the_settings(trn1: Site) -> None:
    backend = chosen(
        "backends",
        "neuron",
        auto_cast="matmult",
        auto_cast_type="fp16",
        optlevel=3,
        model_type="generic",
        flags=("--enable-fast-loading-neuron-binaries",),
    )
    assert " ".join(backend._plan(trn1.accelerator).flags) == (
        "--target trn1 --model-type generic --auto-cast matmult --auto-cast-type fp16 "
        "--optlevel 3 --enable-fast-loading-neuron-binaries"
    )


def test_an_unknown_generation_is_refused_before_anything_is_compiled(
    neuronx: NeuronX, neuron: Callable[..., Site], tmp_path: Path
) -> None:
    site, backend = neuron(), chosen("backends", "neuron")
    said = re.escape("set accelerator.target to one of inf2, trn1, trn2")
    with pytest.raises(SettingsError, match=said):
        backend.export(job(drawn(Tied)), site, tmp_path)
    with pytest.raises(SettingsError, match=said):
        backend.needs(site, None)
    assert not neuronx.said


# AWS: weights on several cores


class Cores(threading.local):
    """Which core a thread is, while a program is computed on all of them."""

    rank = 0


class Distributed:
    """What neuronx_distributed has for programs that are compiled; its layers are divided."""

    def __init__(self, install: Callable[..., None]) -> None:
        self.said: Said = []
        self.size = 0
        self.here = Cores()
        self.kept: dict[str, nn.Module] = {}
        owner = self

        class ColumnParallelLinear(nn.Module):
            def __init__(
                self,
                input_size: int,
                output_size: int,
                bias: bool = True,  # noqa: FBT001, FBT002 - theirs
                gather_output: bool = True,  # noqa: FBT001, FBT002 - theirs
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
                bias: bool = True,  # noqa: FBT001, FBT002 - theirs
                input_is_parallel: bool = False,  # noqa: FBT001, FBT002 - theirs
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
                summed = owner.summed(nn.functional.linear(value, self.weight))
                return summed if self.bias is None else summed + self.bias

        @contextmanager
        def world(*, world_size: int, tensor_model_parallel_size: int) -> Iterator[None]:
            assert world_size == tensor_model_parallel_size
            self.said.append(("NxDParallelState", world_size))
            self.size = world_size
            yield
            self.size = 0

        self.columns, self.rows = ColumnParallelLinear, RowParallelLinear
        install(
            "neuronx_distributed",
            ModelBuilder=lambda model: Builder(self, model),
            NxDModel=StandIn("NxDModel", load=lambda path: Compiled(self, path)),
            NxDParallelState=world,
            shard_checkpoint=self.shards,
        )
        layers = {"ColumnParallelLinear": self.columns, "RowParallelLinear": self.rows}
        install("neuronx_distributed.parallel_layers", **layers)
        install("neuronx_distributed.utils")
        install("neuronx_distributed.utils.model_utils", init_on_device=torch.device)

    def summed(self, part: Tensor) -> Tensor:
        """Return the sum of a value over the cores, in their order."""
        self.parts[self.here.rank] = part
        self.meet.wait()
        total = torch.stack(self.parts).sum(0)
        self.meet.wait()
        return total

    def shards(self, checkpoint: dict[str, Tensor], model: nn.Module) -> list[dict[str, Tensor]]:
        """Return each core's part of the weights, as the layers of a model want them."""
        found: list[dict[str, Tensor]] = [dict(checkpoint) for _ in range(self.size)]
        on_meta = 0
        for name, layer in model.named_modules():
            if isinstance(layer, self.columns | self.rows):
                on_meta += layer.weight.is_meta
                for kind, axis in layer.axes.items():
                    whole = checkpoint.get(f"{name}.{kind}")
                    if whole is not None:
                        parts = whole.chunk(self.size, axis)
                        for rank, part in enumerate(parts):
                            found[rank][f"{name}.{kind}"] = part
        self.said.append(("shard_checkpoint", on_meta))
        return found

    def everywhere(self, models: list[nn.Module], inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return what the model of each core gives, all computed at the same time."""
        self.meet = threading.Barrier(len(models), timeout=60)
        self.parts = [torch.empty(0)] * len(models)
        answers = [torch.empty(0)] * len(models)

        def compute(rank: int) -> None:
            self.here.rank = rank
            with torch.no_grad():
                answers[rank] = models[rank](*inputs)

        threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(len(models))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return answers


class Builder:
    """Collects the shapes of a model, and compiles them into one."""

    def __init__(self, owner: Distributed, model: nn.Module) -> None:
        self.owner, self.model = owner, model
        self.tags: dict[str, list[int]] = {}

    def trace(self, *, args: tuple[Tensor, ...], tag: str) -> Builder:
        assert self.owner.size
        self.owner.said.append(("trace", tag, tuple(args[0].shape)))
        self.tags[tag] = list(args[0].shape)
        return self

    def compile(self, *, compiler_workdir: str, compiler_args: str) -> Builder:
        assert Path(compiler_workdir).is_dir()
        self.owner.said.append(("compile", compiler_args))
        return self

    def save(self, path: str) -> None:
        """Write the shapes; the graphs themselves, without weights, are kept in memory."""
        Path(path).write_text(json.dumps(self.tags))
        self.owner.kept[path] = self.model
        self.owner.said.append(("save",))


class Compiled:
    """What was compiled, loaded again."""

    def __init__(self, owner: Distributed, path: str) -> None:
        self.owner, self.ready = owner, False
        self.tags = json.loads(Path(path).read_text())
        self.model = owner.kept[path]
        owner.said.append(("load",))

    def set_weights(self, parts: list[dict[str, Tensor]]) -> None:
        assert not self.ready
        self.models = []
        for part in parts:
            model = copy.deepcopy(self.model)
            model.load_state_dict(part, assign=True)
            self.models.append(model)
        self.owner.said.append(("set_weights", len(parts)))

    def to_neuron(self) -> None:
        self.ready = True
        self.owner.said.append(("to_neuron",))

    def __call__(self, *inputs: Tensor, model_name: str) -> Tensor:
        assert self.ready
        assert list(inputs[0].shape) == self.tags[model_name]
        return self.owner.everywhere(self.models, inputs)[0]


@pytest.fixture
def distributed(install: Callable[..., None], neuronx: NeuronX) -> Distributed:
    del neuronx
    return Distributed(install)


@pytest.mark.parametrize("make", [bert, distilbert, llama])
def test_neuron_s_cores_share_weights(
    make: Callable[[], Any], distributed: Distributed, trn1: Site, tmp_path: Path
) -> None:
    backend = chosen("backends", "neuron", cores=2, share="weights")
    assert backend.fits(trn1.accelerator) is None
    program = drawn(lambda: texts(make()))
    plain = copy.deepcopy(program)
    backend.export(job(program), trn1, tmp_path)
    traced = [("trace", f"{rows}x{length}", (rows, length)) for rows, length in SHAPES]
    assert distributed.said == [("NxDParallelState", 2), *traced, ("compile", FLAGS), ("save",)]
    assert [path.name for path in tmp_path.iterdir()] == ["program.pt"]
    assert all(map(torch.equal, program.parameters(), plain.parameters()))
    distributed.said.clear()
    runner = backend.load(payload(program, tmp_path), trn1)
    layers = {bert: 12, distilbert: 12, llama: 14}[make]
    assert distributed.said == [
        ("load",),
        ("NxDParallelState", 2),
        ("shard_checkpoint", layers),
        ("set_weights", 2),
        ("to_neuron",),
    ]
    assert differ(runner, plain) < ERRORS["fp32"]


@pytest.mark.parametrize(
    ("cores", "make", "said"),
    [
        (3, lambda: texts(bert()), r"3 cores cannot share 4 heads \(num_attention_heads\)"),
        (4, lambda: texts(llama()), r"4 cores cannot share 2 heads \(num_key_value_heads\)"),
        (4, lambda: texts(bert(intermediate_size=66)), "4 cores cannot share 66 features of"),
        (2, Tied, "nothing in Tied can be divided between cores"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    cores: int,
    make: Callable[[], nn.Module],
    said: str,
    distributed: Distributed,
    trn1: Site,
    tmp_path: Path,
) -> None:
    del distributed
    backend = chosen("backends", "neuron", cores=cores, share="weights")
    with pytest.raises(SettingsError, match=said):
        backend.export(job(drawn(make)), trn1, tmp_path)


# AWS: the first generation


@pytest.fixture
def first(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Said:
    said: Said = []

    def trace(
        model: nn.Module, example_inputs: tuple[Tensor, ...], *, compiler_args: list[str]
    ) -> Any:
        said.append(("trace", tuple(example_inputs[0].shape), " ".join(compiler_args)))
        return scripted(model, example_inputs)

    def data_parallel(model: Any, device_ids: list[int], dim: int) -> Replicas:
        said.append(("DataParallel", device_ids, dim))
        return Replicas(model, len(device_ids), said)

    monkeypatch.delitem(sys.modules, "torch_neuronx", raising=False)
    install("torch_neuron", trace=trace, DataParallel=data_parallel)
    return said


@SCRIPT
def test_inf1_splits_a_program_into_a_pipeline(first: Said, tmp_path: Path) -> None:
    site = Site(chosen("accelerators", "cpu"), torch.device("cpu"), 1)
    backend = chosen("backends", "neuron", cores=4, share="layers")
    assert backend.fits(site.accelerator) is None
    assert backend.needs(site, None) == {"cpu"}
    assert backend.forms(site.accelerator) == (("fp32", "no"),)
    program = drawn(Tied)
    backend.export(job(program), site, tmp_path)
    flags = "--fast-math none --neuroncore-pipeline-cores 4"
    assert first == [("trace", tuple(shape), flags) for shape in SHAPES]
    first.clear()
    assert differ(backend.load(payload(program, tmp_path), site), program) < ERRORS["fp32"]
    assert not first


@SCRIPT
def test_inf1_s_cores_share_rows(first: Said, tmp_path: Path) -> None:
    site = Site(chosen("accelerators", "cpu"), torch.device("cpu"), 1)
    backend = chosen("backends", "neuron", cores=2, auto_cast="matmult")
    program = drawn(Tied)
    backend.export(job(program), site, tmp_path)
    flags = "--fast-math fp32-cast-matmult-bf16"
    assert first == [("trace", (rows // 2, length), flags) for rows, length in SHAPES]
    first.clear()
    runner = backend.load(payload(program, tmp_path), site)
    spread = [("DataParallel", [0, 1], 0), ("disable_dynamic_batching",)]
    assert first == spread * len(SHAPES)
    assert differ(runner, program) < ERRORS["fp32"]
    assert "not share weights" in chosen("backends", "neuron", share="weights").fits(
        site.accelerator
    )
    narrow = chosen("backends", "neuron", auto_cast="all", auto_cast_type="tf32")
    with pytest.raises(SettingsError, match="Inf1 does not narrow to tf32"):
        narrow.export(job(program), site, tmp_path)


def test_inf1_says_which_torch_it_needs_and_whether_a_device_is_there(
    first: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del first
    found = neuron_backend.Neuron.available()
    assert (found.fitness, found.reason) == (0, "torch_neuron is not installed as a package")
    versions = {"torch": "2.13.0+cpu", "torch_neuron": "1.13.1.2.9"}
    monkeypatch.setattr(neuron_backend, "version", versions.__getitem__)
    told = neuron_backend.Neuron.available()
    assert (told.fitness, told.reason) == (0, "torch_neuron needs torch 1.13, here is 2.13.0+cpu")
    versions["torch"] = "1.13.1"
    monkeypatch.setattr(neuron_backend, "DEVICE", tmp_path / "none")
    assert "shows no device" in neuron_backend.Neuron.available().reason
    monkeypatch.setattr(neuron_backend, "DEVICE", tmp_path)
    assert neuron_backend.Neuron.available().fitness > 0
