"""Checks one device against the host CPU: memory, matrix products by precision, and speed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from regauge.models.tensors import precision_dtype
from regauge.supervision.health.findings import Finding
from regauge.system import timing

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor

    from regauge.accelerators import Accelerator, Precision
    from regauge.system.hooks import Inject

TOLERANCES = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2, "fp16": 2e-3}
"""Maximum error relative to the largest value; operands are rounded first, sums are in fp32."""
MEMORY_BYTES = 1 << 25
BANDWIDTH_BYTES = 1 << 28
"""Larger than most device caches."""
PRODUCT_SIZE = 256
MIN_SIZE, MAX_SIZE = 512, 8192
MIN_PRODUCT_SECONDS = 2e-3
"""In products that take this long, launch time is negligible."""
SPEED_SECONDS, MIN_TRIES = 0.15, 5
MIN_PEAK_SHARE = 0.2
"""Share of the data sheet's peak below which a device is slow; healthy devices reach 0.5."""
MIN_MEASURED_SHARE = 0.05
"""The same share for a measured peak: processes that share cores slow each other down."""
FAULT_POINT, SPEED_FAULT_POINT = "preflight:device", "preflight:speed"


def check_device(
    accelerator: Accelerator,
    device: torch.device,
    precisions: tuple[Precision, ...],
    location: str,
    inject: Inject,
) -> Generator[Finding | str]:
    """Yield the name of each check before it begins, then the finding."""
    yield "memory"
    yield _check_memory(device, location)
    for precision in precisions:
        accelerator.set_precision(precision)
        yield f"products in {precision}"
        yield _check_products(precision, device, location, inject)
        yield f"speed in {precision}"
        yield _check_speed(accelerator, precision, device, location, inject)


def check_bandwidth(
    accelerator: Accelerator, device: torch.device, location: str
) -> Generator[Finding | str]:
    """Yield `bandwidth`, then the memory bandwidth; the finding is always good."""
    yield "bandwidth"
    rate = measure_memory_bandwidth(accelerator, device)
    value, numbers = f"{rate / 1e9:.1f} GB/s of its memory", {"bytes_per_second": rate}
    yield Finding("bandwidth", location, value, numbers=numbers)


def measure_memory_bandwidth(accelerator: Accelerator, device: torch.device) -> float:
    """Return device memory bandwidth in bytes per second, reads plus writes."""
    large = torch.ones(BANDWIDTH_BYTES // 4).to(device)
    seconds = timing.measure_min_seconds(
        lambda: _time_once(accelerator, large.neg_), SPEED_SECONDS, MIN_TRIES
    )
    return 2 * BANDWIDTH_BYTES / seconds


def _check_memory(device: torch.device, location: str) -> Finding:
    """Copy random bytes to the device, within it, and back."""
    generator = torch.Generator().manual_seed(0)
    words = torch.empty(MEMORY_BYTES // 8, dtype=torch.int64)
    sent = words.random_(-(2**63), None, generator=generator).view(torch.uint8)
    received = sent.to(device, copy=True).clone().cpu()
    num_wrong = int((received != sent).sum())
    if num_wrong:
        problem = f"{num_wrong} of {MEMORY_BYTES} bytes came back changed"
        return Finding.bad("memory", location, problem)
    value, numbers = f"{MEMORY_BYTES:,} bytes came back", {"bytes": MEMORY_BYTES}
    return Finding("memory", location, value, numbers=numbers)


def _time_once(accelerator: Accelerator, work: Callable[[], Tensor]) -> float:
    """Return the seconds until the device has finished the work."""
    began = time.perf_counter()
    result = work()  # a lazy device computes only results that are still held  # noqa: F841
    if accelerator.is_lazy:
        accelerator.end_step()
    accelerator.synchronize()
    return time.perf_counter() - began


def _check_products(
    precision: Precision, device: torch.device, location: str, inject: Inject
) -> Finding:
    name = f"products in {precision}"
    generator = torch.Generator().manual_seed(1)
    shape, dtype = (PRODUCT_SIZE, PRODUCT_SIZE), precision_dtype(precision)
    left, right = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    product = (left.to(device) @ right.to(device)).cpu().double()
    for kind in inject(FAULT_POINT):
        product[0, 0] = float("nan") if kind == "nan" else product[0, 0] + product.abs().max()
    if not bool(product.isfinite().all()):
        return Finding.bad(name, location, "a product of finite numbers is not finite")
    exact = left.double() @ right.double()
    error = float((product - exact).abs().max() / exact.abs().max())
    if error > TOLERANCES[precision]:
        problem = f"off by {error:.1e}; the tolerance is {TOLERANCES[precision]:g}"
        return Finding.bad(name, location, problem)
    return Finding(name, location, f"off by {error:.1e}", numbers={"relative_error": error})


def _check_speed(
    accelerator: Accelerator,
    precision: Precision,
    device: torch.device,
    location: str,
    inject: Inject,
) -> Finding:
    """Time a large enough product, and compare the speed with the chip's peak.

    The size is doubled until a product takes MIN_PRODUCT_SECONDS. A seemingly slow device is timed
    again, because other work may have occupied it.
    """
    name = f"speed in {precision}"

    def build_timer(size: int) -> Callable[[], float]:
        square = torch.ones(size, size, dtype=precision_dtype(precision)).to(device)

        def multiply() -> Tensor:
            inject(SPEED_FAULT_POINT)
            return square @ square

        return lambda: _time_once(accelerator, multiply)

    def measure() -> float:
        size, timer = timing.find_timed_size(build_timer, MIN_SIZE, MAX_SIZE, MIN_PRODUCT_SECONDS)
        return 2 * size**3 / timing.measure_min_seconds(timer, SPEED_SECONDS, MIN_TRIES)

    chip = accelerator.chip_peak(precision)
    peak = chip.flops_per_second.get(precision)
    min_share = MIN_MEASURED_SHARE if chip.is_measured else MIN_PEAK_SHARE
    rate, num_measurements = timing.repeat_below(measure, min_share * (peak or 0))
    value, numbers = f"{rate / 1e9:,.0f} GFLOP/s", {"flops_per_second": rate}
    if peak is None:
        return Finding(name, location, value, flops_per_second=rate, numbers=numbers)
    peak = max(peak, rate) if chip.is_measured else peak  # other work can have slowed the peak
    numbers["fraction_of_peak"] = rate / peak
    value += f", {rate / peak:.0%} of the chip's"
    value += f" (best of {num_measurements} measurements)" if num_measurements > 1 else ""
    if rate < min_share * peak:
        problem = f"slow: {value}, which is less than {min_share:.0%}"
        finding = Finding.bad(name, location, problem, value)
        return replace(finding, may_be_load=chip.is_measured)
    return Finding(name, location, value, flops_per_second=rate, numbers=numbers)
