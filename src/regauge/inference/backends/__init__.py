"""Inference backends: each file is one way to compile a program and run the result.

A backend gets a `CompileJob` (a module, its input tensors and their shapes) and writes a payload
into a folder; `load` turns a `Payload` into a `Runner`. It knows nothing about artifacts, texts or
tasks. `_int8/` quantizes linear layers and `_model_parallel/` runs a program on several devices;
several backends share these and the other `_` files. Files here import their libraries inside their
methods.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from regauge.accelerators import claim_device
from regauge.config import Choice
from regauge.system import choices
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import torch
    from torch import Tensor, nn

    from regauge.accelerators import Accelerator, Availability, Precision
    from regauge.models.io_spec import TensorSpec

Quantization = Literal["none", "int8"]
IsaLevel = Literal["x86-64-v3", "x86-64-v4"]
"""x86-64 microarchitecture levels, as named by the psABI."""


class Shape(NamedTuple):
    """Batch shape: rows, and tokens per row."""

    rows: int
    length: int


@dataclass(frozen=True)
class ExecutionContext:
    """A device that runs programs for this process."""

    accelerator: Accelerator
    index: int
    """Device index."""
    threads: int
    """CPU threads on the host."""

    @cached_property
    def device(self) -> torch.device:
        """The device, claimed at the first access; imports torch."""
        return claim_device(self.accelerator, self.index, self.threads)


@dataclass(frozen=True)
class Calibration:
    """Real program inputs, which determine the quantization plan once for all backends."""

    program: nn.Module
    """The program in fp32, in evaluation mode on the CPU."""
    samples: Sequence[tuple[Tensor, ...]]
    """Input batches."""
    max_quality_loss: float
    """Share of the quality quantization may lose."""
    plans: dict[int, Any] = field(default_factory=dict)
    """Largest integer weight -> plan, so far."""


@dataclass(frozen=True)
class CompileJob:
    program: nn.Module
    """The program in evaluation mode on the CPU, in the compute dtype."""
    inputs: Sequence[TensorSpec]
    shapes: Sequence[Shape]
    """Largest batch for each length."""
    precision: Precision
    quantization: Quantization
    level: IsaLevel | None
    """Instruction set to compile for; None for everything this machine has."""
    calibration: Calibration


@dataclass(frozen=True)
class Payload:
    """An export's result, with everything needed to run it."""

    folder: Path
    inputs: Sequence[TensorSpec]
    shapes: Sequence[Shape]
    precision: Precision
    read_weights: Callable[[], Mapping[str, Tensor]]
    """Read the program's weights and buffers, on the CPU, by name."""
    build_program: Callable[[], nn.Module]
    """Build the program and load its weights, for backends that do not compile ahead of time."""
    weights_file: Path | None = None
    """Safetensors file with the weights, which `read_arrays` reads without torch."""

    def read_arrays(self) -> dict[str, np.ndarray]:
        """Return the weights as arrays; bf16 becomes fp32."""
        if self.weights_file is not None:
            from regauge.system.safetensors_io import map_arrays

            return map_arrays(self.weights_file)
        import torch

        weights = {name: value.detach() for name, value in self.read_weights().items()}
        return {
            name: (value.float() if value.dtype == torch.bfloat16 else value).contiguous().numpy()
            for name, value in weights.items()
        }


class Runner(Protocol):
    """A loaded program to call."""

    def __call__(self, *inputs: np.ndarray) -> np.ndarray | Tensor:
        """Return the program's output: a tensor, perhaps on a device, or without torch an array."""
        ...

    def num_graphs(self) -> int:
        """Return how many graphs this process has built for the calls so far."""
        return 0


def to_array(output: np.ndarray | Tensor) -> np.ndarray:
    """Copy a runner's output to the host, in fp32."""
    import numpy as np

    if isinstance(output, np.ndarray):
        return output
    array: np.ndarray = output.cpu().float().numpy()
    return array


class Backend(Choice):
    """A way to compile and run a program."""

    is_ahead_of_time: ClassVar[bool] = True
    """Whether the export compiles the program, instead of the first use."""
    supports_loops: ClassVar[bool] = False
    """Whether it runs programs with data-dependent loops, such as text generation."""
    has_dynamic_shapes: ClassVar[bool] = True
    """Whether one graph serves all shapes."""
    compiles_in_seconds: ClassVar[bool] = False
    """Whether a small model compiles within seconds, because no machine code is written."""
    shares_payload: ClassVar[bool] = False
    """Whether the precision and threads are chosen when a payload is loaded."""
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    """Distributions whose versions determine the payload."""

    @property
    def num_devices(self) -> int:
        """How many devices a program runs on, each with a separate process."""
        return 1

    @classmethod
    def available(cls) -> Availability:
        """Return whether this machine can use the backend, with the reason; never raises."""
        raise NotImplementedError

    def obstacle(self, accelerator: Accelerator) -> str | None:
        """Return why an accelerator cannot use the backend, or None."""
        raise NotImplementedError

    def supported_formats(
        self, accelerator: Accelerator
    ) -> tuple[tuple[Precision, Quantization], ...]:
        """Return supported (precision, quantization) pairs, the fastest first."""
        return tuple((precision, "none") for precision in accelerator.precisions())

    def export(self, job: CompileJob, context: ExecutionContext, folder: Path) -> None:
        """Compile a program and write the result into an empty folder."""
        del job, context, folder

    def load(self, payload: Payload, context: ExecutionContext) -> Runner:
        """Load a payload on a device."""
        raise NotImplementedError

    def required_features(
        self, context: ExecutionContext, level: IsaLevel | None
    ) -> frozenset[str]:
        """Return the accelerator features a machine needs to run the payload.

        `level` is the export's instruction set. Raises SettingsError if the backend cannot compile
        for a named instruction set.
        """
        if level is not None:
            problem = f"backend '{self.kind}' cannot compile for a named instruction set"
            raise SettingsError(problem, "leave --portable out, or choose another backend")
        del context
        return frozenset()

    def versions(self) -> dict[str, str]:
        """Return the versions of the installed `packages`."""
        versions = {name: _find_version(name) for name in self.packages}
        return {name: number for name, number in versions.items() if number}


def check_usable(backend: Backend, accelerator: Accelerator) -> None:
    """Raise SettingsError with the usable kinds if a backend is not usable here."""
    availability = backend.available()
    is_unusable = availability.fitness == 0
    reason = availability.reason if is_unusable else backend.obstacle(accelerator)
    if reason is not None:
        usable = ", ".join(other.kind for other in list_usable(accelerator))
        problem = f"backend '{backend.kind}' is not usable here: {reason}"
        raise SettingsError(problem, f"use one of: {usable}")


def list_usable(accelerator: Accelerator) -> list[Backend]:
    """Return the backends an accelerator can use on this machine."""
    backends: list[Any] = [choices.load("backends", kind)() for kind in choices.names("backends")]
    return [
        backend
        for backend in backends
        if backend.available().fitness > 0 and backend.obstacle(accelerator) is None
    ]


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
