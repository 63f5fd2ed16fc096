"""Machine code for any number of rows and any length, by torch.export and AOTInductor.

A payload is a library: whoever loads it runs it. Its weights lie outside, and are mapped.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from regauge.accelerators import Accelerator, Availability, Precision
from regauge.backends import Backend, Job, Level, Payload, Quantized, Runner, Site
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

PACKAGE = "program.pt2"
V3 = frozenset({"x86_64", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
LEVELS: dict[Level, tuple[frozenset[str], int]] = {
    "x86-64-v3": (V3, 256),
    "x86-64-v4": (V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}, 512),
}
"""What the psABI's levels of x86-64 need, by the kernel's names, and the bits of their vectors."""


class Inductor(Backend):
    """One library for all shapes, compiled ahead of time."""

    @classmethod
    def available(cls) -> Availability:
        return Availability(2, "part of torch")

    def fits(self, accelerator: Accelerator) -> str | None:
        if not accelerator.ahead_of_time:
            return f"torch compiles no library ahead of time for {accelerator.kind}"
        return None

    def forms(self, accelerator: Accelerator) -> tuple[tuple[Precision, Quantized], ...]:
        return tuple((each, "no") for each in accelerator.precisions())

    def needs(self, site: Site, level: Level | None) -> frozenset[str]:
        return site.accelerator.features() if level is None else LEVELS[level][0]

    def export(self, job: Job, site: Site, folder: Path) -> None:
        import torch

        if obstacle := site.accelerator.obstacle_to_compiling():
            raise SettingsError(obstacle, "install one, or export for another backend")
        first = job.shapes[len(job.shapes) // 2]
        given = _inputs(job, first.rows, first.length)
        given = tuple(each.to(site.device) for each in given)
        job.program.to(site.device)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own code
            exported = torch.export.export(
                job.program, given, dynamic_shapes=_dynamic(job), strict=False
            )
            exported = exported.run_decompositions({torch.ops.aten.linear.default: _linear})
            torch._inductor.aoti_compile_and_package(  # noqa: SLF001 - torch documents it so
                exported,
                package_path=str(folder / PACKAGE),
                inductor_configs=_options(job.level, site.threads),
            )

    def load(self, payload: Payload, site: Site) -> Runner:
        import torch

        site.accelerator.use(payload.precision)
        library = torch._inductor.aoti_load_package(str(payload.folder / PACKAGE))  # noqa: SLF001
        weights = payload.weights()
        placed = {name: weights[name].to(site.device) for name in library.get_constant_fqns()}
        library.load_constants(placed, check_full_update=True, user_managed=True)
        return _Library(library, placed, site.device)


class _Library:
    """A library with its weights."""

    def __init__(self, library: Any, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self._library = library
        self._weights = weights  # the library only borrows them
        self._device = device

    def __call__(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self._library(*(each.to(self._device) for each in inputs))
        return output

    def graphs(self) -> int:
        return 0


def _inputs(job: Job, rows: int, length: int) -> tuple[Tensor, ...]:
    from regauge.models.inference_modules import FEWEST_ROWS, examples

    return examples(job.inputs, max(rows, FEWEST_ROWS), length)


def _dynamic(job: Job) -> tuple[dict[int, Any], ...]:
    """Return torch.export's description of the sizes that change."""
    from torch.export import Dim

    most = {
        "rows": max(shape.rows for shape in job.shapes),
        "length": max(shape.length for shape in job.shapes),
    }
    sizes = {name: Dim(name, min=1, max=limit) for name, limit in most.items() if limit > 1}
    return tuple(
        {place: sizes[size] for place, size in enumerate(each.shape) if size in sizes}
        for each in job.inputs
    )


def _linear(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add the bias behind the product, where it is fused with what follows.

    As one operation it is written into the output before: a tenth of the seconds of a small model.
    """
    import torch

    flat = torch.ops.aten.mm.default(value.reshape(-1, value.shape[-1]), weight.t())
    found: Tensor = flat.reshape(*value.shape[:-1], weight.shape[0])
    return found if bias is None else found + bias


def _options(level: Level | None, threads: int) -> dict[str, Any]:
    import torch._inductor.config as settings

    options: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        "cpp.threads": threads,
    }
    if level is not None:
        if not hasattr(settings.cpp, "march"):
            problem = "this torch compiles for its own machine alone"
            raise SettingsError(problem, "install torch 2.10 or later, or leave --portable out")
        options |= {"cpp.march": level, "cpp.simdlen": LEVELS[level][1]}
    return options
