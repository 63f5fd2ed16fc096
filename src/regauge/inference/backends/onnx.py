"""ONNX Runtime: an ONNX graph for any number of rows and any length.

The file contains no weights; the runtime gets them by name. The graph is data and runs on every
processor, since the runtime compiles nothing and selects kernels when it loads the graph. Quantized
inputs and weights are both unsigned, because sums with signed weights would saturate on processors
without VNNI.
"""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import contextmanager
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
from regauge.system.json_files import read_json_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

GRAPH_FILE, WEIGHT_NAMES_FILE = "program.onnx", "weights.json"
OPSET = 20
"""First opset with GELU as one operation."""
ATTENTION_DIMENSIONS = 4
"""Dimensions of attention queries, keys, values and masks."""
LOG_FATAL = 4
"""Runtime log level; errors are also raised."""


class OnnxBackend(Backend):
    """One ONNX graph for all shapes, in a file without weights."""

    peer_names: ClassVar[tuple[str, ...]] = ("onnxruntime", "ort")

    compiles_in_seconds: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("torch", "onnx", "onnxscript", "onnxruntime")

    @classmethod
    def available(cls) -> Availability:
        from regauge.inference.backends._weight_inputs import missing_library

        reason = missing_library(cls.kind, "onnxruntime", "onnx", "onnxscript")
        return Availability(0, reason) if reason else Availability(2, "onnxruntime is installed")

    def obstacle(self, accelerator: Accelerator) -> str | None:
        provider = accelerator.onnx_provider
        if provider is None:
            return f"ONNX Runtime has no execution provider for {accelerator.kind}"
        if accelerator.on_host or self.available().fitness == 0:
            return None
        import onnxruntime

        is_built_in = provider in onnxruntime.get_available_providers()
        return None if is_built_in else f"this onnxruntime has no {provider}"

    def supported_formats(
        self, accelerator: Accelerator
    ) -> tuple[tuple[Precision, Quantization], ...]:
        """Return fp32 and int8 on CPUs, the only types in the runtime's CPU kernels.

        Leaves out bf16 on GPUs, because some of the runtime's kernels do not support it.
        """
        if accelerator.on_host:
            return (("fp32", "int8"), ("fp32", "none"))
        precisions = accelerator.precisions()
        return tuple((precision, "none") for precision in precisions if precision != "bf16")

    def required_features(
        self, context: ExecutionContext, level: IsaLevel | None
    ) -> frozenset[str]:
        del context, level  # a graph contains no instructions
        return frozenset()

    def export(self, job: CompileJob, context: ExecutionContext, folder: Path) -> None:
        """Write the graph; raises ValueError if no layer is accurate enough in int8."""
        del context
        import onnx_ir
        import torch

        from regauge.inference.backends._weight_inputs import export_graph

        program = job.program
        if job.quantization == "int8":
            from regauge.inference.backends._int8.quantize import quantize_linear_layers

            program = quantize_linear_layers(program, job.calibration)
        graph, names = export_graph(program, job)
        fused = {torch.ops.aten.scaled_dot_product_attention.default: _fused_attention}
        with torch.no_grad(), _silence_torch():
            exported = torch.onnx.export(
                graph.run_decompositions(fused),
                input_names=[*names, *(spec.name for spec in job.inputs)],
                opset_version=OPSET,
                verbose=False,
            )
        model: Any = exported.model  # type: ignore[union-attr]  # None only if torch writes a file
        used = _externalize_weights(model, names)
        (folder / WEIGHT_NAMES_FILE).write_text(json.dumps(used), encoding="utf-8")
        onnx_ir.save(model, folder / GRAPH_FILE)

    def load(self, payload: Payload, context: ExecutionContext) -> Runner:
        import onnxruntime

        accelerator, index = context.accelerator, 0
        if not accelerator.on_host:  # torch is not needed on the host
            accelerator.set_precision(payload.precision)
            index = context.device.index or 0
        options = accelerator.onnx_options(index, payload.precision)
        names = read_json_list(payload.folder / WEIGHT_NAMES_FILE, "export the artifact again")
        arrays = payload.read_arrays()
        weights = {name: np.ascontiguousarray(arrays[name]) for name in names}
        session = onnxruntime.InferenceSession(
            str(payload.folder / GRAPH_FILE),
            _build_options(context.threads, weights),
            providers=[(accelerator.onnx_provider, options)],
        )
        return _SessionRunner(session, weights)


class _SessionRunner(Runner):
    def __init__(self, session: Any, weights: Mapping[str, Any]) -> None:
        self._session = session
        self._weights = weights  # the session only has pointers to them
        self._names = [value.name for value in session.get_inputs()]

    def __call__(self, *inputs: np.ndarray) -> np.ndarray:
        arrays = map(np.ascontiguousarray, inputs)
        output: np.ndarray
        [output] = self._session.run(None, dict(zip(self._names, arrays, strict=True)))
        return output


@contextmanager
def _silence_torch() -> Iterator[None]:
    """Suppress torch's messages about torch code and missing libraries."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _build_options(threads: int, weights: Mapping[str, Any]) -> Any:
    from onnxruntime import OrtValue, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = LOG_FATAL
    values = [OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    options.add_external_initializers(list(weights), values)
    return options


def _externalize_weights(model: Any, names: Sequence[str]) -> list[str]:
    """Turn a graph's weights from inputs into external values; return the used ones."""
    import onnx_ir

    graph, used = model.graph, []
    inputs = {value.name: value for value in graph.inputs}
    for name in names:
        value = inputs[name]
        graph.inputs.remove(value)
        if value.uses():
            size = value.dtype.itemsize
            for length in value.shape:
                size *= length
            value.const_value = onnx_ir.ExternalTensor(
                "weights", 0, int(size), value.dtype, shape=value.shape, name=name
            )
            graph.register_initializer(value)
            used.append(name)
    for node in graph:  # source locations in torch's code are nine tenths of the file
        node.metadata_props.clear()
        node.doc_string = None
    return used


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *arguments: Any,
    scale: float | None = None,
    **keywords: Any,
) -> Any:
    """Compute attention with the runtime's fused operation, which saves a twentieth of the time.

    Queries are [rows, heads, queries, width], keys and values [rows, heads, keys, width], and a
    mask is [rows or 1, heads or 1, queries or 1, keys]. Returns NotImplemented for any other
    attention, which is then exported unchanged.
    """
    import torch

    is_additive = attn_mask is None or (
        attn_mask.ndim == ATTENTION_DIMENSIONS and attn_mask.dtype == query.dtype
    )
    has_equal_heads = query.ndim == ATTENTION_DIMENSIONS and key.shape[1] == query.shape[1]
    has_options = any(arguments) or any(keywords.values())  # dropout, causal, or grouped heads
    if has_options or not (is_additive and has_equal_heads):
        return NotImplemented
    rows, heads, queries, width = query.shape
    keys, value_width = key.shape[2], value.shape[3]
    flat = [tensor.transpose(1, 2).flatten(2) for tensor in (query, key, value)]
    bias = None if attn_mask is None else attn_mask.expand(-1, -1, queries, keys)
    output: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [*flat, None, None, bias],
        {"num_heads": int(heads), "scale": width**-0.5 if scale is None else scale},
        dtype=query.dtype,
        shape=(rows, queries, heads * value_width),
        version=1,
    )
    return output.unflatten(2, (heads, value_width)).transpose(1, 2)
