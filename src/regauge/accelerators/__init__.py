"""What a run may ask of a device, and how one is chosen.

An accelerator states only its differences from `torch.accelerator`; no other room says a device's
name. Files here import torch in their methods: `available` must answer where nothing is installed.
"""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import dataclass, field
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from regauge import choices
from regauge.config import Choice
from regauge.errors import PreflightError, SettingsError, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import nn

    from regauge.processes import World

    Batch = dict[str, torch.Tensor]

Precision = Literal["bf16", "fp32", "tf32", "fp16"]
REFERENCE = "cpu"
"""The kind of device that all others are measured by."""


@dataclass(frozen=True)
class Availability:
    """Whether a run can use an accelerator here: the fittest is chosen, 0 is unusable."""

    fitness: int
    reason: str


@dataclass(frozen=True)
class Chip:
    """One device's limits; what is not known is absent, never guessed."""

    name: str
    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    """Dense peak by precision."""
    source: str = "unknown"
    """Where the peak comes from."""
    measured: bool = False
    """Whether the peak was timed here, and is no data sheet's."""


class Rate(NamedTuple):
    """The speed of a matrix product, measured here."""

    flops_per_second: float
    measurements: int = 1
    """More than one when the first was implausible for the device."""


@dataclass(frozen=True)
class Collecting:
    """How a vendor's tool compiles the graphs of a trial all at once, after it."""

    collect: tuple[str, ...]
    """What is written before a command whose graphs shall only be collected."""
    compile: tuple[str, ...]
    """What is written before the same command to compile them."""
    folder: str
    """The environment variable that tells the second where they are."""


class Accelerator(Choice):
    """A kind of device."""

    variables: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the environment variables that its libraries read, beside torch's own."""
    shared: ClassVar[bool] = False
    """Whether several processes can compute on one device at the same time."""
    indexed: ClassVar[bool] = False
    """Whether a process takes the device whose index it is given, so that one can be left out."""
    forkable: ClassVar[bool] = False
    """Whether a process can be forked that has imported its libraries: these have begun nothing."""
    repeatable: ClassVar[bool] = False
    """Whether equal programs on one machine give equal bits, whatever else happens there."""
    symbolic: ClassVar[bool] = False
    """Whether its compiler makes one graph for all shapes where it is asked to."""
    attention: ClassVar[Literal["sdpa", "chunked"]] = "sdpa"
    """How models compute attention the fastest: see `models/attention.py`."""
    on_host: ClassVar[bool] = False
    """Whether it is the processor itself, which computes in the memory of the host."""
    ahead_of_time: ClassVar[bool] = False
    """Whether torch compiles libraries for it ahead of time (AOTInductor)."""
    onnx_provider: ClassVar[str | None] = None
    """ONNX Runtime's execution provider for it; None if there is none."""

    @property
    def lazy(self) -> bool:
        """Whether operations are only recorded, and computed as one graph at each mark.

        What changes from step to step must then be data: a number would be part of the graph.
        """
        return False

    @classmethod
    def available(cls) -> Availability:
        """Return how fit the device is here and why; never raises."""
        raise NotImplementedError

    def claim(self, index: int, threads: int) -> torch.device:
        """Take this process's device and its CPU threads, and return the device."""
        raise NotImplementedError

    def count(self) -> int:
        """Return how many processes this machine can give a device each."""
        return 1

    def collectives(self) -> str:
        """Return the name of torch.distributed's backend for this device."""
        raise NotImplementedError

    def rendezvous(self) -> str:
        """Return where the processes of a run meet, as torch.distributed's `init_method`."""
        return "env://"

    def precisions(self) -> tuple[Precision, ...]:
        """Return what the device computes in, the fastest that trains safely first."""
        raise NotImplementedError

    def rates(self) -> Mapping[Precision, Rate]:
        """Return the operations a second of a product in each, timed in less than a second.

        An implausible rate is measured again, for some seconds at most. Returns nothing when that
        order is never wrong. No device need have been claimed.
        """
        return {}

    def use(self, precision: Precision) -> None:
        """Set what the process must know of a precision before the first operation."""

    def end_microbatch(self) -> None:
        """Mark the end of a microbatch's forward and backward; lazy devices cut the graph here."""

    def end_step(self) -> None:
        """Mark the end of an optimizer step; lazy devices cut the graph here."""

    def wrap_loader(
        self, steps: Iterator[list[Batch]], device: torch.device
    ) -> Generator[list[Batch]]:
        """Yield the host batches of each step on the device; copies overlap where they can."""
        for batches in steps:
            yield [
                {name: value.to(device, non_blocking=True) for name, value in batch.items()}
                for batch in batches
            ]

    def seed(self, word: int) -> None:
        """Seed the device's own generator, and torch's; `word` is 63 bits."""
        import torch

        torch.manual_seed(word)

    def graphs_compiled(self) -> int:
        """Return how many graphs this process has compiled so far."""
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    def compile_seconds(self) -> float:
        """Return how long a compiler of the device itself has worked in this process."""
        return 0.0

    def counters(self) -> dict[str, float]:
        """Return what the device's software counts in this process, for the ledger."""
        return {}

    def obstacle_to_compiling(self) -> str | None:
        """Return why torch.compile cannot work here, or None."""
        return None

    def expect_compiling(self) -> None:
        """Start what the compiler must find out of this machine, beside other work."""

    def compile_backend(self) -> str | Callable[..., Any]:
        """Return torch.compile's backend for the device, or its name."""
        return "inductor"

    def model(self) -> str:
        """Return the name of the device's model: equal ones compute alike."""
        return self.chip(self.precisions()[0]).name

    def features(self) -> frozenset[str]:
        """Return what compiled code may rely on here: it is worth nothing where one is absent."""
        return frozenset({self.kind})

    def compile_options(self) -> dict[str, bool]:
        """Return what torch.compile's backend is told beside its defaults."""
        return {}

    def onnx_options(self, index: int, precision: Precision) -> dict[str, str]:
        """Return the settings of ONNX Runtime's execution provider on the device with an index."""
        del index, precision
        return {}

    def collecting(self) -> Collecting | None:
        """Return the vendor's tool that compiles ahead of time; None where a trial does it."""
        return None

    def use_cache(self, folder: Path) -> None:
        """Keep compiled graphs in a folder from now on, and find those that are there."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)

    def cached(self) -> tuple[int, int]:
        """Return how many graphs this process found in its cache, and how many it had to make."""
        from torch._dynamo.utils import counters

        found = counters["inductor"]
        return int(found["fxgraph_cache_hit"]), int(found["fxgraph_cache_miss"])

    def for_inference(self, module: nn.Module) -> nn.Module:
        """Return a module, placed and in evaluation mode, as the device computes it fastest."""
        return module

    def keep_memory(self) -> None:
        """Keep for later steps what memory a step lets go of; called when the weights lie there."""

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""

    def peak_memory_bytes(self) -> int | None:
        """Return the largest memory in use since the start, or None where it is not known."""
        return None

    def memory_bytes(self, processes: int) -> int | None:
        """Return what memory each of so many processes of this machine can have, where known."""
        del processes
        return None

    def meter(self) -> Callable[[], float] | None:
        """Return what counts from now on the joules of the claimed device, whoever uses it."""
        return None

    def tools(self, size: int) -> tuple[tuple[str, ...], ...]:
        """Return the vendor's checks of `size` devices, as commands; code 0 says all is well."""
        del size
        return ()

    def occupants(self) -> tuple[str, ...]:
        """Return the vendor's command that prints a line for each process on the devices."""
        return ()

    def measure_again(self) -> None:
        """Forget a peak that was timed: something else had the device then."""

    def chip(self, precision: Precision) -> Chip:
        """Return the device's name and its peak for a precision."""
        raise NotImplementedError


def survey() -> dict[str, Availability]:
    """Return every accelerator's availability on this machine."""
    kinds = choices.names("accelerators")
    return {kind: choices.load("accelerators", kind).available() for kind in kinds}


def choose() -> tuple[Accelerator, str]:
    """Return the fittest accelerator of this machine and the reason for it."""
    found = survey()
    kind = max(found, key=lambda name: found[name].fitness)
    return choices.load("accelerators", kind)(), f"{kind}: {found[kind].reason}"


def foreseen() -> Accelerator | None:
    """Return what `choose` finds, where that is known without importing torch."""
    return choose()[0] if for_cpus() else None


def for_cpus() -> bool:
    """Return whether torch is certainly a build for CPUs alone, as its version says."""
    return any(each.version.endswith("+cpu") for each in distributions(name="torch"))


def require(accelerator: Accelerator) -> None:
    """Raise SettingsError with the nearest choice when an accelerator is not usable here."""
    if (found := accelerator.available()).fitness == 0:
        usable = [kind for kind, other in survey().items() if other.fitness > 0]
        problem = f"accelerator '{accelerator.kind}' is not usable here: {found.reason}"
        raise SettingsError(problem, f"usable here: {', '.join(usable)}")


def take(accelerator: Accelerator, index: int, threads: int) -> torch.device:
    """Claim a device for this process.

    Raises PreflightError for one that cannot be had: it is in use, or there are too few.
    """
    import torch

    try:
        device = accelerator.claim(index, threads)
        if not accelerator.lazy:
            torch.zeros(1, device=device)
    except RuntimeError as error:
        problem = f"device {index} of '{accelerator.kind}' cannot be taken: {plain(error)}"
        way = "see whether another process uses it (regauge doctor), or start fewer processes"
        raise PreflightError(problem, way) from None
    return device


def join(accelerator: Accelerator, world: World, timeout_seconds: int) -> None:
    """Meet the other processes of the run."""
    import torch.distributed as dist

    if world.size > 1 and not dist.is_initialized():
        how = accelerator.collectives(), accelerator.rendezvous(), dt.timedelta(0, timeout_seconds)
        dist.init_process_group(*how, world.size, world.rank)
