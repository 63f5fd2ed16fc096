"""Compiles the program with torch.compile at the first call: for development, without an export."""

from __future__ import annotations

from typing import ClassVar

from regauge.accelerators import Accelerator, Availability
from regauge.inference.backends import Backend, ExecutionContext, Payload, Runner


class TorchCompileBackend(Backend):
    """torch.compile; the first batch takes seconds, and again after each weight load."""

    is_ahead_of_time: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    @classmethod
    def available(cls) -> Availability:
        return Availability(1, "part of torch")

    def obstacle(self, accelerator: Accelerator) -> str | None:
        return accelerator.compile_obstacle()

    def load(self, payload: Payload, context: ExecutionContext) -> Runner:
        from regauge.inference.backends._runners import ModuleRunner

        accelerator = context.accelerator
        runner = ModuleRunner(payload, context)
        return runner.compile(
            dynamic=accelerator.has_dynamic_shapes,
            backend=accelerator.compile_backend(),
            options=accelerator.compile_options() or None,
        )
