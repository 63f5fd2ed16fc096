"""Accelerators: the kinds of devices that Regauge runs on, and how one of them is chosen.

`Accelerator` is the interface; each file is one kind and states only its differences from
`torch.accelerator`. `choose` picks the fittest kind of this machine, and `claim_device` takes a
device for this process. No other package contains the name of a device. Files here import torch
inside their methods, because `available` must also work if no vendor library is installed. This
package may import the foundation modules (such as `config`, `choices`, `errors` and `host`).
"""

from __future__ import annotations

import datetime as dt
import os
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from regauge.config import Choice
from regauge.system import choices
from regauge.system.errors import PreflightError, SettingsError, first_line
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import nn

    from regauge.system.host.device_counters import DeviceReader, ErrorReader
    from regauge.system.processes import World

    Batch = dict[str, torch.Tensor]

T = TypeVar("T")
Precision = Literal["bf16", "fp32", "tf32", "fp16", "fp8"]
REFERENCE_KIND = "cpu"
"""The kind of device that all others are compared with."""
PLUGIN_GROUP = "torch.backends"
"""The group of entry points by which packages add a device to any build of torch."""
REQUESTED = "requested by accelerator.kind"
"""The reason for an accelerator that the settings name."""


@dataclass(frozen=True)
class Availability:
    """Whether this machine can use a choice. The highest fitness is chosen; 0 means unusable."""

    fitness: int
    reason: str


@dataclass(frozen=True)
class DeviceChoice:
    """The accelerator of a run, why it was chosen, and which others were not usable."""

    kind: str
    reason: str
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why this machine cannot use the other accelerators, by kind."""


@dataclass(frozen=True)
class ChipPeak:
    """The peak performance of one device. Unknown values are absent, never guessed."""

    name: str
    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    """Dense peak in floating-point operations per second, by precision."""
    source: str = "unknown"
    """The source of the peak."""
    is_measured: bool = False
    """Whether the peak was measured on this machine instead of read from a data sheet."""


@dataclass(frozen=True)
class GraphCollector:
    """A vendor's tool that collects the graphs of a trial run, then compiles them in parallel."""

    collect_prefix: tuple[str, ...]
    """Prefix of a command whose graphs are only collected."""
    compile_prefix: tuple[str, ...]
    """Prefix of the same command that compiles the collected graphs."""
    folder_variable: str
    """The environment variable that passes the folder of the graphs to the second command."""


class Accelerator(Choice):
    """A kind of device."""

    env_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the environment variables that its libraries read, in addition to torch's."""
    is_shareable: ClassVar[bool] = False
    """Whether several processes can compute on one device at the same time."""
    is_indexed: ClassVar[bool] = False
    """Whether a process can select its device by index, so that a bad device can be left out."""
    is_fork_safe: ClassVar[bool] = False
    """Whether a process can fork after it imported the libraries, since they start no thread."""
    is_deterministic: ClassVar[bool] = False
    """Whether equal programs on one machine give equal bits, independent of the load."""
    has_dynamic_shapes: ClassVar[bool] = False
    """Whether its compiler supports one graph for all shapes (torch.compile(dynamic=True))."""
    attention: ClassVar[Literal["sdpa", "chunked"]] = "sdpa"
    """The fastest attention implementation; see `models/attention.py`."""
    on_host: ClassVar[bool] = False
    """Whether it is the host's processor, which computes in host memory."""
    supports_aot: ClassVar[bool] = False
    """Whether torch compiles libraries for it ahead of time (AOTInductor)."""
    chip_vendors: ClassVar[tuple[str, ...]] = ()
    """Vendors of its chips, as in the catalog of chips; empty if they are unknown."""
    onnx_provider: ClassVar[str | None] = None
    """The execution provider of ONNX Runtime; None if there is none."""
    emulates_fp8: ClassVar[bool] = False
    """Whether fp8 products are computed in fp32 from factors that are rounded to fp8."""
    generation_engines: ClassVar[tuple[str, ...]] = ()
    """Libraries that generate text on it in place of transformers, such as vllm."""

    @property
    def is_lazy(self) -> bool:
        """Whether operations are recorded and run as one graph at each step mark (lazy tensors).

        Values that change from step to step must then be tensors, since Python numbers become
        constants of the graph.
        """
        return False

    @classmethod
    def available(cls) -> Availability:
        """Return the fitness of this machine for the device, with the reason; never raises."""
        raise NotImplementedError

    def claim(self, index: int, threads: int) -> torch.device:
        """Select the device of this process, set its number of CPU threads; return the device."""
        raise NotImplementedError

    def launch_variables(self, num_processes: int) -> dict[str, str]:
        """Return environment variables that the processes of this machine need at their start."""
        del num_processes
        return {}

    def num_devices(self) -> int:
        """Return the number of processes on this machine that can have a device each."""
        return 1

    def distributed_backend(self) -> str:
        """Return the name of the torch.distributed backend, such as `nccl`."""
        raise NotImplementedError

    def init_method(self) -> str:
        """Return the `init_method` of torch.distributed."""
        return "env://"

    def precisions(self) -> tuple[Precision, ...]:
        """Return the supported precisions; the fastest one that trains safely comes first."""
        raise NotImplementedError

    def supports(self, precision: str) -> bool:
        """Return whether the device computes in a precision; nothing is measured."""
        return precision in self.precisions()

    def fp8_obstacle(self) -> str | None:
        """Return the reason why the device does not train in fp8, or None."""
        return "fp8 needs an NVIDIA GPU of compute capability 9.0 or later (Hopper)"

    def precision_speeds(self) -> Mapping[Precision, float]:
        """Return the measured speed of matrix products in each precision, relative to fp32.

        The first measurement takes less than a second; later ones are read from a file. Returns an
        empty mapping if `precisions` is known without measurement. The device need not be claimed.
        """
        return {}

    def emulates(self, precision: Precision) -> bool:
        """Return whether a precision is no faster than fp32, because the device emulates it."""
        del precision
        return False

    def set_precision(self, precision: Precision) -> None:
        """Configure the process for a precision, before the first operation.

        With "fp32", products of fp32 tensors are computed in fp32; some devices round their factors
        by default.
        """
        if precision == "fp32":
            import torch

            with _without_api_warning():
                torch.set_float32_matmul_precision("highest")

    def fp32_settings(self) -> dict[str, str]:
        """Return what decides how products of fp32 tensors are computed, after `set_precision`."""
        import torch

        with _without_api_warning():
            return {"float32_matmul_precision": torch.get_float32_matmul_precision()}

    def end_microbatch(self) -> None:
        """Mark the end of a microbatch's forward and backward pass; lazy devices end a graph."""

    def end_step(self) -> None:
        """Mark the end of an optimizer step; lazy devices end a graph here."""

    def wrap_loader(
        self, steps: Iterator[list[Batch]], device: torch.device
    ) -> Generator[list[Batch]]:
        """Yield the batches of each step on the device; copies overlap with compute if possible."""
        for batches in steps:
            yield [
                {name: value.to(device, non_blocking=True) for name, value in batch.items()}
                for batch in batches
            ]

    def seed(self, seed: int) -> None:
        """Seed the generators of the device and of torch with a number of 63 bits."""
        import torch

        torch.manual_seed(seed)

    def num_compiled_graphs(self) -> int:
        """Return the number of graphs that this process has compiled."""
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    def compile_seconds(self) -> float:
        """Return the seconds that the device's own compiler has run in this process."""
        return 0.0

    def counters(self) -> dict[str, float]:
        """Return the counters of the device's software in this process, for the ledger."""
        return {}

    def compile_obstacle(self) -> str | None:
        """Return the reason why torch.compile cannot be used, or None."""
        return None

    def warm_up_compiler(self) -> None:
        """Start the machine checks of the compiler in the background."""

    def compile_backend(self) -> str | Callable[..., Any]:
        """Return the torch.compile backend of the device, or its name."""
        return "inductor"

    def model_name(self) -> str:
        """Return the model name of the device. Devices with equal names compute equal results."""
        return self.chip_peak(self.precisions()[0]).name

    def features(self) -> frozenset[str]:
        """Return the features that code compiled here may need, such as instruction sets.

        Such code does not run on a machine that lacks one of them.
        """
        return frozenset({self.kind})

    def compile_options(self) -> dict[str, bool]:
        """Return the options of the torch.compile backend that differ from its defaults."""
        return {}

    def onnx_options(self, index: int, precision: Precision) -> dict[str, str]:
        """Return the options of ONNX Runtime's execution provider for a device index."""
        del index, precision
        return {}

    def graph_collector(self) -> GraphCollector | None:
        """Return the vendor's ahead-of-time compiler tool; None if a trial run compiles itself."""
        return None

    def set_graph_cache(self, folder: Path) -> None:
        """Store compiled graphs in a folder, and reuse the graphs that it contains."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)

    def graph_cache_counts(self) -> tuple[int, int]:
        """Return the cache hits and misses of this process's compiled graphs."""
        from torch._dynamo.utils import counters

        counts = counters["inductor"]
        return int(counts["fxgraph_cache_hit"]), int(counts["fxgraph_cache_miss"])

    def prepare_for_inference(self, module: nn.Module) -> nn.Module:
        """Return the fastest form of a module that is on the device and in evaluation mode."""
        return module

    def retain_freed_memory(self) -> None:
        """Reuse freed memory in later steps instead of returning it to the operating system.

        Called when the weights are on the device.
        """

    def synchronize(self) -> None:
        """Wait until the device has finished all of its operations."""

    def peak_memory_bytes(self) -> int | None:
        """Return the peak memory in use since the start, or None if it is unknown."""
        return None

    def memory_bytes(self, num_processes: int) -> int | None:
        """Return the bytes that each of `num_processes` processes can use; None if unknown."""
        del num_processes
        return None

    def start_energy_meter(self) -> Callable[[], float] | None:
        """Return a function that returns the joules that the claimed device used since this call.

        The energy of all processes on the device counts. Returns None if it cannot be measured.
        """
        return None

    def open_counters(self) -> DeviceReader:
        """Return a function that reads the vendor's counters of all devices; imports no torch.

        It returns an empty tuple if the vendor's library is missing.
        """
        return tuple

    def open_errors(self) -> ErrorReader:
        """Return a function that reads the errors of all devices from now on; imports no torch.

        It returns an empty tuple if they cannot be read.
        """
        return tuple

    def diagnostic_commands(self, num_devices: int) -> tuple[tuple[str, ...], ...]:
        """Return the commands of the vendor's device checks; exit status 0 means healthy."""
        del num_devices
        return ()

    def process_list_command(self) -> tuple[str, ...]:
        """Return the vendor's command that prints one line per process on the devices."""
        return ()

    def clear_measurements(self) -> None:
        """Discard a measured peak, because other work used the device during the measurement."""

    def chip_peak(self, precision: Precision) -> ChipPeak:
        """Return the name of the device and its peak for a precision."""
        raise NotImplementedError


def survey() -> dict[str, Availability]:
    """Return the availability of every accelerator on this machine, by kind."""
    kinds = choices.names("accelerators")
    return {kind: choices.load("accelerators", kind).available() for kind in kinds}


def choose() -> tuple[Accelerator, str]:
    """Return the fittest accelerator of this machine, and the reason for the choice."""
    availabilities = survey()
    kind = max(availabilities, key=lambda name: availabilities[name].fitness)
    return choices.load("accelerators", kind)(), f"{kind}: {availabilities[kind].reason}"


def describe_choice(accelerator: Accelerator, *, is_requested: bool) -> DeviceChoice:
    """Return the reason for an accelerator, and the reasons against those that are not usable."""
    availabilities = survey()
    refused = {
        kind: availability.reason
        for kind, availability in availabilities.items()
        if availability.fitness == 0
    }
    # An accelerator of a file next to the run file is not in the survey.
    reason = REQUESTED if is_requested else availabilities[accelerator.kind].reason
    return DeviceChoice(accelerator.kind, reason, refused)


def resolve(requested: Accelerator | None, *, quiet: bool = False) -> Accelerator:
    """Return the requested accelerator, or else the fittest one, and log why it was chosen.

    Raises SettingsError with the usable kinds if this machine cannot use it.
    """
    accelerator = requested or choose()[0]
    check_available(accelerator)
    if requested is None and not quiet:
        choice = describe_choice(accelerator, is_requested=False)
        logger.info("accelerator %s: %s", choice.kind, choice.reason)
        refused = "; ".join(f"{kind}: {reason}" for kind, reason in choice.refused.items())
        logger.info("accelerators that are not usable here: %s", refused or "none")
    return accelerator


def choose_without_torch() -> Accelerator | None:
    """Return the accelerator that `choose` would return, or None if only torch can decide."""
    return choose()[0] if offers_only_cpu() else None


def open_device_counters(accelerator: Accelerator | None) -> DeviceReader:
    """Return the reader of an accelerator's counters; imports no torch.

    Without an accelerator it is the first one whose devices have counters, the processor last.
    """
    return _open_reader(accelerator, lambda kind: kind.open_counters())


def open_device_errors(accelerator: Accelerator | None) -> ErrorReader:
    """Return the reader of an accelerator's errors; imports no torch.

    Without an accelerator it is the first one whose devices have such a reader.
    """
    return _open_reader(accelerator, lambda kind: kind.open_errors())


def _open_reader(
    accelerator: Accelerator | None,
    open_reader: Callable[[Accelerator], Callable[[], tuple[T, ...]]],
) -> Callable[[], tuple[T, ...]]:
    """Return the reader of an accelerator, or the first one of all kinds that reads anything."""
    accelerator = accelerator or choose_without_torch()
    if accelerator is not None:
        return open_reader(accelerator)
    for kind in sorted(choices.names("accelerators"), key=REFERENCE_KIND.__eq__):
        reader = open_reader(choices.load("accelerators", kind)())
        if reader():
            return reader
    return tuple


def is_cpu_only_torch() -> bool:
    """Return whether the version of torch marks a CPU-only build."""
    return any(build.version.endswith("+cpu") for build in distributions(name="torch"))


def offers_only_cpu() -> bool:
    """Return whether torch offers no device but the CPU; imports no torch.

    Packages add devices to a CPU-only build by entry points, which torch loads when it is imported.
    """
    return is_cpu_only_torch() and not list_device_plugins()


def list_device_plugins() -> list[str]:
    """Return the names of the installed packages' entry points that add a device to torch."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return []
    return sorted(entry.name for entry in entry_points(group=PLUGIN_GROUP))


def check_available(accelerator: Accelerator) -> None:
    """Raise SettingsError with the usable kinds if an accelerator is not usable here."""
    availability = accelerator.available()
    if availability.fitness == 0:
        usable = [kind for kind, other in survey().items() if other.fitness > 0]
        problem = f"accelerator '{accelerator.kind}' is not usable here: {availability.reason}"
        raise SettingsError(problem, f"use one of: {', '.join(usable)}")


def claim_device(accelerator: Accelerator, index: int, threads: int) -> torch.device:
    """Claim a device for this process.

    Raises PreflightError if the device is in use or does not exist.
    """
    import torch

    try:
        device = accelerator.claim(index, threads)
        if not accelerator.is_lazy:
            torch.zeros(1, device=device)
    except RuntimeError as error:
        problem = f"device {index} of '{accelerator.kind}' cannot be claimed: {first_line(error)}"
        remedy = "check for other processes with `regauge doctor`, or start fewer processes"
        raise PreflightError(problem, remedy) from None
    return device


def init_process_group(accelerator: Accelerator, world: World, timeout_seconds: int) -> None:
    """Initialize the default process group of torch.distributed, except for a single process."""
    import torch.distributed as dist

    if world.size > 1 and not dist.is_initialized():
        dist.init_process_group(
            accelerator.distributed_backend(),
            accelerator.init_method(),
            dt.timedelta(seconds=timeout_seconds),
            world.size,
            world.rank,
        )


def wait_for_all() -> None:
    """Wait until all processes of the default group call this.

    torch selects a device by itself if the barrier names none, and warns.
    """
    import torch
    import torch.distributed as dist

    device = torch.accelerator.current_accelerator()
    if device is None or dist.get_backend() != dist.get_default_backend_for_device(device):
        dist.barrier()
    else:
        dist.barrier(device_ids=[torch.accelerator.current_device_index()])


@contextmanager
def _without_api_warning() -> Generator[None]:
    """Suppress the warning of torch 2.9 about its own functions for the precision."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        yield
