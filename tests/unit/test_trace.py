"""Traces written by hand: where each microsecond belongs."""

from __future__ import annotations

from typing import Any

import pytest

from regauge.training.profile.breakdown import build_breakdown
from regauge.training.profile.trace import LOSS, MODULE, OPTIMIZER, PART, STEP, SUMS, product, read

MICROSECOND = 1e-6
BACKWARD = "autograd::engine::evaluate_function: "


def event(name: str, begin: float, end: float, tid: int = 1, **more: Any) -> dict[str, Any]:
    """Return a span of a thread; a mark of this project's is a note."""
    mark = name.startswith(("regauge::", "##", "Optimizer."))
    kind = more.pop("cat", "user_annotation" if mark else "cpu_op")
    told = {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "tid": tid}
    return {**told, "args": more}


def seen(*events: dict[str, Any], data_seconds: float = 0.0) -> Any:
    return build_breakdown(read({"traceEvents": list(events)}, "nccl"), data_seconds)


def seconds(found: Any) -> dict[str, tuple[float, float]]:
    """Return the microseconds of each part, forward and backward."""
    parts = found.parts.items()
    return {name: (round(p.forward * 1e6, 6), round(p.backward * 1e6, 6)) for name, p in parts}


def test_every_moment_belongs_to_its_innermost_span() -> None:
    found = seen(
        event(STEP, 0, 100),
        event(MODULE + "layers.0.mlp", 10, 40),
        event("aten::linear", 12, 30),
        event("aten::addmm", 14, 28, **{"Input Dims": [[4], [2, 3], [3, 4]]}),
        event("aten::relu", 30, 36),
        event("aten::log_softmax", 50, 57),
        data_seconds=20 * MICROSECOND,
    )
    assert seconds(found) == {"layers.*.mlp": (24, 0), LOSS: (7, 0)}
    kinds = {name: round(value * 1e6, 6) for name, value in found.kinds.items()}
    assert kinds == {"products": 14, "other": 17, "communication": 0, "data": 20, "host": 69}
    assert found.wall == pytest.approx(120 * MICROSECOND)
    assert (found.steps, found.hidden) == (1, 0)


def test_a_backward_operation_belongs_where_its_forward_one_was() -> None:
    found = seen(
        event(STEP, 0, 100),
        event(MODULE + "first", 0, 10),
        event("aten::mm", 2, 8, **{"Sequence number": 5}),
        event(MODULE + "second", 10, 20),
        event("aten::mul", 12, 17, **{"Sequence number": 6}),
        event("CompiledFunction", 20, 24, **{"Sequence number": 7}),
        event(BACKWARD + "MulBackward0", 30, 40, **{"Sequence number": 6, "Fwd thread id": 1}),
        event("aten::mul", 31, 39),
        event(BACKWARD + "MmBackward0", 40, 60, **{"Sequence number": 5, "Fwd thread id": 1}),
        event("aten::mm", 42, 58),
        event(BACKWARD + "torch::autograd::AccumulateGrad", 60, 70),
        event("aten::add_", 61, 69),
    )
    assert seconds(found) == {"first": (6, 16), "second": (5, 8), SUMS: (0, 8)}


def test_what_is_computed_again_in_a_backward_pass_is_backward() -> None:
    found = seen(
        event(STEP, 0, 50),
        event(BACKWARD + "CheckpointBackward", 0, 40, **{"Sequence number": 1}),
        event(MODULE + "layers.3", 5, 30),
        event("aten::gelu", 6, 26),
    )
    assert seconds(found) == {"layers.*": (0, 20)}


def test_the_update_and_marked_methods_are_parts() -> None:
    found = seen(
        event(STEP, 0, 60),
        event(PART + "gradient norm", 0, 10),
        event("aten::square", 1, 9),
        event("Optimizer.step#AdamW.step", 10, 50),
        event("aten::mul_", 20, 30),
    )
    assert seconds(found) == {OPTIMIZER: (40, 0), "gradient norm": (8, 0)}
    assert found.kinds["optimizer"] == pytest.approx(40 * MICROSECOND)


def test_what_compiled_code_takes_is_computing_and_the_way_to_it_is_python() -> None:
    found = seen(
        event(STEP, 0, 60),
        event(MODULE + "layers.1", 0, 50),
        event("Torch-Compiled Region: 0/0", 2, 48),
        event("CompiledFunction", 5, 46),
        event("## Call CompiledFxGraph f00", 10, 44),
        event("aten::mm", 12, 22, **{"Input Dims": [[2, 3], [3, 4]]}),
    )
    assert seconds(found) == {"layers.*": (34, 0)}
    assert found.kinds["products"] == pytest.approx(10 * MICROSECOND)
    assert found.kinds["other"] == pytest.approx(24 * MICROSECOND)


def test_communication_is_hidden_where_something_was_computed() -> None:
    found = seen(
        event(STEP, 0, 100),
        event("aten::gelu", 0, 40),
        event("nccl:all_reduce", 20, 70, tid=2),
        event("nccl:all_reduce", 200, 300, tid=2),
    )
    assert found.kinds["communication"] == pytest.approx(30 * MICROSECOND)
    assert found.hidden == pytest.approx(20 * MICROSECOND)
    assert found.kinds["host"] == pytest.approx(30 * MICROSECOND)


def test_a_device_s_kernels_are_timed_where_there_are_some() -> None:
    shapes = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["c10::BFloat16"] * 2}
    found = seen(
        event(STEP, 0, 100),
        event(MODULE + "layers.0", 0, 20),
        event("aten::mm", 2, 12, **shapes),
        event("cudaLaunchKernel", 5, 6, cat="cuda_runtime", correlation=1),
        event("aten::gelu", 12, 18),
        event("cudaLaunchKernel", 13, 14, cat="cuda_runtime", correlation=2),
        event("gemm", 20, 50, tid=7, cat="kernel", correlation=1),
        event("gelu", 50, 60, tid=7, cat="kernel", correlation=2),
        event("ncclDevKernel_AllReduce", 40, 80, tid=8, cat="kernel", correlation=3),
    )
    assert seconds(found) == {"layers.*": (40, 0)}
    assert found.parts["layers.*"].flops == 2 * 2 * 3 * 4
    assert found.kinds["products"] == pytest.approx(30 * MICROSECOND)
    assert found.kinds["communication"] == pytest.approx(20 * MICROSECOND)
    assert found.hidden == pytest.approx(20 * MICROSECOND)
    assert found.kinds["host"] == pytest.approx(40 * MICROSECOND)


@pytest.mark.parametrize(
    ("name", "shapes", "flops", "elements"),
    [
        ("aten::mm", [[2, 3], [3, 4], [2, 4]], 48, 6 + 12 + 8),
        ("aten::addmm", [[4], [2, 3], [3, 4]], 48, 6 + 12 + 8),
        ("aten::bmm", [[5, 2, 3], [5, 3, 4]], 240, 5 * (6 + 12 + 8)),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[2, 3, 8, 4]] * 3, 6144, 4 * 192),
        ("aten::mul", [[2, 3], [2, 3]], 0, 0),
        ("aten::mm", [], 0, 0),
    ],
)
def test_products_follow_from_the_shapes(
    name: str, shapes: list[list[int]], flops: int, elements: int
) -> None:
    found = product(name, {"Input Dims": shapes, "Input type": ["c10::BFloat16"] * len(shapes)})
    assert found.flops == flops
    assert found.bytes == 2 * elements


def test_fused_attention_backward_has_five_products() -> None:
    shapes = {"Input Dims": [[2, 3, 8, 4]] * 5}
    name = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert product(name, shapes).flops == 2.5 * 6144


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no step is marked"):
        read({"traceEvents": [event("aten::mm", 0, 1)]}, "gloo")
