"""OpenVINO: a graph for any number of rows and any length, run on a CPU by Intel's library.

The file contains no weights; its inputs name them. The graph is data and runs on every processor.
Machine code is generated when the graph is loaded and when it first gets a shape.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from regauge.accelerators import Accelerator, Availability, Precision
from regauge.inference.backends import (
    Backend,
    CompileJob,
    ExecutionContext,
    IsaLevel,
    Payload,
    Quantization,
    Runner,
)
from regauge.system.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


GRAPH_FILE = "program.xml"
DEVICE = "CPU"
HINTS: dict[Precision, str] = {"fp32": "f32", "bf16": "bf16"}
"""Precision -> OpenVINO's name for it."""
EXACT_SUM_FEATURES = frozenset({"avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm"})
"""Features of processors that add integer products in 32 bits. Other processors add two products in
16 bits, which can overflow for 8-bit values, so weights then have 7 bits."""
MAX_WEIGHT = {True: 127, False: 63}
"""Whether sums are exact -> largest integer weight."""
EXACT_SUMS_KEY = ["regauge", "exact_sums"]
"""Key in a graph's runtime information for whether the integers need exact sums."""


class OpenvinoBackend(Backend):
    """One OpenVINO graph for all shapes, in a file without weights."""

    compiles_in_seconds: ClassVar[bool] = True
    shares_payload: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("torch", "openvino")

    @classmethod
    def available(cls) -> Availability:
        from regauge.inference.backends._weight_inputs import missing_library

        reason = missing_library(cls.kind, "openvino")
        return Availability(0, reason) if reason else Availability(3, "openvino is installed")

    def obstacle(self, accelerator: Accelerator) -> str | None:
        return None if accelerator.on_host else f"it supports only cpu, not {accelerator.kind}"

    def supported_formats(
        self, accelerator: Accelerator
    ) -> tuple[tuple[Precision, Quantization], ...]:
        """Return OpenVINO's precisions on this accelerator, and int8 before none.

        int8 comes last on processors without exact sums. An int8 format's precision is used between
        the integer products.
        """
        order: tuple[Quantization, ...] = ("int8", "none")
        if not accelerator.features() & EXACT_SUM_FEATURES:
            order = ("none", "int8")
        capabilities = _shared_core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
        usable = ("fp32", "bf16") if "BF16" in capabilities else ("fp32",)
        return tuple(
            (precision, quantization)
            for quantization in order
            for precision in accelerator.precisions()
            if precision in usable
        )

    def required_features(
        self, context: ExecutionContext, level: IsaLevel | None
    ) -> frozenset[str]:
        del context, level  # a graph contains no instructions
        return frozenset()

    def export(self, job: CompileJob, context: ExecutionContext, folder: Path) -> None:
        """Write the graph; raises ValueError if no layer is accurate enough in int8."""
        import torch

        from regauge.inference.backends._weight_inputs import export_graph

        program = job.calibration.program  # an fp32 graph can run in any precision
        has_exact_sums = bool(context.accelerator.features() & EXACT_SUM_FEATURES)
        if job.quantization == "int8":
            from regauge.inference.backends._int8.quantize import quantize_linear_layers

            program = quantize_linear_layers(program, job.calibration, MAX_WEIGHT[has_exact_sums])
        graph, names = export_graph(program, job)
        openvino = _import_openvino()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own code
            model = openvino.convert_model(graph)
        _name_inputs(model, names, job)
        needs_exact_sums = has_exact_sums and job.quantization == "int8"
        model.set_rt_info(str(needs_exact_sums), EXACT_SUMS_KEY)
        openvino.save_model(model, folder / GRAPH_FILE, compress_to_fp16=False)

    def load(self, payload: Payload, context: ExecutionContext) -> Runner:
        """Load a graph; raises PreflightError if this processor would compute wrong integers."""
        core = _shared_core()
        model = core.read_model(payload.folder / GRAPH_FILE)
        if _needs_exact_sums(model) and not context.accelerator.features() & EXACT_SUM_FEATURES:
            problem = "the int8 artifact needs a processor with 32-bit integer sums, such as VNNI"
            raise PreflightError(problem, "export it again on this machine")
        weights = _insert_weights(model, payload.read_arrays())
        settings = {
            "INFERENCE_PRECISION_HINT": HINTS[payload.precision],
            "INFERENCE_NUM_THREADS": context.threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # all processes would be pinned to the same cores
        }
        return _RequestRunner(core.compile_model(model, DEVICE, settings), weights)


class _RequestRunner(Runner):
    def __init__(self, compiled: Any, weights: Sequence[Any]) -> None:
        self._request = compiled.create_infer_request()
        self._weights = weights  # the graph only has pointers to them

    def __call__(self, *inputs: np.ndarray) -> np.ndarray:
        arrays = [np.ascontiguousarray(value) for value in inputs]
        # The output is copied, because its memory is reused for the next output.
        outputs = self._request.infer(arrays, share_inputs=True, share_outputs=False)
        output: np.ndarray = outputs[0]
        return output


def _import_openvino() -> Any:
    """Import OpenVINO without its telemetry package, which would report the import to Intel."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino
    import openvino.op

    return openvino


@functools.cache
def _shared_core() -> Any:
    """Return this process's only OpenVINO core, which is never destroyed.

    Each core replaces the signal handlers' stack and restores the previous one at its end. With
    several cores that stack may no longer exist, and the next signal would end the process.
    """
    return _import_openvino().Core()


def _name_inputs(model: Any, weights: Sequence[str], job: CompileJob) -> None:
    from openvino import PartialShape

    from regauge.models.inference_modules import named_tensors

    tensors = named_tensors(job.program)
    shapes = {name: list(tensors[name].shape) for name in weights}
    for spec in job.inputs:
        shapes[spec.name] = [size if isinstance(size, int) else -1 for size in spec.shape]
    for parameter, (name, shape) in zip(model.get_parameters(), shapes.items(), strict=True):
        if name in tensors and not parameter.output(0).get_target_inputs():
            model.remove_parameter(parameter)
            continue
        parameter.set_friendly_name(name)
        parameter.output(0).get_tensor().set_names({name})
        parameter.set_partial_shape(PartialShape(shape))
    model.validate_nodes_and_infer_types()


def _insert_weights(model: Any, weights: Mapping[str, np.ndarray]) -> list[Any]:
    """Replace a graph's weight inputs by constants; return the arrays to keep alive."""
    from openvino.op import Constant

    arrays = []
    for parameter in model.get_parameters():
        value = weights.get(parameter.get_friendly_name())
        if value is None:
            continue
        value = value.astype(np.float32, copy=False) if value.dtype.kind == "f" else value
        arrays.append(np.ascontiguousarray(value))
        constant = Constant(arrays[-1], shared_memory=True)
        parameter.output(0).replace(constant.output(0))
        model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    return arrays


def _needs_exact_sums(model: Any) -> bool:
    if not model.has_rt_info(EXACT_SUMS_KEY):
        return False
    return str(model.get_rt_info(EXACT_SUMS_KEY).astype(str)) == str(True)
