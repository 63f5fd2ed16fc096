"""Device kinds and how a run selects one.

`Accelerator` is the interface; each file is one kind and states only its differences from
`torch.accelerator`. `choose` picks the fittest kind on this machine, and `claim_device` takes a
device for this process. No other package contains a device name. Files import torch inside their
methods, because `available` must also work without the vendor library.
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

    from regauge.system.device_counters import DeviceReader, ErrorReader
    from regauge.system.processes import World

    Batch = dict[str, torch.Tensor]

T = TypeVar("T")
Precision = Literal["bf16", "fp32", "tf32", "fp16", "fp8"]
REFERENCE_KIND = "cpu"
"""Device kind that all others are compared with."""
PLUGIN_GROUP = "torch.backends"
"""Entry point group through which packages add a device to any torch build."""
REQUESTED = "requested by accelerator.kind"
"""Reason shown when the settings name the accelerator."""


@dataclass(frozen=True)
class Availability:
    """Whether this machine can use a choice; the highest fitness wins, and 0 means unusable."""

    fitness: int
    reason: str


@dataclass(frozen=True)
class DeviceChoice:
    """The selected accelerator, the reason, and why the others are unusable."""

    kind: str
    reason: str
    refused: Mapping[str, str] = field(default_factory=dict)
    """Accelerator kind -> why this machine cannot use it."""


@dataclass(frozen=True)
class ChipPeak:
    """Peak performance of one device; unknown values are absent, never guessed."""

    name: str
    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    """Precision -> dense peak FLOP/s."""
    source: str = "unknown"
    is_measured: bool = False
    """True if measured on this machine, False if read from a data sheet."""


@dataclass(frozen=True)
class GraphCollector:
    """Vendor tool that collects the graphs of a trial run and compiles them in parallel."""

    collect_prefix: tuple[str, ...]
    """Command prefix that only collects graphs."""
    compile_prefix: tuple[str, ...]
    """Command prefix that compiles the collected graphs."""
    folder_variable: str
    """Environment variable that passes the graph folder to the second command."""


class Accelerator(Choice):
    """A device kind."""

    env_prefixes: ClassVar[tuple[str, ...]] = ()
    """Environment variable prefixes read by the vendor libraries, in addition to torch's."""
    is_shareable: ClassVar[bool] = False
    """Whether several processes can use one device at a time."""
    is_indexed: ClassVar[bool] = False
    """Whether processes select devices by index, so that a bad device can be skipped."""
    is_fork_safe: ClassVar[bool] = False
    """Whether importing the vendor libraries starts no threads, so that a process can still
    fork."""
    is_deterministic: ClassVar[bool] = False
    """Whether identical programs give identical bits on one machine, whatever the load."""
    has_dynamic_shapes: ClassVar[bool] = False
    """Whether the compiler supports one graph for all shapes (torch.compile(dynamic=True))."""
    attention: ClassVar[Literal["sdpa", "chunked"]] = "sdpa"
    """The fastest attention implementation; see `models/attention.py`."""
    on_host: ClassVar[bool] = False
    """Whether the device is the host CPU, which computes in host memory."""
    supports_aot: ClassVar[bool] = False
    """Whether AOTInductor can compile libraries for the device."""
    chip_vendors: ClassVar[tuple[str, ...]] = ()
    """Chip vendors as named in the catalog; empty if unknown."""
    onnx_provider: ClassVar[str | None] = None
    """ONNX Runtime execution provider, if any."""
    emulates_fp8: ClassVar[bool] = False
    """Whether fp8 products are emulated: inputs are rounded to fp8 and multiplied in fp32."""
    generation_engines: ClassVar[tuple[str, ...]] = ()
    """Libraries that replace transformers for text generation, such as vllm."""

    @property
    def is_lazy(self) -> bool:
        """Whether operations are recorded and run as one graph at each step mark (lazy tensors).

        Values that change from step to step must then be tensors, since Python numbers become graph
        constants.
        """
        return False

    @classmethod
    def available(cls) -> Availability:
        """Return this machine's fitness for the device and the reason; never raises."""
        raise NotImplementedError

    def claim(self, index: int, threads: int) -> torch.device:
        """Select the device for this process, set the CPU thread count, and return the device."""
        raise NotImplementedError

    def launch_variables(self, num_processes: int) -> dict[str, str]:
        """Return environment variables that the local processes need at start."""
        del num_processes
        return {}

    def num_devices(self) -> int:
        """Return how many local processes can have a device each."""
        return 1

    def distributed_backend(self) -> str:
        """Return the torch.distributed backend, such as `nccl`."""
        raise NotImplementedError

    def init_method(self) -> str:
        """Return the torch.distributed `init_method`."""
        return "env://"

    def precisions(self) -> tuple[Precision, ...]:
        """Return the supported precisions, fastest safe training precision first."""
        raise NotImplementedError

    def supports(self, precision: str) -> bool:
        """Return whether the device computes in a precision, without measuring."""
        return precision in self.precisions()

    def fp8_obstacle(self) -> str | None:
        """Return why the device cannot train in fp8, or None."""
        return "fp8 needs an NVIDIA GPU of compute capability 9.0 or later (Hopper)"

    def precision_speeds(self) -> Mapping[Precision, float]:
        """Return the measured speed of matrix products in each precision, relative to fp32.

        The first measurement takes less than a second; later calls read it from a file. Empty if
        `precisions` needs no measurement. The device does not have to be claimed.
        """
        return {}

    def emulates(self, precision: Precision) -> bool:
        """Return whether a precision is emulated and therefore no faster than fp32."""
        del precision
        return False

    def set_precision(self, precision: Precision) -> None:
        """Configure the process for a precision, before the first operation.

        With "fp32", fp32 products are computed in fp32; some devices round their inputs by default.
        """
        if precision == "fp32":
            import torch

            with _without_api_warning():
                torch.set_float32_matmul_precision("highest")

    def fp32_settings(self) -> dict[str, str]:
        """Return the settings that decide how fp32 products are computed, after `set_precision`."""
        import torch

        with _without_api_warning():
            return {"float32_matmul_precision": torch.get_float32_matmul_precision()}

    def end_microbatch(self) -> None:
        """Mark the end of a forward and backward pass; lazy devices end a graph here."""

    def end_step(self) -> None:
        """Mark the end of an optimizer step; lazy devices end a graph here."""

    def wrap_loader(
        self, steps: Iterator[list[Batch]], device: torch.device
    ) -> Generator[list[Batch]]:
        """Yield each step's batches on the device; copies overlap with compute if possible."""
        for batches in steps:
            yield [
                {name: value.to(device, non_blocking=True) for name, value in batch.items()}
                for batch in batches
            ]

    def seed(self, seed: int) -> None:
        """Seed the generators of torch and the device with a 63-bit number."""
        import torch

        torch.manual_seed(seed)

    def num_compiled_graphs(self) -> int:
        """Return how many graphs this process has compiled."""
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    def compile_seconds(self) -> float:
        """Return the seconds spent in the device's own compiler by this process."""
        return 0.0

    def counters(self) -> dict[str, float]:
        """Return the device software counters of this process, for the ledger."""
        return {}

    def compile_obstacle(self) -> str | None:
        """Return why torch.compile cannot be used, or None."""
        return None

    def warm_up_compiler(self) -> None:
        """Start the compiler's machine checks in the background."""

    def compile_backend(self) -> str | Callable[..., Any]:
        """Return the torch.compile backend, or its name."""
        return "inductor"

    def model_name(self) -> str:
        """Return the device model; devices with equal names compute equal results."""
        return self.chip_peak(self.precisions()[0]).name

    def features(self) -> frozenset[str]:
        """Return hardware features that compiled code may need, such as instruction sets.

        Such code does not run on a machine that lacks one of them.
        """
        return frozenset({self.kind})

    def compile_options(self) -> dict[str, bool]:
        """Return torch.compile options that differ from the backend defaults."""
        return {}

    def onnx_options(self, index: int, precision: Precision) -> dict[str, str]:
        """Return ONNX Runtime provider options for a device index."""
        del index, precision
        return {}

    def graph_collector(self) -> GraphCollector | None:
        """Return the vendor's ahead-of-time compiler tool, or None if a trial run compiles."""
        return None

    def set_graph_cache(self, folder: Path) -> None:
        """Store compiled graphs in a folder, and reuse those already there."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)

    def graph_cache_counts(self) -> tuple[int, int]:
        """Return this process's graph cache hits and misses."""
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
        """Wait until the device has finished all operations."""

    def peak_memory_bytes(self) -> int | None:
        """Return the peak memory use since the start; None if unknown."""
        return None

    def memory_bytes(self, num_processes: int) -> int | None:
        """Return the bytes that each of `num_processes` processes can use; None if unknown."""
        del num_processes
        return None

    def start_energy_meter(self) -> Callable[[], float] | None:
        """Return a function that returns the joules used by the claimed device since this call.

        All processes on the device count. None if energy cannot be measured.
        """
        return None

    def open_counters(self) -> DeviceReader:
        """Return a function that reads the vendor's counters for all devices.

        Does not import torch. It returns an empty tuple if the vendor library is missing.
        """
        return tuple

    def open_errors(self) -> ErrorReader:
        """Return a function that reads device errors from now on, without importing torch.

        It returns an empty tuple if they cannot be read.
        """
        return tuple

    def diagnostic_commands(self, num_devices: int) -> tuple[tuple[str, ...], ...]:
        """Return the vendor's device check commands; exit status 0 means healthy."""
        del num_devices
        return ()

    def process_list_command(self) -> tuple[str, ...]:
        """Return the vendor command that prints one line per process on the devices."""
        return ()

    def clear_measurements(self) -> None:
        """Discard a measured peak, because other work used the device meanwhile."""

    def chip_peak(self, precision: Precision) -> ChipPeak:
        """Return the device name and peak in a precision."""
        raise NotImplementedError


def survey() -> dict[str, Availability]:
    """Return accelerator kind -> availability on this machine."""
    kinds = choices.names("accelerators")
    return {kind: choices.load("accelerators", kind).available() for kind in kinds}


def choose() -> tuple[Accelerator, str]:
    """Return the fittest accelerator and the reason."""
    availabilities = survey()
    kind = max(availabilities, key=lambda name: availabilities[name].fitness)
    return choices.load("accelerators", kind)(), f"{kind}: {availabilities[kind].reason}"


def describe_choice(accelerator: Accelerator, *, is_requested: bool) -> DeviceChoice:
    """Return why an accelerator was selected, and why the unusable ones were not."""
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
    """Return the requested accelerator, or the fittest one, and log the reason.

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
    """Return the counter reader of an accelerator, without importing torch.

    Default: the first kind whose devices have counters, the host CPU last.
    """
    return _open_reader(accelerator, lambda kind: kind.open_counters())


def open_device_errors(accelerator: Accelerator | None) -> ErrorReader:
    """Return the error reader of an accelerator, without importing torch.

    Default: the first kind whose devices have one.
    """
    return _open_reader(accelerator, lambda kind: kind.open_errors())


def _open_reader(
    accelerator: Accelerator | None,
    open_reader: Callable[[Accelerator], Callable[[], tuple[T, ...]]],
) -> Callable[[], tuple[T, ...]]:
    accelerator = accelerator or choose_without_torch()
    if accelerator is not None:
        return open_reader(accelerator)
    for kind in sorted(choices.names("accelerators"), key=REFERENCE_KIND.__eq__):
        reader = open_reader(choices.load("accelerators", kind)())
        if reader():
            return reader
    return tuple


def is_cpu_only_torch() -> bool:
    """Return whether the torch version string marks a CPU-only build."""
    return any(build.version.endswith("+cpu") for build in distributions(name="torch"))


def offers_only_cpu() -> bool:
    """Return whether torch offers no device but the CPU; imports no torch.

    Packages add devices to a CPU-only build by entry points, which torch loads when it is imported.
    """
    return is_cpu_only_torch() and not list_device_plugins()


def list_device_plugins() -> list[str]:
    """Return the entry points of installed packages that add a device to torch."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return []
    return sorted(entry.name for entry in entry_points(group=PLUGIN_GROUP))


def check_available(accelerator: Accelerator) -> None:
    """Raise SettingsError with the usable kinds if this machine cannot use an accelerator."""
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
    """Initialize the default torch.distributed process group if there are several processes."""
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
    """Wait until all processes in the default group have called this.

    Without an explicit device torch selects one by itself and warns.
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
    """Suppress torch 2.9's warning about its own precision functions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        yield
