"""Devices behind PyTorch/XLA: TPUs, and the CPU as XLA compiles for it."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from regauge.accelerators import Accelerator, Availability, Chip, Precision
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import torch

    from regauge.accelerators import Batch

PLATFORM = "PJRT_DEVICE"
TERA = 1e12
PEAKS = {"v4": 275 * TERA, "v5e": 197 * TERA, "v5p": 459 * TERA, "v6e": 918 * TERA}
"""Dense bf16 peaks of one chip (cloud.google.com/tpu/docs, system architecture of each version)."""
GOOGLE = "0x1ae0"
TPU_CHIPS = frozenset({"0x0027", "0x005e", "0x0062", "0x0063", "0x006f"})
"""PCI identifiers of TPU v2 or v3, v4, v5p, v5e and v6e."""
STEPS_AHEAD = 2


class Xla(Accelerator):
    """One XLA device per process; operations are recorded and computed at each mark."""

    lazy: ClassVar[bool] = True
    variables: ClassVar[tuple[str, ...]] = ("XLA_", "PJRT_", "TPU_", "LIBTPU_", "XRT_")

    device: Literal["auto", "cpu", "tpu"] = "auto"
    """What XLA compiles for; `auto` is what PJRT_DEVICE says, else a TPU, else the CPU."""

    @classmethod
    def available(cls) -> Availability:
        if problem := _missing():
            return Availability(0, problem)
        if os.environ.get(PLATFORM, "").upper() == "TPU" or _tpu_chips():
            return Availability(90, f"torch_xla {version('torch_xla')} finds TPU chips")
        return Availability(1, f"torch_xla {version('torch_xla')} compiles for the CPU")

    def claim(self, local_rank: int, threads: int) -> torch.device:
        """Take the device; raises SettingsError where the environment says another platform.

        The client starts here, before any backward pass on the CPU: after one it would crash.
        """
        del local_rank
        import torch

        os.environ[PLATFORM] = self.platform()
        import torch_xla

        torch.set_num_threads(threads)
        if not hasattr(torch, "xla"):
            # torch.utils.checkpoint looks for a module of the device's name, and finds none.
            torch._register_device_module("xla", torch_xla)  # noqa: SLF001 - backends' own entry
        return torch.device(torch_xla.device())

    def platform(self) -> str:
        """Return PJRT's name of the platform."""
        foreign = os.environ.get(PLATFORM, "")
        if self.device == "auto":
            return foreign or ("TPU" if _tpu_chips() else "CPU")
        wanted = self.device.upper()
        if foreign not in ("", wanted):
            raise SettingsError(
                f"accelerator.device = '{self.device}', but {PLATFORM}={foreign} is set outside",
                f"unset {PLATFORM}, or leave accelerator.device out",
            )
        return wanted

    def collectives(self) -> str:
        return "xla"

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32") if self.platform() == "TPU" else ("fp32", "bf16")

    def use(self, precision: Precision) -> None:
        """Let fp32 products be fp32: a TPU's default rounds their factors to bf16."""
        import torch_xla.backends

        torch_xla.backends.set_mat_mul_precision("highest" if precision == "fp32" else "default")

    def end_microbatch(self) -> None:
        import torch_xla

        torch_xla.sync()

    def end_step(self) -> None:
        import torch_xla

        torch_xla.sync()

    def wrap_loader(
        self, steps: Iterator[list[Batch]], device: torch.device
    ) -> Generator[list[Batch]]:
        """Send the batches of later steps while this one is computed.

        torch_xla's loader would mark a step whenever it is asked for a batch: its count of batches
        per mark is set so high that the marks of a run are those of the loop.
        """
        from torch_xla.distributed.parallel_loader import ParallelLoader

        host = _Watched(steps)
        loader = ParallelLoader(
            host,
            [device],
            batches_per_execution=2**62,
            loader_prefetch_size=STEPS_AHEAD,
            device_prefetch_size=STEPS_AHEAD,
        )
        try:
            yield from loader.per_device_loader(device)
        finally:
            loader.close()
            if host.failure is not None:
                raise host.failure

    def seed(self, word: int) -> None:
        import torch
        import torch_xla

        torch.manual_seed(word)
        torch_xla.manual_seed(word)

    def graphs_compiled(self) -> int:
        """Return how many graphs XLA has compiled in this process."""
        return int(_metric("CompileTime")[0])

    def compile_seconds(self) -> float:
        return _metric("CompileTime")[1] / 1e9

    def obstacle_to_compiling(self) -> str | None:
        return "XLA compiles every graph itself"

    def synchronize(self) -> None:
        import torch_xla.core.xla_model

        torch_xla.sync()
        torch_xla.core.xla_model.wait_device_ops()

    def peak_memory_bytes(self) -> int | None:
        import torch_xla.core.xla_model

        if self.platform() == "CPU":
            return None
        found: Any = torch_xla.core.xla_model.get_memory_info(torch_xla.device())
        return int(found["peak_bytes_used"]) if "peak_bytes_used" in found else None

    def chip(self, precision: Precision) -> Chip:
        if self.platform() == "CPU":
            return Chip("XLA on the CPU")
        from torch_xla._internal import tpu

        name = f"v{tpu.version()}"
        peak = PEAKS.get(name)
        if peak is None or precision != "bf16":
            return Chip(f"TPU {name}")
        return Chip(f"TPU {name}", {"bf16": peak}, "the vendor's documentation, dense")


class _Watched:
    """An iterable that keeps what was raised in it: the loader's thread would swallow it."""

    def __init__(self, steps: Iterator[list[Batch]]) -> None:
        self._steps = steps
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        try:
            yield from self._steps
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the loop
            self.failure = error


def _metric(name: str) -> tuple[float, float]:
    """Return how often something was measured in this process, and the sum of it."""
    from torch_xla.debug import metrics

    data = metrics.metric_data(name)
    return (data[0], data[1]) if data else (0, 0.0)


def _missing() -> str | None:
    """Return what torch_xla lacks here, or None; nothing is imported."""
    if importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed"
    try:
        ours, theirs = version("torch"), version("torch_xla")
    except PackageNotFoundError as error:
        return f"{error.name} is not installed as a package"
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        return f"torch_xla {theirs} needs torch {'.'.join(theirs.split('.')[:2])}, here is {ours}"
    return None


def _tpu_chips() -> int:
    """Return how many TPU chips this machine shows on its PCI bus; torch_xla is not imported."""
    found = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, chip = ((device / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        found += vendor == GOOGLE and chip in TPU_CHIPS
    return found
