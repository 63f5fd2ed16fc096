"""The processor itself: threads, and a precision chosen by its instruction set."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from regauge import processes, timing
from regauge.accelerators import (
    Accelerator,
    Availability,
    Chip,
    Precision,
    Rate,
    _compiler,
    _peak_floor,
    _powercap,
    _widened,
)
from regauge.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

BF16_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
FOR_NUMBERS = re.compile(r"sse|ssse|avx|amx|fma|f16c|bmi|abm|movbe|asimd|sve|i8mm|bf16|fphp")
"""How sets of instructions begin that a compiler may use for a loop over numbers."""
FIRST_SIZE, LARGEST_SIZE, ENOUGH_SECONDS = 192, 3072, 5e-3
"""Of square products. A precision that the processor has no instructions for is a thousand times
slower than the fastest."""
KEPT_SHARE = 0.7
"""Of what a compiled graph keeps for its backward pass at most; 1 is torch's default."""
GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Where control groups of the second version and of the first tell their limit, what is used, and
what of it are only files that were read."""
LARGEST_IN_HEAP, KEPT_FREE, ALL = -3, -1, 2**31 - 1
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h, in bytes."""
ABANDONED_SECONDS = 60.0
"""A linker makes a file and fills it at once."""
MEASURED_SECONDS, REPEATED_SECONDS = 0.5, 0.1
"""Of a measurement: long enough to outlast what else a machine does now and then. A repetition of
an implausible one is shorter."""
CPUINFO = Path("/proc/cpuinfo")


class Cpu(Accelerator):
    """A CPU process; several of them meet over gloo."""

    shared: ClassVar[bool] = True
    indexed: ClassVar[bool] = True
    forkable: ClassVar[bool] = True
    symbolic: ClassVar[bool] = True
    repeatable: ClassVar[bool] = True
    attention: ClassVar[Literal["sdpa", "chunked"]] = "chunked"
    on_host: ClassVar[bool] = True
    ahead_of_time: ClassVar[bool] = True
    onnx_provider: ClassVar[str | None] = "CPUExecutionProvider"
    variables: ClassVar[tuple[str, ...]] = ("ATEN_CPU_", "DNNL_", "ONEDNN_", "GLOO_")

    @classmethod
    def available(cls) -> Availability:
        return Availability(2, "always there")

    def claim(self, index: int, threads: int) -> torch.device:
        import torch

        del index

        torch.set_num_threads(threads)
        return torch.device("cpu")

    def collectives(self) -> str:
        return "gloo"

    def precisions(self) -> tuple[Precision, ...]:
        """Return bf16 first where the processor multiplies it natively; fp16 is emulated."""
        return ("bf16", "fp32") if instructions() & BF16_INSTRUCTIONS else ("fp32", "bf16")

    def rates(self) -> Mapping[Precision, Rate]:
        """Time what it has instructions for; torch or a hypervisor may not have use of them."""
        if not instructions() & BF16_INSTRUCTIONS:
            return {}
        return {precision: _fastest_matmul(precision, 0).rate for precision in self.precisions()}

    def use(self, precision: Precision) -> None:
        if precision == "bf16" and not instructions() & BF16_INSTRUCTIONS:
            _widened.install()

    def model(self) -> str:
        return _model_name()

    def features(self) -> frozenset[str]:
        """Return the kernel's name of the machine, and its sets of instructions for numbers."""
        return frozenset({platform.machine(), *filter(FOR_NUMBERS.match, instructions())})

    def compile_backend(self) -> Callable[..., Any]:
        """Return a backend that keeps less for the backward pass than torch's by default.

        What is cheap to compute again is as fast so: two fifths of what was kept are attention's
        shares and other results of one pass over memory (docs/performance.md). What another run
        has left unfinished in torch's cache is removed before.
        """
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch's own `cache_dir` would set it
        remove_abandoned(Path(named or default_cache_dir()))
        return _keeping_less

    def obstacle_to_compiling(self) -> str | None:
        return _compiler.obstacle()

    def expect_compiling(self) -> None:
        """Try the C++ compiler's vector instructions in a thread: more than a second of waiting.

        What it finds is remembered by torch. One that fails here fails again where it is said.
        """
        threading.Thread(target=_try_vectors, name="vectors", daemon=True).start()

    def keep_memory(self) -> None:
        """Let glibc give nothing back to the system.

        Which would hand every large tensor out anew, page by page and with zeros: a third of the
        seconds of a step (docs/performance.md).
        """
        with suppress(OSError, AttributeError):  # another C library
            allocator = ctypes.CDLL(None).mallopt
            allocator(LARGEST_IN_HEAP, ALL)
            allocator(KEPT_FREE, ALL)

    def peak_memory_bytes(self) -> int | None:
        """Return the largest resident size of the program itself.

        What `getrusage` tells is never less than what the process that started it had.
        """
        found = _kilobytes(Path("/proc/self/status"), "VmHWM")
        return (found or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024

    def memory_bytes(self, processes: int) -> int | None:
        """Return a share of what can be had without swapping, and within the control group."""
        free = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
        known = [found for found in (free and free * 1024, _left_of_group()) if found is not None]
        return min(known) // processes if known else None

    def meter(self) -> Callable[[], float] | None:
        return _powercap.meter()

    def measure_again(self) -> None:
        _fastest_matmul.cache_clear()

    def chip(self, precision: Precision) -> Chip:
        size, (flops_per_second, measurements) = _fastest_matmul(precision, MEASURED_SECONDS)
        source = f"measured here: {size} x {size} x {size} matmul on this process's threads"
        if measurements > 1:
            source += f"; the best of {measurements} measurements, the first was implausible"
        return Chip(_model_name(), {precision: flops_per_second}, source, measured=True)


@cache
def instructions() -> frozenset[str]:
    """Return the instruction-set flags that the kernel reports."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def _kilobytes(path: Path, name: str) -> int | None:
    """Return a line of the kernel's that ends in kB."""
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _left_of_group() -> int | None:
    """Return what is left of this control group's memory; None where it has no limit."""
    for root, limit, used, cached in GROUPS:
        try:
            found = int((root / limit).read_text()) - int((root / used).read_text())
            told = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or its limit is the word "max"
            continue
        return max(0, found + int(told.get(cached, 0)))
    return None


def _model_name() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "CPU")


def _keeping_less(*graph: Any) -> Any:
    """Compile a graph and its inputs; what its backward pass keeps is decided within."""
    from torch._dynamo import lookup_backend
    from torch._functorch import config

    with config.patch(activation_memory_budget=KEPT_SHARE):
        return lookup_backend("inductor")(*graph)


def _try_vectors() -> None:
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.pick_vec_isa()


def remove_abandoned(cache: Path) -> None:
    """Remove libraries of no length from torch's cache, which no run could load or replace.

    A machine leaves them that is switched off while it compiles.
    """
    for path in cache.rglob("*.so"):
        with suppress(OSError):
            facts = path.stat()
            if not facts.st_size and time.time() - facts.st_mtime > ABANDONED_SECONDS:
                path.unlink()


def _dtype(precision: Precision) -> str:
    return "bfloat16" if precision == "bf16" else "float32"


class Matmul(NamedTuple):
    """The fastest product of square matrices that was measured."""

    size: int
    rate: Rate


@cache
def _fastest_matmul(precision: Precision, during: float) -> Matmul:
    """Return the fastest product; `during` is the seconds of the first measurement at least."""
    import torch

    cores = min(torch.get_num_threads(), processes.available_cores())
    clock_hz = _peak_floor.read_clock_hz(CPUINFO)
    floor = _peak_floor.min_plausible_rate(precision, instructions(), cores, clock_hz)
    sizes: dict[float, int] = {}

    def measure() -> float:
        seconds = min(during, REPEATED_SECONDS) if sizes else during
        size, rate = _measure_matmul(_dtype(precision), seconds)
        sizes.setdefault(rate, size)
        return rate

    rate = Rate(*timing.repeat_below(measure, floor))
    if rate.measurements > 1:
        message = "matmul in %s: %.3g GFLOP/s is implausible, expected %.3g or more; measured again"
        logger.info(message, precision, next(iter(sizes)) / 1e9, floor / 1e9)
    return Matmul(sizes[rate.flops_per_second], rate)


def _measure_matmul(dtype: str, during: float) -> tuple[int, float]:
    """Return a size, and the operations a second of its product, tried for so many seconds."""
    import torch

    def made(size: int) -> Callable[[], float]:
        square = torch.ones(size, size, dtype=getattr(torch, dtype))

        def seconds() -> float:
            began = time.perf_counter()
            square @ square
            return time.perf_counter() - began

        return seconds

    size, seconds = timing.grown(made, FIRST_SIZE, LARGEST_SIZE, ENOUGH_SECONDS)
    return size, 2 * size**3 / timing.best(seconds, during)
