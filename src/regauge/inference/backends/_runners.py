"""Runners that several backends use: the module itself, and one graph for each declared shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from regauge.models.inference_modules import example_inputs
from regauge.models.io_spec import LENGTH, ROWS
from regauge.models.tensors import move_module
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch import Tensor

    from regauge.inference.backends import ExecutionContext, Payload, Shape
    from regauge.models.io_spec import TensorSpec

    Compute = Callable[[Shape, tuple[Tensor, ...]], Tensor]
    """Computes a batch of a declared shape; inputs and output are on the CPU."""


class ModuleRunner:
    """Calls a program as a module on a device, optionally compiled at the first call."""

    def __init__(self, payload: Payload, context: ExecutionContext) -> None:
        context.accelerator.set_precision(payload.precision)
        self.program = payload.build_program().eval()
        """The module on the device."""
        move_module(self.program, context.device)
        self._context = context
        self._graphs_before = context.accelerator.num_compiled_graphs()
        self._callable: Any = self.program

    def compile(self, **options: Any) -> ModuleRunner:
        """Compile the program with torch.compile at the first call; return this runner."""
        self._callable = torch.compile(self.program, **options)
        return self

    @torch.no_grad()
    def __call__(self, *inputs: np.ndarray | Tensor) -> Tensor:
        """Return the program's output, on the device."""
        on_host = map(torch.as_tensor, inputs)
        on_device = [value.to(self._context.device, non_blocking=True) for value in on_host]
        output: Tensor = self._callable(*on_device)
        self._context.accelerator.end_microbatch()
        return output

    def in_static_shapes(self, payload: Payload) -> StaticShapeRunner:
        """Return a runner for the payload's shapes, each of which was computed once."""

        def compute(_: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
            return self(*inputs).cpu()

        runner = StaticShapeRunner(payload.inputs, payload.shapes, compute, self.num_graphs)
        return runner.warm_up()

    def num_graphs(self) -> int:
        """Return how many graphs were compiled since the program was loaded."""
        return self._context.accelerator.num_compiled_graphs() - self._graphs_before


class StaticShapeRunner:
    """Computes every batch in a declared shape, so that no graph is ever added.

    Outputs are on the CPU for two reasons. Cutting off rows on a device can require another graph,
    and a device that replays graphs overwrites the previous output.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        shapes: Sequence[Shape],
        compute: Compute,
        count_graphs: Callable[[], int],
    ) -> None:
        """`count_graphs` returns how many graphs this process has built."""
        self._inputs = tuple(inputs)
        self._shapes = sorted(set(shapes))
        self._compute = compute
        self._count_graphs = count_graphs

    def warm_up(self) -> StaticShapeRunner:
        """Compute every declared shape once, which builds or loads the graph; return the runner."""
        for shape in self._shapes:
            self._compute(shape, example_inputs(self._inputs, *shape))
        return self

    def __call__(self, *inputs: np.ndarray) -> Tensor:
        """Return the program's output, [rows, ...].

        A batch with fewer rows than the declared shape is padded with empty rows. Raises DataError
        if no declared shape can hold the batch.
        """
        tensors = tuple(map(torch.as_tensor, inputs))
        rows, shape = self._select_shape(tensors)
        pairs = zip(self._inputs, tensors, strict=True)
        padded = tuple(_pad_rows(spec, value, shape.rows) for spec, value in pairs)
        return self._compute(shape, padded)[:rows]

    def num_graphs(self) -> int:
        return self._count_graphs()

    def _select_shape(self, inputs: Sequence[Tensor]) -> tuple[int | None, Shape]:
        """Return a batch's rows, and the smallest shape of its length that holds them."""
        rows, length = (self._find_size(inputs, name) for name in (ROWS, LENGTH))
        for shape in self._shapes:
            if length in {None, shape.length} and (rows or 0) <= shape.rows:
                return rows, shape
        declared = ", ".join(f"{shape.rows} x {shape.length}" for shape in self._shapes)
        problem = f"no graph for {rows} rows of {length} tokens; the artifact has {declared}"
        raise DataError(problem, "export it again with other buckets")

    def _find_size(self, inputs: Sequence[Tensor], name: str) -> int | None:
        """Return a variable dimension's size in a batch, or None if no input has it."""
        for spec, value in zip(self._inputs, inputs, strict=True):
            if name in spec.shape:
                return value.shape[spec.shape.index(name)]
        return None


def _pad_rows(spec: TensorSpec, value: Tensor, rows: int) -> Tensor:
    if ROWS not in spec.shape:
        return value
    axis = spec.shape.index(ROWS)
    num_missing = rows - value.shape[axis]
    if not num_missing:
        return value
    sizes = [num_missing if index == axis else size for index, size in enumerate(value.shape)]
    return torch.cat([value, value.new_zeros(sizes)], axis)
