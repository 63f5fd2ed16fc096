"""Exports a program as one graph for all shapes, with weights as graph inputs.

Backends that write graphs to files use this. Because the weights are inputs, no compiler can fold a
weight into its file or merge two equal weights.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.models.io_spec import LENGTH, ROWS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from regauge.inference.backends import CompileJob


class GraphWithWeightInputs(NamedTuple):
    """A graph whose first inputs are the program's weights."""

    graph: ExportedProgram
    weights: tuple[str, ...]
    """Names of the weights and buffers, in the order of the graph's first inputs."""


def export_graph(program: nn.Module, job: CompileJob) -> GraphWithWeightInputs:
    """Return a program's graph for every shape up to a job's largest one.

    The program is the job's program or derived from it. Tensors with a name in the job's program
    become graph inputs; added tensors become constants.
    """
    import torch

    from regauge.models.inference_modules import MIN_TRACE_ROWS, example_inputs, named_tensors

    class FunctionalProgram(torch.nn.Module):
        """The program as a function of weights and inputs."""

        def forward(self, weights: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Tensor:
            values = dict(zip(names, weights, strict=True))
            output: Tensor = torch.func.functional_call(program, values, inputs)
            return output

    tensors = named_tensors(program)
    names = tuple(name for name in named_tensors(job.program) if name in tensors)
    weights = tuple(tensors[name].detach() for name in names)
    shape = job.shapes[len(job.shapes) // 2]
    inputs = example_inputs(job.inputs, max(shape.rows, MIN_TRACE_ROWS), shape.length)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own code
        graph = torch.export.export(
            FunctionalProgram().eval(),
            (weights, inputs),
            dynamic_shapes=((None,) * len(names), build_dynamic_shapes(job)),
            strict=False,
        )
    return GraphWithWeightInputs(graph, names)


def build_dynamic_shapes(job: CompileJob) -> tuple[dict[int, Any], ...]:
    """Return torch.export's `dynamic_shapes` for a job's inputs."""
    from torch.export import Dim

    limits = {
        ROWS: max(shape.rows for shape in job.shapes),
        LENGTH: max(shape.length for shape in job.shapes),
    }
    sizes: dict[Any, Any] = {
        name: Dim(name, min=1, max=limit) for name, limit in limits.items() if limit > 1
    }
    return tuple(
        {axis: sizes[size] for axis, size in enumerate(spec.shape) if size in sizes}
        for spec in job.inputs
    )


def missing_library(extra: str, *libraries: str) -> str | None:
    """Return which library is missing and how to install it, or None; imports nothing."""
    for name in libraries:
        try:
            is_installed = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):  # something prevents the import
            is_installed = False
        if not is_installed:
            return f"{name} is not installed: pip install 'regauge[{extra}]'"
    return None
