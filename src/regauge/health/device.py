"""One device against the processor: memory, products in each precision, and speed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from regauge import timing
from regauge.health.findings import Finding
from regauge.models.tensors import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor

    from regauge.accelerators import Accelerator, Precision
    from regauge.hooks import Inject

TOLERANCES = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2, "fp16": 2e-3}
"""Of the largest value; the operands are rounded first, and a product is summed in fp32."""
MEMORY_BYTES = 1 << 25
LARGE_BYTES = 1 << 28
"""More than the caches of most devices."""
PRODUCT_SIZE = 256
FIRST_SIZE, LARGEST_SIZE = 512, 8192
LONG_ENOUGH_SECONDS = 2e-3
"""A product that takes as long is not measured for its launch."""
SPEED_SECONDS, LEAST_TRIES = 0.15, 5
LEAST_SHARE = 0.2
"""Of the data sheet's peak: below it a device is slow. Healthy ones were seen at 0.5 and more."""
LEAST_SHARE_MEASURED = 0.05
"""Of a peak that this process has timed: processes that share cores take much from each other."""
MOMENT, SPEED_MOMENT = "preflight:device", "preflight:speed"


def check_device(
    accelerator: Accelerator,
    device: torch.device,
    precisions: tuple[Precision, ...],
    where: str,
    inject: Inject,
) -> Generator[Finding | str]:
    """Yield the name of each check before it begins, and then what it has found."""
    yield "memory"
    yield _memory(device, where)
    for precision in precisions:
        accelerator.use(precision)
        yield f"products in {precision}"
        yield _products(precision, device, where, inject)
        yield f"speed in {precision}"
        yield _speed(accelerator, precision, device, where, inject)


def bandwidth(
    accelerator: Accelerator, device: torch.device, where: str
) -> Generator[Finding | str]:
    """Yield `bandwidth`, and how fast the device reads and writes its memory: for people alone."""
    yield "bandwidth"
    value = f"{memory_rate(accelerator, device) / 1e9:.1f} GB/s of its memory"
    yield Finding("bandwidth", where, value)


def memory_rate(accelerator: Accelerator, device: torch.device) -> float:
    """Return the bytes a second that the device reads and writes in its memory."""
    large = torch.ones(LARGE_BYTES // 4).to(device)
    seconds = timing.best(lambda: _timed(accelerator, large.neg_), SPEED_SECONDS, LEAST_TRIES)
    return 2 * LARGE_BYTES / seconds


def _memory(device: torch.device, where: str) -> Finding:
    """Send random bytes to the device, copy them there and read them back."""
    draw = torch.Generator().manual_seed(0)
    sent = torch.randint(0, 256, (MEMORY_BYTES,), dtype=torch.uint8, generator=draw)
    found = sent.to(device, copy=True).clone().cpu()
    wrong = int((found != sent).sum())
    if wrong:
        return Finding.bad("memory", where, f"{wrong} of {MEMORY_BYTES} bytes came back changed")
    return Finding("memory", where, f"{MEMORY_BYTES:,} bytes came back")


def _timed(accelerator: Accelerator, work: Callable[[], Tensor]) -> float:
    """Return the seconds until the device has done some work."""
    began = time.perf_counter()
    done = work()  # a lazy device computes what is still held  # noqa: F841
    if accelerator.lazy:
        accelerator.end_step()
    accelerator.synchronize()
    return time.perf_counter() - began


def _products(precision: Precision, device: torch.device, where: str, inject: Inject) -> Finding:
    name = f"products in {precision}"
    draw = torch.Generator().manual_seed(1)
    shape = (PRODUCT_SIZE, PRODUCT_SIZE)
    left, right = (torch.randn(shape, generator=draw).to(dtype_of(precision)) for _ in range(2))
    found = (left.to(device) @ right.to(device)).cpu().double()
    for kind in inject(MOMENT):
        found[0, 0] = float("nan") if kind == "nan" else found[0, 0] + found.abs().max()
    if not bool(found.isfinite().all()):
        return Finding.bad(name, where, "a product of finite numbers is not finite")
    exact = left.double() @ right.double()
    error = float((found - exact).abs().max() / exact.abs().max())
    if error > TOLERANCES[precision]:
        return Finding.bad(name, where, f"off by {error:.1e}, and {TOLERANCES[precision]:g} is due")
    return Finding(name, where, f"off by {error:.1e}")


def _speed(
    accelerator: Accelerator, precision: Precision, device: torch.device, where: str, inject: Inject
) -> Finding:
    """Multiply larger and larger matrices until one takes long enough, and time that one.

    A device that seems slow is timed again: other work may have had it.
    """
    name = f"speed in {precision}"

    def made(size: int) -> Callable[[], float]:
        square = torch.ones(size, size, dtype=dtype_of(precision)).to(device)

        def multiply() -> Tensor:
            inject(SPEED_MOMENT)
            return square @ square

        return lambda: _timed(accelerator, multiply)

    def measure() -> float:
        size, seconds = timing.grown(made, FIRST_SIZE, LARGEST_SIZE, LONG_ENOUGH_SECONDS)
        return 2 * size**3 / timing.best(seconds, SPEED_SECONDS, LEAST_TRIES)

    chip = accelerator.chip(precision)
    peak = chip.flops_per_second.get(precision)
    least = LEAST_SHARE_MEASURED if chip.measured else LEAST_SHARE
    rate, count = timing.repeat_below(measure, least * (peak or 0))
    value = f"{rate / 1e9:,.0f} GFLOP/s"
    if peak is None:
        return Finding(name, where, value, speed=rate)
    value += f", {rate / peak:.0%} of the chip's"
    value += f" (best of {count} measurements)" if count > 1 else ""
    if rate < least * peak:
        return Finding.bad(name, where, f"slow: less than {least:.0%}", value)
    return Finding(name, where, value, speed=rate)
