"""What every device behind PyTorch/XLA shares: it records, and computes at each mark."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

from regauge.accelerators import Accelerator
from regauge.accelerators._environment import impose

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    import torch

    from regauge.accelerators import Batch

PLATFORM = "PJRT_DEVICE"
STEPS_AHEAD = 2


class XlaDevice(Accelerator):
    """One device per process."""

    variables: ClassVar[tuple[str, ...]] = ("XLA_", "PJRT_")

    @property
    def lazy(self) -> bool:
        return True

    def platform(self) -> str:
        """Return PJRT's name of the platform."""
        raise NotImplementedError

    def claim(self, index: int, threads: int) -> torch.device:
        """Take the device; raises SettingsError where the environment says another platform.

        The client starts here, before any backward pass on the CPU: after one it would crash.
        """
        del index
        import torch

        impose(PLATFORM, self.platform())
        import torch_xla

        torch.set_num_threads(threads)
        if not hasattr(torch, "xla"):
            # torch.utils.checkpoint looks for a module of the device's name, and finds none.
            torch._register_device_module("xla", torch_xla)  # noqa: SLF001 - backends' own entry
        return torch.device(torch_xla.device())

    def collectives(self) -> str:
        return "xla"

    def rendezvous(self) -> str:
        import torch_xla.distributed.xla_backend  # noqa: F401 - it registers itself

        return "xla://"

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

    def counters(self) -> dict[str, float]:
        """Return graphs, transfers and their bytes, and operations that fell back to the host."""
        from torch_xla.debug import metrics

        sent, received = _metric("OutboundData"), _metric("InboundData")
        return {
            "graphs_compiled": _metric("CompileTime")[0],
            "graphs_executed": _metric("ExecuteTime")[0],
            "sent": sent[0],
            "sent_bytes": sent[1],
            "received": received[0],
            "received_bytes": received[1],
            "fallen_back": len(metrics.executed_fallback_ops()),
        }

    def features(self) -> frozenset[str]:
        return frozenset({self.platform(), f"torch_xla {version('torch_xla')}"})

    def use_cache(self, folder: Path) -> None:
        from torch_xla import runtime

        runtime.initialize_cache(str(folder))

    def cached(self) -> tuple[int, int]:
        """Return executables that were read back, and those that were compiled.

        XLA's client for the CPU finds its own and cannot read them back: they count as compiled.
        """
        from torch_xla.debug import metrics

        found = metrics.counter_value("PersistentCacheHit") or 0
        return int(found), self.graphs_compiled()

    def obstacle_to_compiling(self) -> str | None:
        return "XLA compiles every graph itself"

    def synchronize(self) -> None:
        import torch_xla
        from torch_xla.core import xla_model

        torch_xla.sync()
        xla_model.wait_device_ops()

    def peak_memory_bytes(self) -> int | None:
        import torch_xla
        from torch_xla.core import xla_model

        if self.platform() == "CPU":
            return None
        found: Any = xla_model.get_memory_info(torch_xla.device())
        return int(found["peak_bytes_used"]) if "peak_bytes_used" in found else None


class _Watched:
    """An iterable that keeps what was raised in it: the loader's thread would swallow it."""

    def __init__(self, steps: Iterator[list[Batch]]) -> None:
        self._steps = steps
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        try:
            yield from self._steps
        except Exception as error:  # noqa: BLE001 - raised again in the thread of the loop
            self.failure = error


def _metric(name: str) -> tuple[float, float]:
    """Return how often something was measured in this process, and the sum of it."""
    from torch_xla.debug import metrics

    data = metrics.metric_data(name)
    return (data[0], data[1]) if data else (0, 0.0)


def missing() -> str | None:
    """Return what torch_xla lacks here, or None; nothing is imported."""
    if importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed; it needs a torch of its own version beside it"
    try:
        ours, theirs = version("torch"), version("torch_xla")
    except PackageNotFoundError as error:
        return f"{error.name} is not installed as a package"
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        return f"torch_xla {theirs} needs torch {'.'.join(theirs.split('.')[:2])}, here is {ours}"
    return None
