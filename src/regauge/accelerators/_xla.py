"""Base class for PyTorch/XLA devices, which record operations and run them as graphs."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

from regauge.accelerators import Accelerator
from regauge.accelerators._environment import set_variable, torch_version_obstacle

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    import torch

    from regauge.accelerators import Batch

PLATFORM = "PJRT_DEVICE"
STEPS_AHEAD = 2
"""How many steps ahead batches are loaded and sent to the device."""


class XlaDevice(Accelerator):
    """One XLA device per process."""

    env_prefixes: ClassVar[tuple[str, ...]] = ("XLA_", "PJRT_")

    @property
    def is_lazy(self) -> bool:
        return True

    def platform(self) -> str:
        """Return the PJRT platform name, such as `TPU`."""
        raise NotImplementedError

    def claim(self, index: int, threads: int) -> torch.device:
        """Select the device; raises SettingsError if the environment names another platform.

        The client must start before the first backward pass on the CPU; it would crash afterwards.
        """
        del index
        import torch

        set_variable(PLATFORM, self.platform())
        import torch_xla

        torch.set_num_threads(threads)
        if not hasattr(torch, "xla"):
            # torch.utils.checkpoint needs a module with the name of the device, and there is none.
            torch._register_device_module("xla", torch_xla)  # noqa: SLF001 - the entry for backends
        return torch.device(torch_xla.device())

    def distributed_backend(self) -> str:
        return "xla"

    def init_method(self) -> str:
        import torch_xla.distributed.xla_backend  # noqa: F401 - it registers itself

        return "xla://"

    def end_microbatch(self) -> None:
        import torch_xla

        torch_xla.sync()

    def end_step(self) -> None:
        self.end_microbatch()

    def wrap_loader(
        self, steps: Iterator[list[Batch]], device: torch.device
    ) -> Generator[list[Batch]]:
        """Yield each step's batches; later batches are sent during the computation.

        torch_xla's loader marks a step after a given number of batches. The number is set so high
        that only the training loop marks steps.
        """
        from torch_xla.distributed.parallel_loader import ParallelLoader

        host = _ErrorRecordingSteps(steps)
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

    def seed(self, seed: int) -> None:
        import torch
        import torch_xla

        torch.manual_seed(seed)
        torch_xla.manual_seed(seed)

    def num_compiled_graphs(self) -> int:
        """Return how many graphs XLA has compiled in this process."""
        return int(_read_metric("CompileTime")[0])

    def compile_seconds(self) -> float:
        return _read_metric("CompileTime")[1] / 1e9

    def counters(self) -> dict[str, float]:
        """Return graph, transfer, transferred byte and CPU fallback counts."""
        from torch_xla.debug import metrics

        sent, received = _read_metric("OutboundData"), _read_metric("InboundData")
        return {
            "compiled_graphs": _read_metric("CompileTime")[0],
            "executed_graphs": _read_metric("ExecuteTime")[0],
            "transfers_to_device": sent[0],
            "bytes_to_device": sent[1],
            "transfers_from_device": received[0],
            "bytes_from_device": received[1],
            "cpu_fallbacks": len(metrics.executed_fallback_ops()),
        }

    def features(self) -> frozenset[str]:
        return frozenset({self.platform(), f"torch_xla {version('torch_xla')}"})

    def set_graph_cache(self, folder: Path) -> None:
        from torch_xla import runtime

        runtime.initialize_cache(str(folder))

    def graph_cache_counts(self) -> tuple[int, int]:
        """Return how many executables were read from the cache, and how many were compiled.

        XLA's CPU client cannot read executables back, so they count as compiled.
        """
        from torch_xla.debug import metrics

        hits = metrics.counter_value("PersistentCacheHit") or 0
        return int(hits), self.num_compiled_graphs()

    def compile_obstacle(self) -> str | None:
        return "XLA compiles every graph itself"

    def synchronize(self) -> None:
        from torch_xla.core import xla_model

        self.end_microbatch()
        xla_model.wait_device_ops()

    def peak_memory_bytes(self) -> int | None:
        import torch_xla
        from torch_xla.core import xla_model

        if self.platform() == "CPU":
            return None
        memory: Any = xla_model.get_memory_info(torch_xla.device())
        return int(memory["peak_bytes_used"]) if "peak_bytes_used" in memory else None


class _ErrorRecordingSteps:
    """Iterable that stores its exception, because the loader thread would lose it."""

    def __init__(self, steps: Iterator[list[Batch]]) -> None:
        self._steps = steps
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        try:
            yield from self._steps
        except Exception as error:  # noqa: BLE001 - raised again in the thread of the loop
            self.failure = error


def _read_metric(name: str) -> tuple[float, float]:
    """Return the count and sum of a torch_xla metric in this process."""
    from torch_xla.debug import metrics

    data = metrics.metric_data(name)
    return (data[0], data[1]) if data else (0, 0.0)


def torch_xla_obstacle() -> str | None:
    """Return why torch_xla cannot be used, or None, without importing it."""
    if importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed; it needs torch of the same version"
    return torch_version_obstacle("torch_xla")
