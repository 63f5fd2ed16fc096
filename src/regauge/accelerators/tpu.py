"""Google TPUs as a native torch device (torch-tpu 0.2 or later).

Written from the torch-tpu 0.2 documentation and wheel; not run on the hardware.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar

from regauge.accelerators import Availability, Precision
from regauge.accelerators._environment import set_variable
from regauge.accelerators._native import NativeDevice, find_other_device
from regauge.accelerators._tpu_chips import count_tpu_chips
from regauge.system.children import run_tool
from regauge.system.errors import PreflightError, first_line

if TYPE_CHECKING:
    from pathlib import Path

    import torch

PACKAGE = "torch_tpu"
CACHE_VARIABLE = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
LAUNCH_CODE = """
import json, os, sys
import torch
before = dict(os.environ)
torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=int(sys.argv[1]))
print(json.dumps({name: text for name, text in os.environ.items() if before.get(name) != text}))
"""
"""Prints the variables that the vendor's launcher sets before it starts processes."""
LAUNCH_SECONDS = 120.0


class Tpu(NativeDevice):
    """One TPU device per process; the launch environment binds each process to its device."""

    chip_vendors: ClassVar[tuple[str, ...]] = ("Google",)
    is_indexed: ClassVar[bool] = False

    env_prefixes: ClassVar[tuple[str, ...]] = ("TORCH_TPU_", "TPU_", "LIBTPU_", "PJRT_")

    cache: str | None = None
    """Folder or gs:// address for compiled programs; default: execution.compile_cache."""

    @classmethod
    def available(cls) -> Availability:
        if importlib.util.find_spec(PACKAGE) is None:
            return Availability(0, "torch_tpu is not installed")
        installed = f"torch_tpu {version('torch-tpu')}"
        if not count_tpu_chips():
            return Availability(0, f"{installed} is installed, but no TPU is on the PCI bus")
        if problem := find_other_device("tpu"):
            return Availability(0, f"{installed} is installed, but {problem}")
        return Availability(100, f"{installed} finds TPU chips")

    def launch_variables(self, num_processes: int) -> dict[str, str]:
        """Return the vendor launcher's variables, computed in a separate process.

        Raises PreflightError with its last line if it fails.
        """
        if num_processes == 1:
            return {}
        command = [sys.executable, "-c", LAUNCH_CODE, str(num_processes)]
        done = run_tool(command, LAUNCH_SECONDS)
        if done.returncode:
            cause = first_line("\n".join(reversed(done.stderr.strip().splitlines())))
            problem = f"torch_tpu cannot prepare {num_processes} processes: {cause}"
            raise PreflightError(problem, "set execution.processes to the number of TPU devices")
        variables: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return variables

    def claim(self, index: int, threads: int) -> torch.device:
        """Return the device that the launcher bound to this process; its index is 0."""
        del index
        if self.cache is not None:
            set_variable(CACHE_VARIABLE, self.cache)
        import torch

        torch.set_num_threads(threads)
        return torch.device("tpu", 0)

    def num_devices(self) -> int:
        return count_tpu_chips()

    def precisions(self) -> tuple[Precision, ...]:
        return ("bf16", "fp32")

    def compile_backend(self) -> str:
        return "tpu"

    def set_graph_cache(self, folder: Path) -> None:
        """Store compiled programs in a folder; `cache` sets another address."""
        os.environ.setdefault(CACHE_VARIABLE, str(folder))

    def counters(self) -> dict[str, float]:
        """Return program cache requests, hits and misses, if torch_tpu counts them."""
        import torch

        read = getattr(torch.get_device_module("tpu"), "_get_cache_stats", None)
        stats = read() if read is not None else {}
        return {f"program_cache_{name}": float(value) for name, value in dict(stats).items()}
