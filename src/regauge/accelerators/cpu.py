"""The host CPU: its threads, and a precision supported by its instruction set."""

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
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from regauge.accelerators import (
    Accelerator,
    Availability,
    ChipPeak,
    Precision,
    _bf16_emulation,
    _host_counters,
    _matmul_rates,
)
from regauge.accelerators._environment import compiler_obstacle
from regauge.system import processes, timing
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from regauge.system.device_counters import DeviceReader

BF16_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
MIN_SPEEDUP = 1.25
"""Prefer bf16 if it is measured at least this many times as fast as fp32."""
VECTOR_FEATURES = re.compile(r"sse|ssse|avx|amx|fma|f16c|bmi|abm|movbe|asimd|sve|i8mm|bf16|fphp")
"""Instruction set prefixes that a compiler may use for numerical loops."""
MIN_SIZE, MAX_SIZE, MIN_SECONDS = 192, 3072, 5e-3
"""Sizes of the measured square matrices, and the shortest duration that is accurate enough. A
precision without hardware instructions is a thousand times slower than the fastest one."""
REPEAT_SIZE = 1024
"""Smallest size after an implausible rate. Threads wait for each other at the end of a product, and
if other work uses the cores, that wait dominates a small product."""
ACTIVATION_MEMORY_BUDGET = 0.7
"""Fraction of activations that a compiled graph keeps for its backward pass; 1 in torch."""
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Control group folders and file names, version 2 then 1: memory limit, memory in use, and the
field with the page cache."""
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, MAX_THRESHOLD = -3, -1, 2**31 - 1
"""mallopt parameters in glibc's malloc.h, and the largest value of both, in bytes."""
ABANDONED_SECONDS = 60.0
"""Age at which an empty library counts as abandoned; a linker fills a file immediately."""
MEASURE_SECONDS, REPEAT_SECONDS = 0.2, 0.1
"""Measurement time, long enough to average out short background work, and the time of a repetition
after an implausible measurement."""
CPUINFO = Path("/proc/cpuinfo")


class Cpu(Accelerator):
    """One CPU process; processes communicate over gloo."""

    is_shareable: ClassVar[bool] = True
    is_indexed: ClassVar[bool] = True
    is_fork_safe: ClassVar[bool] = True
    has_dynamic_shapes: ClassVar[bool] = True
    is_deterministic: ClassVar[bool] = True
    attention: ClassVar[Literal["sdpa", "chunked"]] = "chunked"
    on_host: ClassVar[bool] = True
    supports_aot: ClassVar[bool] = True
    onnx_provider: ClassVar[str | None] = "CPUExecutionProvider"
    env_prefixes: ClassVar[tuple[str, ...]] = ("ATEN_CPU_", "DNNL_", "ONEDNN_", "GLOO_")

    @classmethod
    def available(cls) -> Availability:
        return Availability(2, "default")

    def claim(self, index: int, threads: int) -> torch.device:
        import torch

        del index

        torch.set_num_threads(threads)
        return torch.device("cpu")

    def distributed_backend(self) -> str:
        return "gloo"

    def precisions(self) -> tuple[Precision, ...]:
        """Return bf16 first if it is at least `MIN_SPEEDUP` times as fast as fp32, else fp32.

        fp16 would be emulated.
        """
        is_faster = self.precision_speeds().get("bf16", 0.0) >= MIN_SPEEDUP
        return ("bf16", "fp32") if is_faster else ("fp32", "bf16")

    def supports(self, precision: str) -> bool:
        return precision in _matmul_rates.DTYPES

    def precision_speeds(self) -> Mapping[Precision, float]:
        """Measure bf16 and fp32 if the processor has bf16 instructions, else neither."""
        if not instructions() & BF16_INSTRUCTIONS:
            return {}
        rates = _find_rates()
        return {precision: rate / rates["fp32"] for precision, rate in rates.items()}

    def emulates(self, precision: Precision) -> bool:
        return precision != "fp32" and self.precision_speeds().get(precision, 0.0) < 1

    def set_precision(self, precision: Precision) -> None:
        super().set_precision(precision)
        if precision == "bf16" and not instructions() & BF16_INSTRUCTIONS:
            _bf16_emulation.install()

    def model_name(self) -> str:
        return _model_name()

    def features(self) -> frozenset[str]:
        """Return the machine name and the instruction sets for numerical code."""
        return frozenset({platform.machine(), *filter(VECTOR_FEATURES.match, instructions())})

    def compile_backend(self) -> Callable[..., Any]:
        """Return an Inductor backend that stores fewer activations than torch's default.

        The backward pass recomputes the cheap ones at the same speed: two fifths of the stored
        bytes are attention probabilities and other results of one pass over memory
        (docs/explanation/performance.md). First removes unfinished libraries of other runs from
        torch's cache.
        """
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch's `cache_dir` would set it
        remove_abandoned(Path(folder or default_cache_dir()))
        return _compile_with_memory_budget

    def compile_obstacle(self) -> str | None:
        return compiler_obstacle()

    def warm_up_compiler(self) -> None:
        """Check the C++ compiler's vector instructions in a thread; this takes more than a second.

        torch caches the result. A compiler that fails here fails again during compilation, which
        reports the error.
        """
        threading.Thread(target=_check_vector_isa, name="vector-isa", daemon=True).start()

    def retain_freed_memory(self) -> None:
        """Keep glibc from returning freed memory to the operating system.

        Otherwise the kernel maps and zeroes the pages of every large tensor again, which takes a
        third of the time of a step (docs/explanation/performance.md).
        """
        with suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(M_MMAP_THRESHOLD, MAX_THRESHOLD)
            mallopt(M_TRIM_THRESHOLD, MAX_THRESHOLD)

    def peak_memory_bytes(self) -> int | None:
        """Return this program's peak resident memory.

        `getrusage` is only the fallback: it includes the parent process's peak.
        """
        peak = _host_counters.read_kibibytes(Path("/proc/self/status"), "VmHWM")
        return (peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024

    def open_counters(self) -> DeviceReader:
        return _host_counters.HostCounters().read

    def memory_bytes(self, num_processes: int) -> int | None:
        """Return an equal share of the memory that is free without swapping.

        The control group limit counts, too.
        """
        free = _host_counters.read_kibibytes(Path("/proc/meminfo"), "MemAvailable")
        limits = [free and free * 1024, _free_cgroup_bytes()]
        known = [limit for limit in limits if limit is not None]
        return min(known) // num_processes if known else None

    def start_energy_meter(self) -> Callable[[], float] | None:
        return _host_counters.start_energy_meter()

    def clear_measurements(self) -> None:
        _fastest_matmul.cache_clear()

    def chip_peak(self, precision: Precision) -> ChipPeak:
        size, flops_per_second, num_measurements = _fastest_matmul(precision)
        source = f"measured here: {size} x {size} x {size} matmul on this process's threads"
        if num_measurements > 1:
            source += f"; best of {num_measurements} measurements, since the first was implausible"
        return ChipPeak(_model_name(), {precision: flops_per_second}, source, is_measured=True)


@cache
def instructions() -> frozenset[str]:
    """Return the instruction sets reported by the kernel."""
    return frozenset(_read_cpuinfo("flags", "Features").split())


@cache
def _find_rates() -> Mapping[Precision, float]:
    clock_hz = _matmul_rates.read_clock_hz(CPUINFO)
    floors = {
        precision: _matmul_rates.min_plausible_rate(precision, instructions(), 1, clock_hz)
        for precision in _matmul_rates.DTYPES
    }
    return _matmul_rates.find_rates(_model_name(), instructions(), floors)


def _free_cgroup_bytes() -> int | None:
    """Return this control group's free memory; None without a limit."""
    for root, limit, used, cached in CGROUPS:
        try:
            free = int((root / limit).read_text(encoding="utf-8")) - int(
                (root / used).read_text(encoding="utf-8")
            )
            counts = dict(
                line.split()
                for line in (root / "memory.stat").read_text(encoding="utf-8").splitlines()
            )
        except (OSError, ValueError):  # no such group, or its limit is the word "max"
            continue
        return max(0, free + int(counts.get(cached, 0)))
    return None


def _model_name() -> str:
    return _read_cpuinfo("model name") or "CPU"


def _read_cpuinfo(*names: str) -> str:
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(names))
    return next(values, "")


def _compile_with_memory_budget(*graph: Any) -> Any:
    """Compile a graph with a limit on the activations kept for its backward pass."""
    from torch._dynamo import lookup_backend
    from torch._functorch import config

    with config.patch(activation_memory_budget=ACTIVATION_MEMORY_BUDGET):
        return lookup_backend("inductor")(*graph)


def _check_vector_isa() -> None:
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.pick_vec_isa()


def remove_abandoned(cache: Path) -> None:
    """Remove empty libraries from torch's cache, which no run can load or replace.

    They remain if a machine is switched off while compiling.
    """
    for path in cache.rglob("*.so"):
        with suppress(OSError):
            status = path.stat()
            if not status.st_size and time.time() - status.st_mtime > ABANDONED_SECONDS:
                path.unlink()


@cache
def _fastest_matmul(precision: Precision) -> tuple[int, float, int]:
    """Return the fastest square product's size and FLOP/s, and the number of measurements.

    The first measurement lasts at least MEASURE_SECONDS; others follow if it was implausible.
    """
    import torch

    cores = min(torch.get_num_threads(), processes.available_cores())
    clock_hz = _matmul_rates.read_clock_hz(CPUINFO)
    floor = _matmul_rates.min_plausible_rate(precision, instructions(), cores, clock_hz)
    dtype = _matmul_rates.DTYPES.get(precision, "float32")
    sizes: dict[float, int] = {}

    def measure() -> float:
        if sizes:
            seconds, min_size = REPEAT_SECONDS, REPEAT_SIZE
        else:
            seconds, min_size = MEASURE_SECONDS, MIN_SIZE
        size, rate = _measure_matmul(dtype, seconds, min_size)
        sizes.setdefault(rate, size)
        return rate

    rate, num_measurements = timing.repeat_below(measure, floor)
    if num_measurements > 1:
        message = "matrix products in %s were slow, %.3g GFLOP/s instead of at least %.3g, and were"
        message += " measured again; other programs may use the machine"
        logger.info(message, precision, next(iter(sizes)) / 1e9, floor / 1e9)
    return sizes[rate], rate, num_measurements


def _measure_matmul(dtype: str, min_seconds: float, min_size: int) -> tuple[int, float]:
    """Return the matrix side and FLOP/s of a square product.

    Measures for at least `min_seconds`; the side is at least `min_size`.
    """
    import torch

    def build_product(size: int) -> Callable[[], float]:
        square = torch.ones(size, size, dtype=getattr(torch, dtype))

        def run() -> float:
            start = time.perf_counter()
            square @ square
            return time.perf_counter() - start

        return run

    size, run = timing.find_timed_size(build_product, min_size, MAX_SIZE, MIN_SECONDS)
    return size, 2 * size**3 / timing.measure_min_seconds(run, min_seconds)
