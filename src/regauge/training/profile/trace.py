"""What a processor and its device did, read from the trace that torch's profiler has written.

A trace is in the Chrome trace format: spans of threads, and a device's kernels where it has some.
Each moment of a thread belongs to its innermost span. A backward operation belongs to the part
where its forward one was, as their sequence numbers say. No torch here.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Kind = Literal["products", "other", "optimizer", "communication", "host"]
Document = dict[str, Any]

STEP, MODULE, PART = "regauge::step", "regauge::module ", "regauge::part "
"""Marks that a profile puts there itself: a step, and beginnings of those of its parts."""
LOSS, SUMS, OPTIMIZER = "loss", "sums of gradients", "optimizer"
SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}
"""Bytes of the types of matrices, in the profiler's words."""
DIGITS = re.compile(r"\.\d+(?=\.|$)")
COLLECTIVES = ("c10d::", "record_param_comms")
"""Beginnings of the names of operations that wait for other processes, in torch's words."""
BACKWARD = "autograd::engine::evaluate_function: "
COMPILED = "## Call CompiledFxGraph"
"""The span of a compiled graph; on a processor its own time is that of the code in it."""
AROUND = ("Torch-Compiled Region", "TorchDynamo", "CompiledFunction", "Pregraph", BACKWARD)
"""Beginnings of spans that lead to what computes."""
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
FIRST_OPERAND = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
FUSED_ATTENTION = re.compile(r"_attention_for_cpu|_(flash|efficient|cudnn)_attention")
MATRICES = 4
"""Dimensions of what attention reads: [rows, heads, length, width]."""
BACKWARD_PRODUCTS = 2.5
"""Fused attention has two products forward and five backward (Dao, 2023, section 4.1)."""


class Product(NamedTuple):
    """What matrices take that are multiplied: each operand is read and the result written once."""

    flops: float = 0.0
    bytes: float = 0.0


NOTHING = Product()


@dataclass(eq=False)
class Span:
    """An event of a thread, and what it was found to be; microseconds, as all times of a trace."""

    name: str
    begin: float
    end: float
    note: bool
    """Whether it is a mark, and no operation."""
    facts: Document
    kind: Kind = "host"
    part: str = ""
    backward: bool = False
    product: Product = NOTHING
    outer: Span | None = None


class Work(NamedTuple):
    """A time in which something was computed or sent, or in which a thread did neither."""

    begin: float
    end: float
    kind: Kind
    span: Span
    """The operation that it is a part of."""


@dataclass
class Trace:
    """What happened in the profiled steps."""

    steps: list[Span] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    device: bool = False
    """Whether work is a device's kernels, and not the processor's operations."""


def read(document: Document, library: str) -> Trace:
    """Return what a trace says; ValueError where no step is marked in it.

    `library` is the name of what sums over processes: its operations' and kernels' begin with it.
    """
    collectives = (library.lower(), *COLLECTIVES)
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    threads: dict[Any, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads[event["tid"]].append(_span(event))
    for spans in threads.values():
        spans.sort(key=lambda each: (each.begin, -each.end))
        _nest(spans)
    _settle([span for spans in threads.values() for span in spans], collectives)
    steps = [span for spans in threads.values() for span in spans if span.name == STEP]
    if not steps:
        raise ValueError("no step is marked in the trace")
    main = next(tid for tid, spans in threads.items() if steps[0] in spans)
    kernels = [event for event in events if event.get("cat") in KERNELS]
    if kernels:
        work = list(_launched(kernels, events, threads, collectives))
        return Trace(steps, work, device=True)
    work = [
        piece
        for tid, spans in threads.items()
        for piece in _pieces(spans)
        if piece.kind == "communication" or (tid == main and piece.kind != "host")
    ]
    return Trace(steps, work)


def _span(event: Document) -> Span:
    facts, name, begin = event.get("args", {}), str(event["name"]), float(event["ts"])
    note = event["cat"] == "user_annotation" and not name.startswith(COMPILED)
    found = product(name, facts)
    return Span(name, begin, begin + float(event["dur"]), note, facts, product=found)


def product(name: str, facts: Document) -> Product:
    """Return what an operation's products take, from the shapes of its inputs."""
    shapes = [shape for shape in facts.get("Input Dims", ()) if shape]
    size = next((SIZES[each] for each in facts.get("Input type", ()) if each in SIZES), 0)
    if FUSED_ATTENTION.search(name):
        return _attention([each for each in shapes if len(each) == MATRICES], size, name)
    first = FIRST_OPERAND.get(name)
    if first is None or len(shapes) < first + 2:
        return Product()
    (*batch, rows, inner), (*_, columns) = shapes[first : first + 2]
    count = batch[0] if batch else 1
    moved = size * count * (rows * inner + inner * columns + rows * columns)
    return Product(2.0 * count * rows * inner * columns, float(moved))


def _attention(shapes: list[list[int]], size: int, name: str) -> Product:
    """Return what fused attention takes: products with every key, whether masked or not."""
    backward = "backward" in name  # its first input is the gradient of the result
    found = shapes[1:] if backward else shapes
    if len(found) < len(("query", "key", "value")):
        return Product()
    (rows, heads, length, width), (*_, keys, _) = found[:2]
    flops = 4.0 * rows * heads * length * keys * width
    moved = size * rows * heads * width * 2.0 * (length + keys)
    return Product(flops * (BACKWARD_PRODUCTS if backward else 1), moved)


def _nest(spans: list[Span]) -> None:
    """Say of each span of a thread which one is around it."""
    around: list[Span] = []
    for span in spans:
        while around and around[-1].end <= span.begin:
            around.pop()
        span.outer = around[-1] if around else None
        around.append(span)


def _settle(spans: list[Span], collectives: tuple[str, ...]) -> None:
    """Say of each span what it is, and which part of the model it belongs to; outer ones first."""
    known: dict[int, str] = {}
    for span in spans:
        span.backward = span.name.startswith(BACKWARD) or bool(span.outer and span.outer.backward)
        span.kind = _kind(span, collectives)
        if not span.backward:
            span.part = _part(span)
            known[int(span.facts.get("Sequence number", -1))] = span.part
    known[-1] = ""  # of a span without a number
    numbers = sorted(known)
    for span in spans:
        if span.backward:
            span.part = _part(span)
        if span.name.startswith(BACKWARD) and "AccumulateGrad" not in span.name:
            at = bisect_right(numbers, int(span.facts.get("Sequence number", -1))) - 1
            span.part = known[numbers[at]]


def _part(span: Span) -> str:
    """Return the part that a span's name says, or that of the one around it."""
    if span.name.startswith(MODULE):
        return DIGITS.sub(".*", span.name.removeprefix(MODULE))
    if span.name.startswith(PART):
        return span.name.removeprefix(PART)
    if span.name.startswith("Optimizer."):
        return OPTIMIZER
    if "AccumulateGrad" in span.name:
        return SUMS
    return span.outer.part if span.outer else ""


def _kind(span: Span, collectives: tuple[str, ...]) -> Kind:
    outer = span.outer
    if span.name.lower().startswith(collectives):
        return "communication"
    if span.name.startswith("Optimizer."):
        return "optimizer"
    if outer and outer.kind in ("optimizer", "communication", "products"):
        return outer.kind
    if span.product.flops:
        return "products"
    return "host" if span.note or span.name.startswith(AROUND) else "other"


def _pieces(spans: Iterable[Span]) -> Iterator[Work]:
    """Yield the times of a thread, each with its innermost span."""
    around: list[Span] = []
    now = 0.0
    for span in (*spans, None):
        begin = span.begin if span else float("inf")
        while around and around[-1].end <= begin:
            last = around.pop()
            if last.end > now:
                yield Work(now, last.end, last.kind, last)
                now = last.end
        if around and begin > now:
            yield Work(now, begin, around[-1].kind, around[-1])
        if span:
            now = max(now, begin)
            around.append(span)


def _launched(
    kernels: list[Document],
    events: list[Document],
    threads: dict[Any, list[Span]],
    collectives: tuple[str, ...],
) -> Iterator[Work]:
    """Yield a device's kernels, each as a part of the operation that launched it."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") not in KERNELS and "correlation" in event.get("args", {})
    }
    pieces = {tid: list(_pieces(spans)) for tid, spans in threads.items()}
    begins = {tid: [piece.begin for piece in found] for tid, found in pieces.items()}
    nobody = Span("", 0.0, 0.0, note=False, facts={})
    for kernel in kernels:
        begin, span = float(kernel["ts"]), nobody
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        if launch and pieces.get(launch["tid"]):
            at = bisect_right(begins[launch["tid"]], float(launch["ts"])) - 1
            span = pieces[launch["tid"]][max(at, 0)].span
        kind: Kind = "other" if span.kind == "host" else span.kind
        if str(kernel["name"]).lower().startswith(collectives):
            kind = "communication"
        yield Work(begin, begin + float(kernel["dur"]), kind, span)
