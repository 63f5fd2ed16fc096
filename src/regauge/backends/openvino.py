"""An OpenVINO graph for any number of rows and any length, computed on a CPU by Intel's library.

The file holds no weights: they take the places that it names. It is data, and runs on every
processor, since code for one is made when a graph is loaded and first meets a shape.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from regauge.accelerators import Accelerator, Availability, Precision
from regauge.backends import Backend, Job, Level, Payload, Quantized, Runner, Site
from regauge.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

GRAPH = "program.xml"
DEVICE = "CPU"
HINTS: dict[Precision, str] = {"fp32": "f32", "bf16": "bf16"}
"""OpenVINO's names of what it computes in."""
EXACT = frozenset({"avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm"})
"""Features of processors that add products of integers in 32 bits. Others add two in 16, which is
too small for two of 8 bits: weights then have 7."""
LARGEST = {True: 127, False: 63}
"""Weight as an integer, by whether sums are exact."""
NOTE = ["regauge", "exact"]
"""Where a graph says whether its integers need exact sums."""


class Openvino(Backend):
    """One graph for all shapes, in a file without weights."""

    packages: ClassVar[tuple[str, ...]] = ("torch", "openvino")

    @classmethod
    def available(cls) -> Availability:
        from regauge.backends._lifted import lacking

        reason = lacking(cls.kind, "openvino")
        return Availability(0, reason) if reason else Availability(2, "openvino is installed")

    def fits(self, accelerator: Accelerator) -> str | None:
        return None if accelerator.on_host else f"it is for cpu, not for {accelerator.kind}"

    def forms(self, accelerator: Accelerator) -> tuple[tuple[Precision, Quantized], ...]:
        """Return bf16 where the processor multiplies it; without exact sums, integers are last.

        What is between products of integers is computed in the precision that is named with them.
        """
        native: tuple[Precision, ...] = ("bf16",) if accelerator.precisions()[0] == "bf16" else ()
        order: tuple[Quantized, ...] = ("int8", "no")
        if not accelerator.features() & EXACT:
            order = ("no", "int8")
        return tuple((each, quantized) for quantized in order for each in (*native, "fp32"))

    def needs(self, site: Site, level: Level | None) -> frozenset[str]:
        del site, level  # a graph holds no instructions
        return frozenset()

    def export(self, job: Job, site: Site, folder: Path) -> None:
        """Write a payload; raises ValueError for int8 where no layer is near enough in it."""
        import torch

        from regauge.backends._lifted import lifted
        from regauge.models.inference_modules import cast

        program = copy.deepcopy(job.program)
        cast(program, torch.float32)  # a graph in fp32 is computed in whatever it is told
        exact = bool(site.accelerator.features() & EXACT)
        if job.quantized == "int8":
            from regauge.backends._rounding import rounded

            program = rounded(program, job.calibration, LARGEST[exact])
        graph, names = lifted(program, job)
        openvino = _library()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own code
            model = openvino.convert_model(graph)
        _name(model, names, job)
        model.set_rt_info(str(exact and job.quantized == "int8"), NOTE)
        openvino.save_model(model, folder / GRAPH, compress_to_fp16=False)

    def load(self, payload: Payload, site: Site) -> Runner:
        """Return what computes a payload; raises PreflightError where its integers would be off."""
        core = _core()
        model = core.read_model(payload.folder / GRAPH)
        if _noted(model) and not site.accelerator.features() & EXACT:
            problem = "its integers need a processor that adds them in 32 bits, as VNNI does"
            raise PreflightError(problem, "export it again on this machine")
        weights = _fill(model, payload.weights())
        settings = {
            "INFERENCE_PRECISION_HINT": HINTS[payload.precision],
            "INFERENCE_NUM_THREADS": site.threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # other processes would be pinned to the same cores
        }
        return _Request(core.compile_model(model, DEVICE, settings), weights)


class _Request:
    """A compiled graph with its weights."""

    def __init__(self, compiled: Any, weights: Sequence[Any]) -> None:
        self._request = compiled.create_infer_request()
        self._weights = weights  # the graph only borrows them

    def __call__(self, *inputs: Tensor) -> Tensor:
        import torch

        given = [each.contiguous().numpy() for each in inputs]
        # The memory of an answer is used for the next one, so that it is copied.
        found = self._request.infer(given, share_inputs=True, share_outputs=False)
        return torch.from_numpy(found[0])

    def graphs(self) -> int:
        return 0


def _library() -> Any:
    """Import OpenVINO without the package by which it tells Intel that it was imported."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino
    import openvino.op

    return openvino


@functools.cache
def _core() -> Any:
    """Return the one of this process, which stays.

    Each takes the stack that signals are handled on, and gives back at its end what it found: the
    stack of another one, which may be gone by then, so that the next signal ends the process.
    """
    return _library().Core()


def _name(model: Any, weights: Sequence[str], job: Job) -> None:
    """Give a graph's inputs their names and sizes; what it does not use of weights is left out."""
    from openvino import PartialShape

    from regauge.models.inference_modules import tensors

    found = tensors(job.program)
    shapes = {name: list(found[name].shape) for name in weights}
    for each in job.inputs:
        shapes[each.name] = [size if isinstance(size, int) else -1 for size in each.shape]
    for parameter, (name, shape) in zip(model.get_parameters(), shapes.items(), strict=True):
        if name in found and not parameter.output(0).get_target_inputs():
            model.remove_parameter(parameter)
            continue
        parameter.set_friendly_name(name)
        parameter.output(0).get_tensor().set_names({name})
        parameter.set_partial_shape(PartialShape(shape))
    model.validate_nodes_and_infer_types()


def _fill(model: Any, weights: Mapping[str, Tensor]) -> list[Any]:
    """Put weights into the places that a graph has for them; return what it borrows."""
    import torch
    from openvino.op import Constant

    borrowed = []
    for parameter in model.get_parameters():
        value = weights.get(parameter.get_friendly_name())
        if value is None:
            continue
        value = value.detach().to(torch.float32) if value.is_floating_point() else value
        borrowed.append(value.contiguous().numpy())
        constant = Constant(borrowed[-1], shared_memory=True)
        parameter.output(0).replace(constant.output(0))
        model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    return borrowed


def _noted(model: Any) -> bool:
    """Return whether a graph's integers need exact sums."""
    return bool(model.has_rt_info(NOTE)) and str(model.get_rt_info(NOTE).astype(str)) == str(True)
