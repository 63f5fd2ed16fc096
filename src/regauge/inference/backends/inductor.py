"""AOTInductor: a shared library for any number of rows and any length, built by torch.export.

A payload is machine code, so loading it executes it. The weights are in a separate file, which is
memory-mapped.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from regauge.accelerators import Accelerator, Availability
from regauge.inference.backends import (
    Backend,
    CompileJob,
    ExecutionContext,
    IsaLevel,
    Payload,
    Runner,
)
from regauge.system.children import run_tool
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import torch
    from torch import Tensor

PACKAGE_FILE = "program.pt2"
LOAD_CODE = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"
LOAD_SECONDS = 300.0
"""Timeout for a trial load in a child process."""
V3_FEATURES = frozenset({"x86_64", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
LEVELS: dict[IsaLevel, tuple[frozenset[str], int]] = {
    "x86-64-v3": (V3_FEATURES, 256),
    "x86-64-v4": (V3_FEATURES | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}, 512),
}
"""x86-64 level -> CPU features by their kernel names, and vector bits."""


class InductorBackend(Backend):
    """One library for all shapes, compiled ahead of time."""

    peer_names: ClassVar[tuple[str, ...]] = ("aot", "aot_inductor")

    @classmethod
    def available(cls) -> Availability:
        return Availability(2, "part of torch")

    def obstacle(self, accelerator: Accelerator) -> str | None:
        if not accelerator.supports_aot:
            return f"AOTInductor does not support {accelerator.kind}"
        return None

    def required_features(
        self, context: ExecutionContext, level: IsaLevel | None
    ) -> frozenset[str]:
        return context.accelerator.features() if level is None else LEVELS[level][0]

    def export(self, job: CompileJob, context: ExecutionContext, folder: Path) -> None:
        import torch

        from regauge.inference.backends._weight_inputs import build_dynamic_shapes
        from regauge.models.inference_modules import MIN_TRACE_ROWS, example_inputs

        if obstacle := context.accelerator.compile_obstacle():
            raise SettingsError(obstacle, "install one, or choose another backend")
        shape = job.shapes[len(job.shapes) // 2]
        inputs = example_inputs(job.inputs, max(shape.rows, MIN_TRACE_ROWS), shape.length)
        inputs = tuple(value.to(context.device) for value in inputs)
        job.program.to(context.device)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own code
            exported = torch.export.export(
                job.program, inputs, dynamic_shapes=build_dynamic_shapes(job), strict=False
            )
            exported = exported.run_decompositions({torch.ops.aten.linear.default: _linear})
            torch._inductor.aoti_compile_and_package(  # noqa: SLF001 - documented by torch
                exported,
                package_path=str(folder / PACKAGE_FILE),
                inductor_configs=_build_options(job.level, context.threads),
            )
        _check_load(folder / PACKAGE_FILE)

    def load(self, payload: Payload, context: ExecutionContext) -> Runner:
        import torch

        context.accelerator.set_precision(payload.precision)
        library = torch._inductor.aoti_load_package(str(payload.folder / PACKAGE_FILE))  # noqa: SLF001
        weights = payload.read_weights()
        on_device = {name: weights[name].to(context.device) for name in library.get_constant_fqns()}
        library.load_constants(on_device, check_full_update=True, user_managed=True)
        return _LibraryRunner(library, on_device, context.device)


class _LibraryRunner(Runner):
    def __init__(self, library: Any, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self._library = library
        self._weights = weights  # the library only has pointers to them
        self._device = device

    def __call__(self, *inputs: np.ndarray) -> Tensor:
        import torch

        on_host = map(torch.as_tensor, inputs)
        output: Tensor = self._library(*(value.to(self._device) for value in on_host))
        return output


def _check_load(package: Path) -> None:
    """Load a package in a child process first, because a crash would end this process.

    Raises RuntimeError if the child fails.
    """
    command = [sys.executable, "-c", LOAD_CODE, str(package)]
    done = run_tool(command, LOAD_SECONDS, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        reason = f"killed by signal {-done.returncode}" if done.returncode < 0 else lines[0]
        raise RuntimeError(f"the compiled package cannot be loaded: {reason}")


def _linear(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add the bias after the product, to fuse it with the following operation.

    A fused product and bias would first write the bias to the output, which takes a tenth of a
    small model's time.
    """
    import torch

    flat = torch.ops.aten.mm.default(value.reshape(-1, value.shape[-1]), weight.t())
    output: Tensor = flat.reshape(*value.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias


def _build_options(level: IsaLevel | None, threads: int) -> dict[str, Any]:
    import torch._inductor.config as settings

    options: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        "cpp.threads": threads,
    }
    if level is not None:
        if not hasattr(settings.cpp, "march"):
            problem = "this torch can only compile for the current machine"
            raise SettingsError(problem, "install torch 2.10 or later, or leave --portable out")
        options |= {"cpp.march": level, "cpp.simdlen": LEVELS[level][1]}
    return options
