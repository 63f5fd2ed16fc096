"""AWS Inferentia and Trainium: one graph per bucket, compiled ahead of time for NeuronCores.

Written from the Neuron SDK documentation, 2.27 to 2.31; not run on the hardware. The Inf1 SDK is
archived and needs torch 1.13, so it is not available with any torch supported by Regauge.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from regauge.accelerators import Availability
from regauge.accelerators._environment import torch_version_obstacle
from regauge.inference.backends import Backend, CompileJob, ExecutionContext, Payload, Runner
from regauge.system import choices
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator, Precision
    from regauge.inference.backends import IsaLevel, Quantization
    from regauge.inference.backends._neuron import NeuronOptions

DEVICE = Path("/dev/neuron0")
GENERATIONS = ("inf2", "trn1", "trn2")
"""Generations to compile graphs for, as named in the accelerator's features."""
INF1_ACCELERATOR = "cpu"
"""torch sees Inf1 as a CPU: graph inputs and outputs are on the host."""
FAST_MATH = {
    ("matmult", "bf16"): "fp32-cast-matmult-bf16",
    ("matmult", "fp16"): "fp32-cast-matmult-fp16",
    ("all", "bf16"): "fp32-cast-all",
    ("all", "fp16"): "fp32-cast-all-fp16",
}
"""Inf1 compiler option for (`auto_cast`, `auto_cast_type`) (neuron-cc reference)."""


class NeuronBackend(Backend):
    """Traced graphs with separate weights; several cores share rows, weights or layers."""

    has_dynamic_shapes: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = (
        "torch",
        "torch_neuronx",
        "neuronx_cc",
        "neuronx_distributed",
        "torch_neuron",
        "neuron_cc",
    )

    cores: int = Field(default=1, ge=1)
    """NeuronCores per batch, from the first one that the process can use."""
    parallelism: Literal["data", "tensor", "pipeline"] = "data"
    """How cores share a batch: by rows, by each layer's weights, or by whole layers (Inf1 only)."""
    inline_weights: bool = False
    """Compile the weights into each graph, which was faster in some SDK releases."""
    auto_cast: Literal["none", "matmult", "all"] = "none"
    """fp32 operations that the compiler may cast."""
    auto_cast_type: Literal["bf16", "fp16", "tf32"] = "bf16"
    """Target type of the cast."""
    optlevel: Literal[1, 2, 3] = 2
    """Compiler optimization level."""
    model_type: Literal["transformer", "generic", "unet-inference"] = "transformer"
    """Model family that the compiler optimizes for."""
    compiler_flags: tuple[str, ...] = ()
    """Additional compiler arguments, such as `--enable-fast-loading-neuron-binaries`."""

    @classmethod
    def available(cls) -> Availability:
        if not _is_inf1_sdk():
            availability: Availability = choices.load("accelerators", "neuron").available()
            return availability
        if obstacle := torch_version_obstacle("torch_neuron"):
            return Availability(0, obstacle)
        if not DEVICE.exists():
            return Availability(0, f"the Neuron driver shows no device ({DEVICE})")
        return Availability(2, f"torch_neuron {version('torch_neuron')} and {DEVICE}")

    def obstacle(self, accelerator: Accelerator) -> str | None:
        is_inf1 = _is_inf1_sdk()
        kind = INF1_ACCELERATOR if is_inf1 else "neuron"
        if accelerator.kind != kind:
            return f"it compiles for {kind}, not for {accelerator.kind}"
        if self.parallelism == "pipeline" and not is_inf1:
            return "only Inf1 supports pipeline parallelism"
        if self.parallelism == "tensor" and is_inf1:
            return "Inf1 does not support tensor parallelism"
        if self.parallelism == "tensor" and importlib.util.find_spec("neuronx_distributed") is None:
            return "tensor parallelism needs neuronx_distributed, which is not installed"
        return None

    def supported_formats(
        self, accelerator: Accelerator
    ) -> tuple[tuple[Precision, Quantization], ...]:
        return (("fp32", "none"),) if _is_inf1_sdk() else super().supported_formats(accelerator)

    def required_features(
        self, context: ExecutionContext, level: IsaLevel | None
    ) -> frozenset[str]:
        """Return the device kind and generation; raises SettingsError if it is unknown.

        For Inf1 it is only the kind, since the device does not report more.
        """
        super().required_features(context, level)
        kind = context.accelerator.kind
        if _is_inf1_sdk():
            return frozenset({kind})
        return frozenset({kind, _find_generation(context.accelerator)})

    def export(self, job: CompileJob, context: ExecutionContext, folder: Path) -> None:
        """Write the graphs; raises SettingsError if the cores cannot share the rows or heads."""
        from regauge.inference.backends import _neuron

        options = self._build_options(context.accelerator)
        if _is_inf1_sdk():
            _neuron.export_inf1(job, options, folder)
        elif self.parallelism == "tensor":
            _neuron.export_tensor_parallel(job, options, folder)
        else:
            _neuron.export_traced(job, options, folder)

    def load(self, payload: Payload, context: ExecutionContext) -> Runner:
        """Load a payload and compute every graph once."""
        from regauge.inference.backends import _neuron
        from regauge.inference.backends._runners import StaticShapeRunner

        options = self._build_options(context.accelerator)
        if _is_inf1_sdk():
            compute = _neuron.load_inf1(payload, options)
        elif self.parallelism == "tensor":
            compute = _neuron.load_tensor_parallel(payload, options)
        else:
            compute = _neuron.load_traced(payload, options)
        return StaticShapeRunner(payload.inputs, payload.shapes, compute, lambda: 0).warm_up()

    def _build_options(self, accelerator: Accelerator) -> NeuronOptions:
        from regauge.inference.backends._neuron import NeuronOptions

        if _is_inf1_sdk():
            num_replicas = self.cores if self.parallelism == "data" else 1
            return NeuronOptions(self._inf1_flags(), num_replicas, inline_weights=True)
        flags = self._flags(_find_generation(accelerator))
        return NeuronOptions(flags, self.cores, inline_weights=self.inline_weights)

    def _flags(self, target: str) -> tuple[str, ...]:
        """Return the arguments for neuronx-cc, in the reference's order."""
        return (
            *("--target", target),
            *("--model-type", self.model_type),
            *("--auto-cast", self.auto_cast),
            *(("--auto-cast-type", self.auto_cast_type) if self.auto_cast != "none" else ()),
            *("--optlevel", str(self.optlevel)),
            *self.compiler_flags,
        )

    def _inf1_flags(self) -> tuple[str, ...]:
        """Return the arguments for neuron-cc, without optimization level and model type."""
        fast_math = FAST_MATH.get((self.auto_cast, self.auto_cast_type))
        if fast_math is None and self.auto_cast != "none":
            problem = f"Inf1 does not support auto_cast_type = '{self.auto_cast_type}'"
            raise SettingsError(problem, "set auto_cast_type to bf16 or fp16")
        pipeline = ("--neuroncore-pipeline-cores", str(self.cores))
        return (
            *("--fast-math", fast_math or "none"),
            *(pipeline if self.parallelism == "pipeline" else ()),
            *self.compiler_flags,
        )


def _is_inf1_sdk() -> bool:
    neuronx, neuron = map(importlib.util.find_spec, ("torch_neuronx", "torch_neuron"))
    return neuronx is None and neuron is not None


def _find_generation(accelerator: Accelerator) -> str:
    """Return the chip generation to compile for; raises SettingsError if it is unknown."""
    generations = accelerator.features() & set(GENERATIONS)
    if not generations:
        problem = "the chip generation to compile for is unknown"
        raise SettingsError(problem, f"set accelerator.target to one of {', '.join(GENERATIONS)}")
    return min(generations)
