"""Intel Gaudi: one graph per bucket, built at load time.

Written from the Gaudi software documentation, 1.21 and later; not run on the hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from regauge.inference.backends import Backend, ExecutionContext, Payload, Runner, Shape
from regauge.system import choices

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.accelerators import Accelerator, Availability


class GaudiBackend(Backend):
    """HPU graphs if the accelerator's mode is lazy, and torch.compile if it is eager."""

    is_ahead_of_time: ClassVar[bool] = False
    has_dynamic_shapes: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("torch", "habana_torch_plugin", "transformers")

    tensor_cache: bool = False
    """Keep HPU graph tensors between replays; this needs more memory."""

    @classmethod
    def available(cls) -> Availability:
        availability: Availability = choices.load("accelerators", "gaudi").available()
        return availability

    def obstacle(self, accelerator: Accelerator) -> str | None:
        if accelerator.kind != "gaudi":
            return f"it builds graphs for gaudi, not for {accelerator.kind}"
        return None

    def load(self, payload: Payload, context: ExecutionContext) -> Runner:
        """Load a payload and build every declared shape's graph."""
        if context.accelerator.is_lazy:
            return self._record_graphs(payload, context)
        return _compile_graphs(payload, context)

    def _record_graphs(self, payload: Payload, context: ExecutionContext) -> Runner:
        """Return a runner that replays HPU graphs, which exist only in lazy mode."""
        import torch
        from habana_frameworks.torch import hpu

        from regauge.inference.backends._runners import StaticShapeRunner
        from regauge.models.tensors import move_module

        context.accelerator.set_precision(payload.precision)
        program = payload.build_program().eval()
        move_module(program, context.device)
        graphs = hpu.wrap_in_hpu_graph(
            program,
            disable_tensor_cache=not self.tensor_cache,
            max_graphs=len(payload.shapes),
        )
        recorded: set[Shape] = set()

        @torch.no_grad()
        def compute(shape: Shape, inputs: tuple[Tensor, ...]) -> Tensor:
            recorded.add(shape)
            output: Tensor = graphs(*(value.to(context.device) for value in inputs))
            return output.to("cpu", copy=True)  # the next replay writes to the same address

        runner = StaticShapeRunner(payload.inputs, payload.shapes, compute, lambda: len(recorded))
        return runner.warm_up()


def _compile_graphs(payload: Payload, context: ExecutionContext) -> Runner:
    """Compile the program for each shape with torch.compile and the vendor's backend."""
    from torch._dynamo import config

    from regauge.inference.backends._runners import ModuleRunner

    # Beyond this limit (default: 8 for one function), torch would run all other shapes eagerly.
    config.recompile_limit += len(payload.shapes)
    backend = context.accelerator.compile_backend()
    module = ModuleRunner(payload, context).compile(backend=backend, dynamic=False)
    return module.in_static_shapes(payload)
