"""Builds and loads graphs for NeuronCores with AWS's libraries; the only file that calls them.

Graphs are stored as TorchScript, and loading them can execute code. So they are only loaded here,
from payload files with verified hashes. Each function names the AWS documentation page it was
written from. Nothing here was run on the hardware.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from regauge.inference.backends._model_parallel.plan import apply_tensor_parallelism
from regauge.models.inference_modules import example_inputs
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from regauge.inference.backends import CompileJob, Payload, Shape
    from regauge.inference.backends._runners import Compute

TENSOR_PARALLEL_FILE = "program.pt"


@dataclass(frozen=True)
class NeuronOptions:
    """How to compile a program, and for how many NeuronCores."""

    flags: tuple[str, ...]
    num_cores: int
    inline_weights: bool = False
    """Whether each graph contains the weights."""


def export_traced(job: CompileJob, options: NeuronOptions, folder: Path) -> None:
    """Write a graph for each shape (PyTorch NeuronX Tracing API for Inference).

    A graph has one core's rows. It contains the weights from tracing, which are replaced at load
    time.
    """
    neuronx: Any = import_module("torch_neuronx")
    for shape, inputs in _inputs_of_one_core(job, options):
        with torch.no_grad():
            graph = neuronx.trace(
                job.program,
                inputs,
                compiler_args=list(options.flags),
                inline_weights_to_neff=options.inline_weights,
            )
        if options.num_cores > 1:
            neuronx.lazy_load(graph)  # otherwise it occupies a core before it is replicated
        torch.jit.save(graph, _graph_file(folder, shape))


def load_traced(payload: Payload, options: NeuronOptions) -> Compute:
    """Load traced graphs, each on the first core or replicated on several.

    Weights that are not inlined stay on the host until the graph is moved, and would be copied at
    every call (Weight Replacement API; Moving a Traced Module; PyTorch NeuronX DataParallel API).
    """
    neuronx: Any = import_module("torch_neuronx")
    weights = None if options.inline_weights else payload.build_program().state_dict()
    graphs: dict[Shape, Any] = {}
    for shape in payload.shapes:
        graph = _load_graph(_graph_file(payload.folder, shape))
        if weights is not None:
            neuronx.replace_weights(graph, weights)
        if options.num_cores > 1:
            graph = neuronx.DataParallel(
                graph, device_ids=list(range(options.num_cores)), dim=0, set_dynamic_batching=False
            )
        else:
            neuronx.move_trace_to_device(graph, 0)
        graphs[shape] = graph
    return _build_compute(graphs)


def export_tensor_parallel(job: CompileJob, options: NeuronOptions, folder: Path) -> None:
    """Write one file for all shapes, without weights (ModelBuilderV2 API Reference)."""
    distributed: Any = import_module("neuronx_distributed")
    state = _parallel_state(options)
    with tempfile.TemporaryDirectory() as workdir, state, torch.no_grad():
        program = _parallelize(copy.deepcopy(job.program), options.num_cores)
        builder = distributed.ModelBuilder(program)
        for shape in job.shapes:
            builder = builder.trace(args=example_inputs(job.inputs, *shape), tag=_tag(shape))
        flags = " ".join(options.flags)
        graphs = builder.compile(compiler_workdir=workdir, compiler_args=flags)
    graphs.save(str(folder / TENSOR_PARALLEL_FILE))


def load_tensor_parallel(payload: Payload, options: NeuronOptions) -> Compute:
    """Load a program whose weights are split over cores (ModelBuilderV2 API Reference)."""
    distributed: Any = import_module("neuronx_distributed")
    model_utils: Any = import_module("neuronx_distributed.utils.model_utils")
    graphs = distributed.NxDModel.load(str(payload.folder / TENSOR_PARALLEL_FILE))
    program = payload.build_program()
    weights = program.state_dict()
    on_meta = model_utils.init_on_device(torch.device("meta"))
    with _parallel_state(options), on_meta:
        model = _parallelize(program, options.num_cores)
        shards = distributed.shard_checkpoint(checkpoint=weights, model=model)
    graphs.set_weights(shards)
    graphs.to_neuron()

    @torch.no_grad()
    def compute(shape: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = graphs(*inputs, model_name=_tag(shape))
        return output

    return compute


def export_inf1(job: CompileJob, options: NeuronOptions, folder: Path) -> None:
    """Write a graph with weights for each shape (PyTorch-Neuron trace python API)."""
    neuron: Any = import_module("torch_neuron")
    for shape, inputs in _inputs_of_one_core(job, options):
        with torch.no_grad():
            graph = neuron.trace(job.program, inputs, compiler_args=list(options.flags))
        torch.jit.save(graph, _graph_file(folder, shape))


def load_inf1(payload: Payload, options: NeuronOptions) -> Compute:
    """Load graphs on Inf1; a pipeline uses as many cores as it was compiled for.

    Graphs are replicated if several cores share the rows (torch.neuron.DataParallel API).
    """
    neuron: Any = import_module("torch_neuron")
    graphs: dict[Shape, Any] = {}
    for shape in payload.shapes:
        graphs[shape] = _load_graph(_graph_file(payload.folder, shape))
        if options.num_cores > 1:
            device_ids = list(range(options.num_cores))
            replicas = neuron.DataParallel(graphs[shape], device_ids=device_ids, dim=0)
            replicas.disable_dynamic_batching()
            graphs[shape] = replicas
    return _build_compute(graphs)


def _load_graph(file: str) -> Any:
    return torch.jit.load(file)


def _build_compute(graphs: dict[Shape, Any]) -> Compute:
    @torch.no_grad()
    def compute(shape: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = graphs[shape](*inputs)
        return output

    return compute


def _parallelize(program: nn.Module, num_cores: int) -> nn.Module:
    """Replace layers that can be split by the vendor's parallel layers; return the program."""
    layers: Any = import_module("neuronx_distributed.parallel_layers")

    def build_column_parallel(layer: nn.Linear) -> nn.Module:
        parallel: nn.Module = layers.ColumnParallelLinear(
            *_layer_arguments(layer), gather_output=False, dtype=layer.weight.dtype
        )
        return parallel

    def build_row_parallel(layer: nn.Linear) -> nn.Module:
        parallel: nn.Module = layers.RowParallelLinear(
            *_layer_arguments(layer), input_is_parallel=True, dtype=layer.weight.dtype
        )
        return parallel

    apply_tensor_parallelism(
        program,
        num_cores,
        column_parallel=build_column_parallel,
        row_parallel=build_row_parallel,
        setting="cores",
        remedy='set parallelism = "data"',
    )
    return program


def _layer_arguments(layer: nn.Linear) -> tuple[int, int, bool]:
    return layer.in_features, layer.out_features, layer.bias is not None


def _parallel_state(options: NeuronOptions) -> Any:
    distributed: Any = import_module("neuronx_distributed")
    return distributed.NxDParallelState(
        world_size=options.num_cores, tensor_model_parallel_size=options.num_cores
    )


def _inputs_of_one_core(
    job: CompileJob, options: NeuronOptions
) -> list[tuple[Shape, tuple[Tensor, ...]]]:
    for shape in job.shapes:
        if shape.rows % options.num_cores:
            rows = f"{shape.rows} rows of {shape.length} tokens"
            problem = f"cores = {options.num_cores} does not divide {rows}"
            remedy = "change cores, buckets.max_batch_size or buckets.max_batch_tokens"
            raise SettingsError(problem, remedy)
    return [
        (shape, example_inputs(job.inputs, shape.rows // options.num_cores, shape.length))
        for shape in job.shapes
    ]


def _tag(shape: Shape) -> str:
    return f"{shape.rows}x{shape.length}"


def _graph_file(folder: Path, shape: Shape) -> str:
    return str(folder / f"{_tag(shape)}.pt")
