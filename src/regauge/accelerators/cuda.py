"""NVIDIA GPUs (and AMD's, through the same torch interface)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator

from regauge.accelerators import (
    Accelerator,
    Availability,
    Chip,
    Precision,
    _compiler,
    _nvml,
    for_cpus,
)
from regauge.accelerators._environment import impose
from regauge.log import logger
from regauge.units import TERA

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

WITHOUT = "this torch was built without CUDA"
PEAKS: dict[str, dict[str, float]] = {
    "V100": {"fp16": 125 * TERA, "fp32": 15.7 * TERA},
    "T4": {"fp16": 65 * TERA, "fp32": 8.1 * TERA},
    "A10": {"bf16": 125 * TERA, "fp16": 125 * TERA, "tf32": 62.5 * TERA, "fp32": 31.2 * TERA},
    "L4": {"bf16": 121 * TERA, "fp16": 121 * TERA, "tf32": 60 * TERA, "fp32": 30.3 * TERA},
    "A100": {"bf16": 312 * TERA, "fp16": 312 * TERA, "tf32": 156 * TERA, "fp32": 19.5 * TERA},
    "H100": {"bf16": 989.5 * TERA, "fp16": 989.5 * TERA, "tf32": 494.7 * TERA, "fp32": 67 * TERA},
    "H200": {"bf16": 989.5 * TERA, "fp16": 989.5 * TERA, "tf32": 494.7 * TERA, "fp32": 67 * TERA},
}
"""Dense peaks of the SXM (or only) form, by the word that the driver's name for it contains."""
AMPERE = (8, 0)


class Cuda(Accelerator):
    """One GPU per process; several of them meet over NCCL."""

    shared: ClassVar[bool] = True
    indexed: ClassVar[bool] = True
    symbolic: ClassVar[bool] = True
    ahead_of_time: ClassVar[bool] = True
    onnx_provider: ClassVar[str | None] = "CUDAExecutionProvider"
    variables: ClassVar[tuple[str, ...]] = ("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVIDIA_")

    cuda_graphs: Literal["no", "yes"] = "no"
    """Whether compiled blocks are replayed as CUDA graphs: less launching, more memory."""
    nccl: dict[str, str | int] = {}
    """NCCL's variables without their prefix, such as `SOCKET_IFNAME = "eth0"`."""

    @field_validator("nccl")
    @classmethod
    def _named_as_nccl_does(cls, value: dict[str, str | int]) -> dict[str, str | int]:
        for name in value:
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name) or name.startswith("NCCL_"):
                raise ValueError(f"'{name}' is no NCCL variable; write NCCL_DEBUG as DEBUG")
        return value

    @classmethod
    def available(cls) -> Availability:
        if for_cpus():
            return Availability(0, WITHOUT)
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            return Availability(0, WITHOUT)
        if not torch.cuda.is_available():
            return Availability(0, "torch finds no usable GPU or driver")
        return Availability(100, torch.cuda.get_device_name(0))

    def claim(self, index: int, threads: int) -> torch.device:
        """Hand NCCL its settings, which it reads when processes meet, and take a GPU."""
        import torch

        for name, value in self.nccl.items():
            impose(f"NCCL_{name}", str(value))
        if self.nccl and index == 0:
            said = " ".join(f"{name}={value}" for name, value in self.nccl.items())
            logger.info("NCCL: %s", said)
        torch.set_num_threads(threads)
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def collectives(self) -> str:
        return "nccl"

    def tools(self, size: int) -> tuple[tuple[str, ...], ...]:
        """Return DCGM's readiness check, and nccl-tests' sum."""
        sums = ("all_reduce_perf", "-b", "8", "-e", "64M", "-f", "4", "-g", str(size))
        return (("dcgmi", "diag", "-r", "1"), sums)

    def occupants(self) -> tuple[str, ...]:
        fields = "--query-compute-apps=pid,process_name,used_memory"
        return ("nvidia-smi", fields, "--format=csv,noheader")

    def precisions(self) -> tuple[Precision, ...]:
        """Return bf16 first; fp16 alone is offered where the chip has no bf16."""
        import torch

        if torch.cuda.get_device_capability() >= AMPERE:
            return ("bf16", "tf32", "fp32")
        return ("fp16", "fp32")

    def use(self, precision: Precision) -> None:
        import torch

        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"

    def end_step(self) -> None:
        """Let CUDA graphs use the memory of the step's outputs again."""
        if self.cuda_graphs == "yes":
            import torch

            torch.compiler.cudagraph_mark_step_begin()

    def compile_options(self) -> dict[str, bool]:
        return {"triton.cudagraphs": True} if self.cuda_graphs == "yes" else {}

    def onnx_options(self, index: int, precision: Precision) -> dict[str, str]:
        return {"device_id": str(index), "use_tf32": str(int(precision == "tf32"))}

    def features(self) -> frozenset[str]:
        """Return the compute capability: code for one runs on no other."""
        import torch

        major, minor = torch.cuda.get_device_capability()
        return frozenset({f"sm_{major}{minor}"})

    def obstacle_to_compiling(self) -> str | None:
        return _compiler.obstacle()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def peak_memory_bytes(self) -> int | None:
        import torch

        return torch.cuda.max_memory_allocated()

    def memory_bytes(self, processes: int) -> int | None:
        """Return what the device has: each process has one of its own."""
        import torch

        del processes
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)

    def meter(self) -> Callable[[], float] | None:
        import torch

        return _nvml.meter(f"GPU-{torch.cuda.get_device_properties().uuid}")

    def chip(self, precision: Precision) -> Chip:
        import torch

        name = torch.cuda.get_device_name()
        words = name.replace("-", " ").split()
        peaks = next((peaks for word, peaks in PEAKS.items() if word in words), {})
        source = "the vendor's data sheet, dense" if precision in peaks else "unknown"
        return Chip(name, peaks, source)
