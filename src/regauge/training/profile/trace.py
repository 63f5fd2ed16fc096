"""Reads a torch profiler trace: which kind of work and which part of the model ran when.

The Chrome trace contains CPU thread spans and device kernels. Thread time belongs to the innermost
span. A backward operation belongs to the part of its forward operation, which has the same sequence
number. This module imports no torch.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


Kind = Literal["matmul", "other", "optimizer", "communication", "host"]
"""Kind of work; "matmul" is matrix products, "host" is Python and dispatch overhead."""
Document = dict[str, Any]

STEP, MODULE, PART = "regauge::step", "regauge::module ", "regauge::part "
"""Our annotations: step name, and prefixes for modules and other parts of a step."""
LOSS, GRADIENT_SUMS, OPTIMIZER = "loss", "gradient accumulation", "optimizer"
"""Step parts without an annotation."""
ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}
"""Profiler dtype name -> bytes per element."""
LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
COLLECTIVES = ("c10d::", "record_param_comms")
BACKWARD = "autograd::engine::evaluate_function: "
COMPILED_GRAPH = "## Call CompiledFxGraph"
"""Name prefix for compiled graphs; on a CPU their self time is compiled code."""
WRAPPERS = ("Torch-Compiled Region", "TorchDynamo", "CompiledFunction", "Pregraph", BACKWARD)
"""Name prefixes for spans that only call other spans."""
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Trace categories for device work."""
FIRST_OPERAND = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Matrix product -> input index of its first matrix."""
FUSED_ATTENTION = re.compile(r"_attention_for_cpu|_(flash|efficient|cudnn)_attention")
ATTENTION_DIMS = 4
"""Dimensions of attention inputs: [rows, heads, length, width]."""
BACKWARD_FLOPS_FACTOR = 2.5
"""Fused attention has two products forward and five backward (Dao, 2023, section 4.1)."""


class MatmulCost(NamedTuple):
    """FLOPs per matrix product, and bytes if operands are read and the result is written once."""

    flops: float = 0.0
    bytes: float = 0.0


NO_MATMUL = MatmulCost()


@dataclass(eq=False)
class Span:
    """A classified CPU thread event; times are in microseconds."""

    name: str
    begin: float
    end: float
    is_annotation: bool
    facts: Document
    """Event arguments: input shapes, dtypes, sequence number."""
    kind: Kind = "host"
    part: str = ""
    is_backward: bool = False
    matmul: MatmulCost = NO_MATMUL
    outer: Span | None = None


class WorkInterval(NamedTuple):
    """An interval with one kind of work, in microseconds."""

    begin: float
    end: float
    kind: Kind
    span: Span
    """The operation that does the work, or that launched the kernel."""


@dataclass
class Trace:
    """Profiled steps and their work."""

    steps: list[Span] = field(default_factory=list)
    work: list[WorkInterval] = field(default_factory=list)
    has_device_work: bool = False
    """Whether the work is device kernels instead of CPU operations."""


def read_trace(document: Document, library: str) -> Trace:
    """Read a trace; raises ValueError if no step is annotated.

    `library` is the collective communication library, such as "gloo" or "nccl": the name prefix for
    its operations and kernels.
    """
    collectives = (library.lower(), *COLLECTIVES)
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    threads: dict[Any, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads[event["tid"]].append(_read_span(event))
    for spans in threads.values():
        spans.sort(key=lambda span: (span.begin, -span.end))
        _link_spans(spans)
    _classify_spans([span for spans in threads.values() for span in spans], collectives)
    steps = [span for spans in threads.values() for span in spans if span.name == STEP]
    if not steps:
        raise ValueError("the trace has no annotated step")
    main_thread = next(tid for tid, spans in threads.items() if steps[0] in spans)
    kernels = [event for event in events if event.get("cat") in KERNELS]
    if kernels:
        work = list(_match_kernels(kernels, events, threads, collectives))
        return Trace(steps, work, has_device_work=True)
    # Torch computes the backward pass of a device in another thread than that of the step.
    computing = {main_thread} | {
        tid for tid, spans in threads.items() if any(span.is_backward for span in spans)
    }
    work = [
        interval
        for tid, spans in threads.items()
        for interval in _split_intervals(spans)
        if interval.kind == "communication" or (tid in computing and interval.kind != "host")
    ]
    return Trace(steps, work)


def _read_span(event: Document) -> Span:
    facts, name, begin = event.get("args", {}), str(event["name"]), float(event["ts"])
    return Span(
        name=name,
        begin=begin,
        end=begin + float(event["dur"]),
        is_annotation=event["cat"] == "user_annotation" and not name.startswith(COMPILED_GRAPH),
        facts=facts,
        matmul=count_matmul(name, facts),
    )


def count_matmul(name: str, facts: Document) -> MatmulCost:
    """Compute the cost of an operation's matrix products from its input shapes."""
    shapes = [shape for shape in facts.get("Input Dims", ()) if shape]
    dtypes = facts.get("Input type", ())
    item_bytes = next((ITEM_BYTES[dtype] for dtype in dtypes if dtype in ITEM_BYTES), 0)
    if FUSED_ATTENTION.search(name):
        inputs = [shape for shape in shapes if len(shape) == ATTENTION_DIMS]
        return _count_attention(inputs, item_bytes, name)
    first = FIRST_OPERAND.get(name)
    if first is None or len(shapes) < first + 2:
        return MatmulCost()
    (*batch, rows, inner), (*_, columns) = shapes[first : first + 2]
    count = batch[0] if batch else 1
    num_bytes = item_bytes * count * (rows * inner + inner * columns + rows * columns)
    return MatmulCost(2.0 * count * rows * inner * columns, float(num_bytes))


def _count_attention(shapes: list[list[int]], item_bytes: int, name: str) -> MatmulCost:
    """Return the cost of fused attention; products with masked keys count as well."""
    is_backward = "backward" in name  # the first input is the gradient of the result
    inputs = shapes[1:] if is_backward else shapes
    if len(inputs) < len(("query", "key", "value")):
        return MatmulCost()
    (rows, heads, length, width), (*_, keys, _) = inputs[:2]
    flops = 4.0 * rows * heads * length * keys * width
    num_bytes = item_bytes * rows * heads * width * 2.0 * (length + keys)
    return MatmulCost(flops * (BACKWARD_FLOPS_FACTOR if is_backward else 1), num_bytes)


def _link_spans(spans: list[Span]) -> None:
    """Set each span's outer span; a thread's spans are ordered by begin."""
    stack: list[Span] = []
    for span in spans:
        while stack and stack[-1].end <= span.begin:
            stack.pop()
        span.outer = stack[-1] if stack else None
        stack.append(span)


def _classify_spans(spans: list[Span], collectives: tuple[str, ...]) -> None:
    """Set each span's kind and part; outer spans come before inner ones."""
    part_by_number: dict[int, str] = {}
    for span in spans:
        span.is_backward = span.name.startswith(BACKWARD) or bool(
            span.outer and span.outer.is_backward
        )
        span.kind = _find_kind(span, collectives)
        if span.outer and span.outer.kind == "matmul":  # a part of a product that is counted
            span.matmul = NO_MATMUL
        if not span.is_backward:
            span.part = _find_part(span)
            part_by_number[int(span.facts.get("Sequence number", -1))] = span.part
    part_by_number[-1] = ""  # spans without a sequence number
    numbers = sorted(part_by_number)
    for span in spans:
        if span.is_backward:
            span.part = _find_part(span)
        if span.name.startswith(BACKWARD) and "AccumulateGrad" not in span.name:
            index = bisect_right(numbers, int(span.facts.get("Sequence number", -1))) - 1
            span.part = part_by_number[numbers[index]]


def _find_part(span: Span) -> str:
    if span.name.startswith(MODULE):
        return LAYER_NUMBER.sub(".*", span.name.removeprefix(MODULE))
    if span.name.startswith(PART):
        return span.name.removeprefix(PART)
    if span.name.startswith("Optimizer."):
        return OPTIMIZER
    if "AccumulateGrad" in span.name:
        return GRADIENT_SUMS
    return span.outer.part if span.outer else ""


def _find_kind(span: Span, collectives: tuple[str, ...]) -> Kind:
    outer = span.outer
    if span.name.lower().startswith(collectives):
        return "communication"
    if span.name.startswith("Optimizer."):
        return "optimizer"
    if outer and outer.kind in ("optimizer", "communication", "matmul"):
        return outer.kind
    if span.matmul.flops:
        return "matmul"
    return "host" if span.is_annotation or span.name.startswith(WRAPPERS) else "other"


def _split_intervals(spans: Iterable[Span]) -> Iterator[WorkInterval]:
    """Split a thread's time into intervals, each with its innermost span."""
    stack: list[Span] = []
    now = 0.0
    for span in (*spans, None):
        begin = span.begin if span else float("inf")
        while stack and stack[-1].end <= begin:
            innermost = stack.pop()
            if innermost.end > now:
                yield WorkInterval(now, innermost.end, innermost.kind, innermost)
                now = innermost.end
        if stack and begin > now:
            yield WorkInterval(now, begin, stack[-1].kind, stack[-1])
        if span:
            now = max(now, begin)
            stack.append(span)


def _match_kernels(
    kernels: list[Document],
    events: list[Document],
    threads: dict[Any, list[Span]],
    collectives: tuple[str, ...],
) -> Iterator[WorkInterval]:
    """Yield device kernels, each with the operation that launched it."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") not in KERNELS and "correlation" in event.get("args", {})
    }
    intervals = {tid: list(_split_intervals(spans)) for tid, spans in threads.items()}
    begins = {tid: [interval.begin for interval in items] for tid, items in intervals.items()}
    unknown_span = Span("", 0.0, 0.0, is_annotation=False, facts={})
    for kernel in kernels:
        begin, span = float(kernel["ts"]), unknown_span
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        if launch and intervals.get(launch["tid"]):
            index = bisect_right(begins[launch["tid"]], float(launch["ts"])) - 1
            span = intervals[launch["tid"]][max(index, 0)].span
        kind: Kind = "other" if span.kind == "host" else span.kind
        if str(kernel["name"]).lower().startswith(collectives):
            kind = "communication"
        yield WorkInterval(begin, begin + float(kernel["dur"]), kind, span)


MICROSECOND = 1e-6

Interval = tuple[float, float]
"""Begin and end, in microseconds."""


@dataclass
class PartTime:
    """Time for a part of the model or step, in seconds over all profiled steps."""

    forward: float = 0.0
    backward: float = 0.0
    matmul_seconds: float = 0.0
    """In matrix products, forward and backward."""
    flops: float = 0.0
    """In matrix products."""
    bytes: float = 0.0
    """Bytes read and written by matrix products."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Breakdown:
    """Time in seconds over all profiled steps."""

    steps: int
    wall: float
    """Elapsed seconds, including waiting for data."""
    by_kind: dict[Kind | Literal["data"], float]
    """Seconds by kind of work, which add up to `wall`, without hidden communication."""
    overlapped_communication: float
    """Seconds in which communication overlaps with computation."""
    by_module: dict[str, PartTime]
    """Part -> time, longest first; `*` replaces the numbers of repeated layers."""


def build_breakdown(trace: Trace, data_seconds: float) -> Breakdown:
    """Break down a trace; `data_seconds` is the time spent waiting for data."""
    steps = [(step.begin, step.end) for step in trace.steps]
    work = [item for item in trace.work if any(begin <= item.begin < end for begin, end in steps)]
    compute = [item for item in work if item.kind != "communication"]
    communication = [item for item in work if item.kind == "communication"]
    compute_seconds = _total_seconds(_merge_intervals(compute))
    busy_seconds = _total_seconds(_merge_intervals(work))
    step_seconds = _total_seconds(steps)
    # Kernels that run concurrently share their time.
    share = compute_seconds / max(_total_seconds([item[:2] for item in compute]), 1e-12)
    kinds, parts = _sum_work(compute, share)
    exposed = busy_seconds - compute_seconds
    host = max(0.0, step_seconds - busy_seconds)
    kinds |= {"communication": exposed, "data": data_seconds, "host": host}
    return Breakdown(
        steps=len(steps),
        wall=step_seconds + data_seconds,
        by_kind=kinds,
        overlapped_communication=_total_seconds(_merge_intervals(communication)) - exposed,
        by_module=dict(sorted(parts.items(), key=lambda item: -item[1].seconds)),
    )


def _sum_work(
    compute: list[WorkInterval], share: float
) -> tuple[dict[Kind | Literal["data"], float], dict[str, PartTime]]:
    """Return seconds by kind and time by part; durations are multiplied by `share`."""
    kinds: dict[Kind | Literal["data"], float] = defaultdict(float)
    parts: dict[str, PartTime] = defaultdict(PartTime)
    counted: set[Span] = set()
    for item in compute:
        seconds, span = (item.end - item.begin) * MICROSECOND * share, item.span
        kinds[item.kind] += seconds
        part = parts[span.part or LOSS]
        if span.is_backward:
            part.backward += seconds
        else:
            part.forward += seconds
        if item.kind == "matmul":
            part.matmul_seconds += seconds
        if span not in counted:
            counted.add(span)
            part.flops += span.matmul.flops
            part.bytes += span.matmul.bytes
    return dict(kinds), parts


def _merge_intervals(work: Iterable[WorkInterval]) -> list[Interval]:
    """Return the union of work intervals, as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(item[:2] for item in work):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _total_seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals) * MICROSECOND
