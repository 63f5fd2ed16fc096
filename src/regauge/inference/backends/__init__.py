"""Inference backends: each file is one way to compile a program and to run the result.

A backend gets a `CompileJob` (a module, its input tensors and their shapes) and writes a payload
into a folder; `load` turns a `Payload` into a `Runner`. It knows nothing about artifacts, texts or
tasks. `_int8/` quantizes linear layers and `_model_parallel/` runs a program on several devices;
several backends share these and the other `_` files. Files here import their libraries inside their
methods. This package may import `models`, `accelerators` and the foundation modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from regauge.config import Choice
from regauge.system import choices
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from regauge.accelerators import Accelerator, Availability, Precision
    from regauge.models.io_spec import TensorSpec

Quantization = Literal["none", "int8"]
IsaLevel = Literal["x86-64-v3", "x86-64-v4"]
"""Microarchitecture levels of x86-64, as named by the psABI."""


class Shape(NamedTuple):
    """The shape of a batch, in rows and tokens per row."""

    rows: int
    length: int


@dataclass(frozen=True)
class ExecutionContext:
    """A device that this process has claimed to run programs on."""

    accelerator: Accelerator
    device: torch.device
    threads: int
    """CPU threads of the host."""


@dataclass(frozen=True)
class Calibration:
    """Real inputs of a program, which determine its quantization plan once for all backends."""

    program: nn.Module
    """The program in fp32, in evaluation mode on the CPU."""
    samples: Sequence[tuple[Tensor, ...]]
    """Batches of inputs."""
    max_quality_loss: float
    """Share of the quality that quantization may lose."""
    plans: dict[int, Any] = field(default_factory=dict)
    """The plans so far, by the largest integer that a weight may have."""


@dataclass(frozen=True)
class CompileJob:
    """A program to compile."""

    program: nn.Module
    """The program in evaluation mode on the CPU, in the dtype that it computes in."""
    inputs: Sequence[TensorSpec]
    shapes: Sequence[Shape]
    """The largest batch of each length."""
    precision: Precision
    quantization: Quantization
    level: IsaLevel | None
    """The instruction set to compile for; None for all instructions of this machine."""
    calibration: Calibration


@dataclass(frozen=True)
class Payload:
    """The result of an export, with everything that is needed to run it."""

    folder: Path
    inputs: Sequence[TensorSpec]
    shapes: Sequence[Shape]
    precision: Precision
    read_weights: Callable[[], Mapping[str, Tensor]]
    """Read the program's weights and buffers, on the CPU, by name."""
    build_program: Callable[[], nn.Module]
    """Build the program with its weights, for backends that do not compile ahead of time."""


class Runner(Protocol):
    """A loaded program that can be called."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the output of the program, on the CPU or a device; inputs are on the CPU."""
        ...

    def num_graphs(self) -> int:
        """Return the number of graphs that this process has built for the calls so far."""
        ...


class Backend(Choice):
    """A way to compile and run a program."""

    is_ahead_of_time: ClassVar[bool] = True
    """Whether the program is compiled by the export instead of at its first use."""
    supports_loops: ClassVar[bool] = False
    """Whether it runs programs with data-dependent loops, such as text generation."""
    has_dynamic_shapes: ClassVar[bool] = True
    """Whether one graph serves all shapes."""
    compiles_in_seconds: ClassVar[bool] = False
    """Whether a small model is compiled within seconds, because no machine code is written."""
    shares_payload: ClassVar[bool] = False
    """Whether the precision and the threads are chosen when a payload is loaded."""
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    """Distributions whose versions determine the payload."""

    @property
    def num_devices(self) -> int:
        """The number of devices that a program runs on, each with a separate process."""
        return 1

    @classmethod
    def available(cls) -> Availability:
        """Return whether this machine can use the backend, with the reason; never raises."""
        raise NotImplementedError

    def obstacle(self, accelerator: Accelerator) -> str | None:
        """Return the reason why an accelerator cannot use the backend, or None."""
        raise NotImplementedError

    def supported_formats(
        self, accelerator: Accelerator
    ) -> tuple[tuple[Precision, Quantization], ...]:
        """Return the supported pairs of precision and quantization, the fastest first."""
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
        """Return the accelerator features that a machine needs to run the payload.

        `level` is the instruction set of the export. Raises SettingsError if the backend cannot
        compile for a named instruction set.
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
    """Return the backends that an accelerator can use on this machine."""
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
