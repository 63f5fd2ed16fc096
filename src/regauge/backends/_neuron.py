"""Graphs for NeuronCores, made and opened by AWS's own tools: one place for all that they run.

They keep graphs as TorchScript. To open one runs code, so it is done here alone, on files of a
payload whose hashes were compared. Written to the pages that each function names, and not run.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from regauge.backends._divided import divide
from regauge.errors import SettingsError
from regauge.models.inference_modules import examples

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from regauge.backends import Job, Payload, Shape
    from regauge.backends._static import Compute

DIVIDED = "program.pt"


@dataclass(frozen=True)
class Plan:
    """How a program is compiled, and for how many of the cores that the process sees."""

    flags: tuple[str, ...]
    cores: int
    inside: bool = False
    """Whether weights are a part of each graph."""


def export_traced(job: Job, plan: Plan, folder: Path) -> None:
    """Write a graph for each shape (PyTorch NeuronX Tracing API for Inference).

    A graph has the rows of one core. It brings the weights that it was traced with, and others are
    put in their place when it is loaded.
    """
    neuronx: Any = import_module("torch_neuronx")
    for shape, given in _given(job, plan):
        with torch.no_grad():
            graph = neuronx.trace(
                job.program,
                given,
                compiler_args=list(plan.flags),
                inline_weights_to_neff=plan.inside,
            )
        if plan.cores > 1:
            neuronx.lazy_load(graph)  # else it takes a core before it is given several
        torch.jit.save(graph, _file(folder, shape))


def load_traced(payload: Payload, plan: Plan) -> Compute:
    """Return what computes traced graphs, each on the first core or replicated on several.

    Weights beside a graph stay on the host until it is moved, and would cross at every call
    (Weight Replacement API; Moving a Traced Module; PyTorch NeuronX DataParallel API).
    """
    neuronx: Any = import_module("torch_neuronx")
    weights = None if plan.inside else payload.program().state_dict()
    graphs: dict[Shape, Any] = {}
    for shape in payload.shapes:
        graph = _opened(_file(payload.folder, shape))
        if weights is not None:
            neuronx.replace_weights(graph, weights)
        if plan.cores > 1:
            graph = neuronx.DataParallel(
                graph, device_ids=list(range(plan.cores)), dim=0, set_dynamic_batching=False
            )
        else:
            neuronx.move_trace_to_device(graph, 0)
        graphs[shape] = graph
    return _computing(graphs)


def export_divided(job: Job, plan: Plan, folder: Path) -> None:
    """Write one file for all shapes, without weights (ModelBuilderV2 API Reference)."""
    distributed: Any = import_module("neuronx_distributed")
    with tempfile.TemporaryDirectory() as scratch, _world(distributed, plan), torch.no_grad():
        builder = distributed.ModelBuilder(_divided(copy.deepcopy(job.program), plan.cores))
        for shape in job.shapes:
            builder = builder.trace(args=examples(job.inputs, *shape), tag=_tag(shape))
        flags = " ".join(plan.flags)
        graphs = builder.compile(compiler_workdir=scratch, compiler_args=flags)
    graphs.save(str(folder / DIVIDED))


def load_divided(payload: Payload, plan: Plan) -> Compute:
    """Return what computes a program whose weights are divided between cores (the same page)."""
    distributed: Any = import_module("neuronx_distributed")
    made: Any = import_module("neuronx_distributed.utils.model_utils")
    graphs = distributed.NxDModel.load(str(payload.folder / DIVIDED))
    program = payload.program()
    weights = program.state_dict()
    with _world(distributed, plan), made.init_on_device(torch.device("meta")):
        model = _divided(program, plan.cores)
        parts = distributed.shard_checkpoint(checkpoint=weights, model=model)
    graphs.set_weights(parts)
    graphs.to_neuron()

    @torch.no_grad()
    def compute(shape: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = graphs(*inputs, model_name=_tag(shape))
        return output

    return compute


def export_first(job: Job, plan: Plan, folder: Path) -> None:
    """Write a graph for each shape for Inf1, weights within (PyTorch-Neuron trace python API)."""
    neuron: Any = import_module("torch_neuron")
    for shape, given in _given(job, plan):
        with torch.no_grad():
            graph = neuron.trace(job.program, given, compiler_args=list(plan.flags))
        torch.jit.save(graph, _file(folder, shape))


def load_first(payload: Payload, plan: Plan) -> Compute:
    """Return what computes graphs on Inf1; a pipeline takes as many cores as it was compiled for.

    Several cores that share rows are told of here (torch.neuron.DataParallel API).
    """
    neuron: Any = import_module("torch_neuron")
    graphs: dict[Shape, Any] = {}
    for shape in payload.shapes:
        graphs[shape] = _opened(_file(payload.folder, shape))
        if plan.cores > 1:
            replicas = neuron.DataParallel(graphs[shape], device_ids=list(range(plan.cores)), dim=0)
            replicas.disable_dynamic_batching()
            graphs[shape] = replicas
    return _computing(graphs)


def _opened(file: str) -> Any:
    return torch.jit.load(file)


def _computing(graphs: dict[Shape, Any]) -> Compute:
    @torch.no_grad()
    def compute(shape: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = graphs[shape](*inputs)
        return output

    return compute


def _divided(program: nn.Module, cores: int) -> nn.Module:
    """Return a program with the vendor's layers in the place of those that can be divided."""
    layers: Any = import_module("neuronx_distributed.parallel_layers")

    def outputs(layer: nn.Linear) -> nn.Module:
        made: nn.Module = layers.ColumnParallelLinear(
            *_sizes(layer), gather_output=False, dtype=layer.weight.dtype
        )
        return made

    def inputs(layer: nn.Linear) -> nn.Module:
        made: nn.Module = layers.RowParallelLinear(
            *_sizes(layer), input_is_parallel=True, dtype=layer.weight.dtype
        )
        return made

    divide(program, cores, outputs=outputs, inputs=inputs)
    return program


def _sizes(layer: nn.Linear) -> tuple[int, int, bool]:
    return layer.in_features, layer.out_features, layer.bias is not None


def _world(distributed: Any, plan: Plan) -> Any:
    return distributed.NxDParallelState(
        world_size=plan.cores, tensor_model_parallel_size=plan.cores
    )


def _given(job: Job, plan: Plan) -> list[tuple[Shape, tuple[Tensor, ...]]]:
    """Return each shape with inputs of the rows that one core has of it."""
    for shape in job.shapes:
        if shape.rows % plan.cores:
            rows = f"{shape.rows} rows of {shape.length} tokens"
            problem = f"{plan.cores} cores cannot share {rows} evenly"
            remedy = "choose other cores, or other shapes.rows and shapes.tokens"
            raise SettingsError(problem, remedy)
    return [
        (shape, examples(job.inputs, shape.rows // plan.cores, shape.length))
        for shape in job.shapes
    ]


def _tag(shape: Shape) -> str:
    return f"{shape.rows}x{shape.length}"


def _file(folder: Path, shape: Shape) -> str:
    return str(folder / f"{_tag(shape)}.pt")
