"""NVIDIA GPUs, and AMD GPUs through the same torch interface."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, ClassVar

from pydantic import field_validator

from regauge.accelerators import (
    Accelerator,
    Availability,
    ChipPeak,
    Precision,
    _nvidia,
    is_cpu_only_torch,
)
from regauge.accelerators._environment import compiler_obstacle, set_variable
from regauge.system.log import logger
from regauge.system.units import TERA

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from regauge.system.device_counters import DeviceReader, ErrorReader

NO_CUDA = "this torch was built without CUDA"
PEAKS: dict[str, dict[str, float]] = {
    "V100": {"fp16": 125 * TERA, "fp32": 15.7 * TERA},
    "T4": {"fp16": 65 * TERA, "fp32": 8.1 * TERA},
    "A10": {"bf16": 125 * TERA, "fp16": 125 * TERA, "tf32": 62.5 * TERA, "fp32": 31.2 * TERA},
    "L4": {"bf16": 121 * TERA, "fp16": 121 * TERA, "tf32": 60 * TERA, "fp32": 30.3 * TERA},
    "A100": {"bf16": 312 * TERA, "fp16": 312 * TERA, "tf32": 156 * TERA, "fp32": 19.5 * TERA},
    "H100": {
        "fp8": 1979 * TERA,
        "bf16": 989.5 * TERA,
        "fp16": 989.5 * TERA,
        "tf32": 494.7 * TERA,
        "fp32": 67 * TERA,
    },
    "H200": {
        "fp8": 1979 * TERA,
        "bf16": 989.5 * TERA,
        "fp16": 989.5 * TERA,
        "tf32": 494.7 * TERA,
        "fp32": 67 * TERA,
    },
}
"""Dense peaks of the SXM (or only) form factor, by a word in the driver's GPU name."""
AMPERE_CAPABILITY = (8, 0)
HOPPER_CAPABILITY = (9, 0)
CUDNN_OPERATIONS = ("conv", "rnn")
"""cuDNN operations that compute fp32 in tf32 by default."""


class Cuda(Accelerator):
    """One GPU per process; processes communicate over NCCL."""

    peer_names: ClassVar[tuple[str, ...]] = ("gpu", "nvidia", "amd", "rocm")
    chip_vendors: ClassVar[tuple[str, ...]] = ("NVIDIA", "AMD")

    is_shareable: ClassVar[bool] = True
    is_indexed: ClassVar[bool] = True
    has_dynamic_shapes: ClassVar[bool] = True
    supports_aot: ClassVar[bool] = True
    onnx_provider: ClassVar[str | None] = "CUDAExecutionProvider"
    generation_engines: ClassVar[tuple[str, ...]] = ("vllm",)
    env_prefixes: ClassVar[tuple[str, ...]] = ("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVIDIA_")

    cuda_graphs: bool = False
    """Replay compiled blocks as CUDA graphs: lower launch overhead, more memory."""
    nccl: dict[str, str | int] = {}
    """NCCL environment variables without the `NCCL_` prefix, such as `SOCKET_IFNAME = "eth0"`."""

    @field_validator("nccl")
    @classmethod
    def _check_nccl_names(cls, value: dict[str, str | int]) -> dict[str, str | int]:
        for name in value:
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name) or name.startswith("NCCL_"):
                raise ValueError(f"'{name}' is not an NCCL variable; write NCCL_DEBUG as DEBUG")
        return value

    @classmethod
    def available(cls) -> Availability:
        if is_cpu_only_torch():
            return Availability(0, NO_CUDA)
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            return Availability(0, NO_CUDA)
        if not torch.cuda.is_available():
            return Availability(0, "torch finds no usable GPU or driver")
        return Availability(100, torch.cuda.get_device_name(0))

    def claim(self, index: int, threads: int) -> torch.device:
        """Set the NCCL variables before NCCL reads them, and select the GPU."""
        import torch

        for name, value in self.nccl.items():
            set_variable(f"NCCL_{name}", str(value))
        if self.nccl and index == 0:
            variables = " ".join(f"{name}={value}" for name, value in self.nccl.items())
            logger.info("NCCL: %s", variables)
        # The thread of the backward pass has no context before its first product; torch sets one.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA")
        torch.set_num_threads(threads)
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def num_devices(self) -> int:
        import torch

        return torch.cuda.device_count()

    def distributed_backend(self) -> str:
        return "nccl"

    def diagnostic_commands(self, num_devices: int) -> tuple[tuple[str, ...], ...]:
        """Return DCGM's quick diagnostic and the nccl-tests all-reduce."""
        sizes = ("-b", "8", "-e", "64M", "-f", "4")
        all_reduce = ("all_reduce_perf", *sizes, "-g", str(num_devices))
        return (("dcgmi", "diag", "-r", "1"), all_reduce)

    def process_list_command(self) -> tuple[str, ...]:
        fields = "--query-compute-apps=pid,process_name,used_memory"
        return ("nvidia-smi", fields, "--format=csv,noheader")

    def precisions(self) -> tuple[Precision, ...]:
        """Return bf16 first; fp16 is only offered on chips without bf16."""
        import torch

        if torch.cuda.get_device_capability() >= AMPERE_CAPABILITY:
            return ("bf16", "tf32", "fp32")
        return ("fp16", "fp32")

    def fp8_obstacle(self) -> str | None:
        import torch

        if torch.version.hip is not None:
            return super().fp8_obstacle()
        capability = torch.cuda.get_device_capability()
        if capability < HOPPER_CAPABILITY:
            return f"{super().fp8_obstacle()}; this GPU has {capability[0]}.{capability[1]}"
        return None

    def set_precision(self, precision: Precision) -> None:
        import torch

        products = "tf32" if precision == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = products
        for operation in CUDNN_OPERATIONS:
            getattr(torch.backends.cudnn, operation).fp32_precision = products

    def fp32_settings(self) -> dict[str, str]:
        import torch

        cudnn = {
            f"cudnn.{name}": str(getattr(torch.backends.cudnn, name).fp32_precision)
            for name in CUDNN_OPERATIONS
        }
        return {"cuda.matmul": torch.backends.cuda.matmul.fp32_precision, **cudnn}

    def end_step(self) -> None:
        """Let CUDA graphs reuse the memory of the step outputs."""
        if self.cuda_graphs:
            import torch

            torch.compiler.cudagraph_mark_step_begin()

    def compile_options(self) -> dict[str, bool]:
        return {"triton.cudagraphs": True} if self.cuda_graphs else {}

    def onnx_options(self, index: int, precision: Precision) -> dict[str, str]:
        return {"device_id": str(index), "use_tf32": str(int(precision == "tf32"))}

    def features(self) -> frozenset[str]:
        """Return the compute capability, since compiled code needs the same one."""
        import torch

        major, minor = torch.cuda.get_device_capability()
        return frozenset({f"sm_{major}{minor}"})

    def compile_obstacle(self) -> str | None:
        return compiler_obstacle()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def peak_memory_bytes(self) -> int | None:
        import torch

        return torch.cuda.max_memory_allocated()

    def memory_bytes(self, num_processes: int) -> int | None:
        """Return the device memory, because each process has its own device."""
        import torch

        del num_processes
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)

    def start_energy_meter(self) -> Callable[[], float] | None:
        import torch

        return _nvidia.start_energy_meter(f"GPU-{torch.cuda.get_device_properties().uuid}")

    def open_counters(self) -> DeviceReader:
        return _nvidia.open_counters()

    def open_errors(self) -> ErrorReader:
        return _nvidia.open_errors()

    def chip_peak(self, precision: Precision) -> ChipPeak:
        import torch

        name = torch.cuda.get_device_name()
        words = name.replace("-", " ").split()
        peaks = next((peaks for word, peaks in PEAKS.items() if word in words), {})
        source = "the vendor's data sheet, dense" if precision in peaks else "unknown"
        return ChipPeak(name, peaks, source)
