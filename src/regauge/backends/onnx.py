"""An ONNX graph for any number of rows and any length, computed by ONNX Runtime.

The file holds no weights: they are handed to the runtime by their names. It is data, and runs on
every processor, since the runtime compiles nothing and chooses its kernels when it loads a graph.
Integers are unsigned on both sides: of signed weights, processors without VNNI would cut sums off.
"""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from regauge.accelerators import Accelerator, Availability, Precision
from regauge.backends import Backend, Job, Level, Payload, Quantized, Runner, Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

GRAPH, WEIGHTS = "program.onnx", "weights.json"
OPSET = 20
"""The first with GELU as one operation."""
AXES = 4
"""Of what attention takes."""
FATAL = 4
"""The runtime's level of messages: an error is raised as well."""


class Onnx(Backend):
    """One graph for all shapes, in a file without weights."""

    packages: ClassVar[tuple[str, ...]] = ("torch", "onnx", "onnxscript", "onnxruntime")

    @classmethod
    def available(cls) -> Availability:
        from regauge.backends._lifted import lacking

        reason = lacking(cls.kind, "onnxruntime", "onnx", "onnxscript")
        return Availability(0, reason) if reason else Availability(2, "onnxruntime is installed")

    def fits(self, accelerator: Accelerator) -> str | None:
        provider = accelerator.onnx_provider
        if provider is None:
            return f"ONNX Runtime has no execution provider for {accelerator.kind}"
        if accelerator.on_host or self.available().fitness == 0:
            return None
        import onnxruntime

        is_built_in = provider in onnxruntime.get_available_providers()
        return None if is_built_in else f"this onnxruntime has no {provider}"

    def forms(self, accelerator: Accelerator) -> tuple[tuple[Precision, Quantized], ...]:
        """Return fp32 on CPUs: the runtime computes nothing else of theirs but integers.

        Not all of its kernels for GPUs know bf16.
        """
        if accelerator.on_host:
            return (("fp32", "int8"), ("fp32", "no"))
        return tuple((each, "no") for each in accelerator.precisions() if each != "bf16")

    def needs(self, site: Site, level: Level | None) -> frozenset[str]:
        del site, level  # a graph holds no instructions
        return frozenset()

    def export(self, job: Job, site: Site, folder: Path) -> None:
        """Write a payload; raises ValueError for int8 where no layer is near enough in it."""
        del site
        import onnx_ir
        import torch

        from regauge.backends._lifted import lifted

        program = job.program
        if job.quantized == "int8":
            from regauge.backends._rounding import rounded

            program = rounded(program, job.calibration)
        graph, names = lifted(program, job)
        fused = {torch.ops.aten.scaled_dot_product_attention.default: _attention}
        with torch.no_grad(), _quiet():
            made = torch.onnx.export(
                graph.run_decompositions(fused),
                input_names=[*names, *(each.name for each in job.inputs)],
                opset_version=OPSET,
                verbose=False,
            )
        model: Any = made.model  # type: ignore[union-attr]  # it is None where a file is named
        used = _outside(model, names)
        (folder / WEIGHTS).write_text(json.dumps(used))
        onnx_ir.save(model, folder / GRAPH)

    def load(self, payload: Payload, site: Site) -> Runner:
        import onnxruntime

        accelerator = site.accelerator
        accelerator.use(payload.precision)
        options = accelerator.onnx_options(site.device.index or 0, payload.precision)
        names: list[str] = json.loads((payload.folder / WEIGHTS).read_text())
        found = payload.weights()
        weights = {name: found[name].detach().contiguous().numpy() for name in names}
        session = onnxruntime.InferenceSession(
            str(payload.folder / GRAPH),
            _options(site.threads, weights),
            providers=[(accelerator.onnx_provider, options)],
        )
        return _Session(session, weights)


class _Session:
    """A graph with its weights."""

    def __init__(self, session: Any, weights: Mapping[str, Any]) -> None:
        self._session = session
        self._weights = weights  # the session only borrows them
        self._names = [each.name for each in session.get_inputs()]

    def __call__(self, *inputs: Tensor) -> Tensor:
        import torch

        given = (each.contiguous().numpy() for each in inputs)
        [answers] = self._session.run(None, dict(zip(self._names, given, strict=True)))
        return torch.from_numpy(answers)

    def graphs(self) -> int:
        return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what torch says of its own code, and of libraries that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _options(threads: int, weights: Mapping[str, Any]) -> Any:
    from onnxruntime import OrtValue, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = FATAL
    values = [OrtValue.ortvalue_from_numpy(each) for each in weights.values()]
    options.add_external_initializers(list(weights), values)
    return options


def _outside(model: Any, names: Sequence[str]) -> list[str]:
    """Let weights be no inputs of a graph, but values that lie outside; return those it uses."""
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
    for node in graph:  # where in torch's code it comes from: nine tenths of the file
        node.metadata_props.clear()
        node.doc_string = None
    return used


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,
    scale: float | None = None,
    **others: Any,
) -> Any:
    """Attend by the runtime's own operation: a twentieth of the seconds of a small model.

    Queries are [rows, heads, queries, width], keys and values [rows, heads, keys, width], a mask
    [rows or 1, heads or 1, queries or 1, keys]. Any other attention stays as it is.
    """
    import torch

    added = attn_mask is None or (attn_mask.ndim == AXES and attn_mask.dtype == query.dtype)
    alike = query.ndim == AXES and key.shape[1] == query.shape[1]
    if any(rest) or any(others.values()) or not (added and alike):  # dropout, causal, or groups
        return NotImplemented
    rows, heads, queries, width = query.shape
    keys, inner = key.shape[2], value.shape[3]
    flat = [each.transpose(1, 2).flatten(2) for each in (query, key, value)]
    bias = None if attn_mask is None else attn_mask.expand(-1, -1, queries, keys)
    found: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [*flat, None, None, bias],
        {"num_heads": int(heads), "scale": width**-0.5 if scale is None else scale},
        dtype=query.dtype,
        shape=(rows, queries, heads * inner),
        version=1,
    )
    return found.unflatten(2, (heads, inner)).transpose(1, 2)
