"""What a program is compiled with: one choice per file, each of which writes a payload and runs it.

A backend knows nothing of artifacts, texts or tasks: it is given a module, the tensors that this
takes, the shapes that there will be, and a folder. Files here import their libraries in methods.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from regauge import choices
from regauge.config import Choice
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from regauge.accelerators import Accelerator, Availability, Precision
    from regauge.models.io_spec import Input

Quantized = Literal["no", "int8"]
Level = Literal["x86-64-v3", "x86-64-v4"]
"""Sets of instructions by the psABI's names for levels of x86-64."""


class Shape(NamedTuple):
    """One shape of a batch."""

    rows: int
    length: int


@dataclass(frozen=True)
class Site:
    """Where a program is computed: a device that this process has claimed."""

    accelerator: Accelerator
    device: torch.device
    threads: int
    """Of the host."""


@dataclass(frozen=True)
class Calibration:
    """Real inputs of a program: by them scales of integers are chosen, once for all backends."""

    program: nn.Module
    """In evaluation mode on the CPU, in fp32."""
    samples: Sequence[tuple[Tensor, ...]]
    bound: float
    """Share of the quality of answers that integers may lose."""
    chosen: dict[int, Any] = field(default_factory=dict)
    """What was chosen so far, by the largest integer of a weight."""


@dataclass(frozen=True)
class Job:
    """A program that is to be compiled."""

    program: nn.Module
    """In evaluation mode on the CPU, in the type that it computes in."""
    inputs: Sequence[Input]
    shapes: Sequence[Shape]
    """The largest of each length."""
    precision: Precision
    quantized: Quantized
    level: Level | None
    """The instruction set that it is compiled for; None for all that this machine has."""
    calibration: Calibration


@dataclass(frozen=True)
class Payload:
    """What was compiled, and what it is run with."""

    folder: Path
    inputs: Sequence[Input]
    shapes: Sequence[Shape]
    precision: Precision
    weights: Callable[[], Mapping[str, Tensor]]
    """Read the program's weights and buffers, on the CPU, by name."""
    program: Callable[[], nn.Module]
    """Make the program itself, with its weights, for what does not compile ahead of time."""


class Runner(Protocol):
    """A program that can be computed."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what a program does; inputs are on the CPU, the output may be on a device."""
        ...

    def graphs(self) -> int:
        """Return how many graphs were made in this process to compute what was asked so far."""
        ...


class Backend(Choice):
    """A way to compute a program."""

    ahead: ClassVar[bool] = True
    """Whether a payload is compiled when it is exported, and not when it is first used."""
    looping: ClassVar[bool] = False
    """Whether it computes programs that go round until they are done, such as those that write."""
    symbolic: ClassVar[bool] = True
    """Whether one graph serves all shapes."""
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    """Distributions whose versions decide what a payload is."""

    @property
    def devices(self) -> int:
        """How many devices one program lies on, each with a process of its own."""
        return 1

    @classmethod
    def available(cls) -> Availability:
        """Return whether it can be used here and why; never raises."""
        raise NotImplementedError

    def fits(self, accelerator: Accelerator) -> str | None:
        """Return why it is not for an accelerator, or None."""
        raise NotImplementedError

    def forms(self, accelerator: Accelerator) -> tuple[tuple[Precision, Quantized], ...]:
        """Return what it computes in on an accelerator, the fastest first."""
        return tuple((precision, "no") for precision in accelerator.precisions())

    def export(self, job: Job, site: Site, folder: Path) -> None:
        """Write a payload into an empty folder."""
        del job, site, folder

    def load(self, payload: Payload, site: Site) -> Runner:
        """Return what computes a payload."""
        raise NotImplementedError

    def needs(self, site: Site, level: Level | None) -> frozenset[str]:
        """Return what a payload needs of the machine that runs it, of an accelerator's features.

        `level` is the instruction set that it is compiled for; raises SettingsError where it is
        compiled for none by name.
        """
        if level is not None:
            problem = f"backend '{self.kind}' compiles for no instruction set by name"
            raise SettingsError(problem, "leave --portable out, or name another backend")
        del site
        return frozenset()

    def versions(self) -> dict[str, str]:
        """Return the versions of what compiles and computes."""
        return {name: found for name in self.packages if (found := _version(name))}


def require(backend: Backend, accelerator: Accelerator) -> None:
    """Raise SettingsError with the usable ones where a backend cannot be used here."""
    found = backend.available()
    reason = found.reason if found.fitness == 0 else backend.fits(accelerator)
    if reason is not None:
        usable = ", ".join(each.kind for each in usable_for(accelerator))
        raise SettingsError(
            f"backend '{backend.kind}' is not usable here: {reason}", f"usable: {usable}"
        )


def usable_for(accelerator: Accelerator) -> list[Backend]:
    """Return the backends that can be used with an accelerator on this machine."""
    every: list[Any] = [choices.load("backends", kind)() for kind in choices.names("backends")]
    return [
        each for each in every if each.available().fitness > 0 and each.fits(accelerator) is None
    ]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
