"""Batches in the shapes that graphs exist for: shared by what makes one graph for each shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regauge.errors import DataError
from regauge.models.inference_modules import examples
from regauge.models.io_spec import LENGTH, ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from regauge.backends import Shape
    from regauge.models.io_spec import Input

    Compute = Callable[[Shape, tuple[Tensor, ...]], Tensor]
    """Computes inputs of a declared shape, from the CPU to the CPU."""


class Static:
    """A runner that computes every batch in a declared shape, so that no graph is ever added.

    Its answers are on the CPU: to cut rows off on a device can be one more graph, and a device that
    replays graphs writes the next answer over the one before.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        shapes: Sequence[Shape],
        compute: Compute,
        graphs: Callable[[], int],
    ) -> None:
        """Take what computes, and what says how many graphs were made in this process."""
        self._inputs = tuple(inputs)
        self._shapes = sorted(set(shapes))
        self._compute = compute
        self._graphs = graphs

    def warmed(self) -> Static:
        """Compute every declared shape once, which makes or loads its graph; return the runner."""
        for shape in self._shapes:
            self._compute(shape, examples(self._inputs, *shape))
        return self

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what the program does, [rows, …].

        Fewer rows than are declared have empty ones below them. Raises DataError for a batch that
        no declared shape holds.
        """
        rows, shape = self._placed(inputs)
        pairs = zip(self._inputs, inputs, strict=True)
        filled = tuple(_filled(each, value, shape.rows) for each, value in pairs)
        return self._compute(shape, filled)[:rows]

    def graphs(self) -> int:
        """Return how many graphs were made in this process."""
        return self._graphs()

    def _placed(self, inputs: Sequence[Tensor]) -> tuple[int | None, Shape]:
        """Return the rows of a batch, and the smallest shape of its length that holds them."""
        rows, length = (self._size(inputs, name) for name in (ROWS, LENGTH))
        for shape in self._shapes:
            if length in {None, shape.length} and (rows or 0) <= shape.rows:
                return rows, shape
        declared = ", ".join(f"{shape.rows} x {shape.length}" for shape in self._shapes)
        problem = f"no graph is there for {rows} rows of {length} tokens: they are {declared}"
        raise DataError(problem, "export again with other shapes")

    def _size(self, inputs: Sequence[Tensor], name: str) -> int | None:
        """Return how large a size that changes is in a batch, or None where no input has it."""
        for each, value in zip(self._inputs, inputs, strict=True):
            if name in each.shape:
                return value.shape[each.shape.index(name)]
        return None


def _filled(described: Input, value: Tensor, rows: int) -> Tensor:
    """Return an input with zeros below its rows."""
    if ROWS not in described.shape:
        return value
    axis = described.shape.index(ROWS)
    missing = rows - value.shape[axis]
    if not missing:
        return value
    sizes = [missing if place == axis else size for place, size in enumerate(value.shape)]
    return torch.cat([value, value.new_zeros(sizes)], axis)
