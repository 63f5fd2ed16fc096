"""A program as one graph for all its shapes, whose weights are inputs: for what writes graphs down.

So no compiler can fold a weight into its file, nor take two equal ones for one.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.models.io_spec import LENGTH, ROWS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from regauge.backends import Job


class Lifted(NamedTuple):
    """A graph, and what it takes before the inputs of its program."""

    graph: ExportedProgram
    weights: tuple[str, ...]
    """Names of weights and buffers, in the order of the graph's first inputs."""


def lifted(program: nn.Module, job: Job) -> Lifted:
    """Return the graph of a program for every shape up to a job's largest.

    The program is the job's, or made of it. What it has by the job's own names is an input; what
    was added to it is a constant of the graph.
    """
    import torch

    from regauge.models.inference_modules import FEWEST_ROWS, examples, tensors

    class Called(torch.nn.Module):
        """The program, with weights that are handed to it."""

        def forward(self, weights: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Tensor:
            given = dict(zip(names, weights, strict=True))
            output: Tensor = torch.func.functional_call(program, given, inputs)
            return output

    found = tensors(program)
    names = tuple(name for name in tensors(job.program) if name in found)
    weights = tuple(found[name].detach() for name in names)
    some = job.shapes[len(job.shapes) // 2]
    inputs = examples(job.inputs, max(some.rows, FEWEST_ROWS), some.length)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own code
        graph = torch.export.export(
            Called().eval(),
            (weights, inputs),
            dynamic_shapes=((None,) * len(names), _dynamic(job)),
            strict=False,
        )
    return Lifted(graph, names)


def lacking(extra: str, *libraries: str) -> str | None:
    """Return which library is not installed and what installs it, or None; imports nothing."""
    for name in libraries:
        try:
            found = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):  # of what stands in the way of an import
            found = False
        if not found:
            return f"{name} is not installed: pip install 'regauge[{extra}]'"
    return None


def _dynamic(job: Job) -> tuple[dict[int, Any], ...]:
    """Return torch.export's description of the sizes that change."""
    from torch.export import Dim

    most = {
        ROWS: max(shape.rows for shape in job.shapes),
        LENGTH: max(shape.length for shape in job.shapes),
    }
    sizes: dict[Any, Any] = {
        name: Dim(name, min=1, max=limit) for name, limit in most.items() if limit > 1
    }
    return tuple(
        {place: sizes[size] for place, size in enumerate(each.shape) if size in sizes}
        for each in job.inputs
    )
