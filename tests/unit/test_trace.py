"""Traces written by hand: every microsecond has one kind and one module."""

from __future__ import annotations

from typing import Any

import pytest

from regauge.training.profile.trace import (
    GRADIENT_SUMS,
    LOSS,
    MODULE,
    OPTIMIZER,
    PART,
    STEP,
    build_breakdown,
    count_matmul,
    read_trace,
)

MICROSECOND = 1e-6
BACKWARD = "autograd::engine::evaluate_function: "


def event(name: str, begin: float, end: float, tid: int = 1, **more: Any) -> dict[str, Any]:
    """Return an event of a thread; names with the prefix `regauge::` are annotations."""
    mark = name.startswith(("regauge::", "##", "Optimizer."))
    kind = more.pop("cat", "user_annotation" if mark else "cpu_op")
    fields = {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "tid": tid}
    return {**fields, "args": more}


def break_down(*events: dict[str, Any], data_seconds: float = 0.0) -> Any:
    return build_breakdown(read_trace({"traceEvents": list(events)}, "nccl"), data_seconds)


def seconds(breakdown: Any) -> dict[str, tuple[float, float]]:
    """Return the microseconds of each module, forward and backward."""
    modules = breakdown.by_module.items()
    return {
        name: (round(module.forward * 1e6, 6), round(module.backward * 1e6, 6))
        for name, module in modules
    }


def test_time_belongs_to_the_innermost_span() -> None:
    breakdown = break_down(
        event(STEP, 0, 100),
        event(MODULE + "layers.0.mlp", 10, 40),
        event("aten::linear", 12, 30),
        event("aten::addmm", 14, 28, **{"Input Dims": [[4], [2, 3], [3, 4]]}),
        event("aten::relu", 30, 36),
        event("aten::log_softmax", 50, 57),
        data_seconds=20 * MICROSECOND,
    )
    assert seconds(breakdown) == {"layers.*.mlp": (24, 0), LOSS: (7, 0)}
    kinds = {name: round(value * 1e6, 6) for name, value in breakdown.by_kind.items()}
    assert kinds == {"matmul": 14, "other": 17, "communication": 0, "data": 20, "host": 69}
    assert breakdown.wall == pytest.approx(120 * MICROSECOND)
    assert (breakdown.steps, breakdown.overlapped_communication) == (1, 0)


def test_a_backward_operation_belongs_to_the_module_of_its_forward_operation() -> None:
    breakdown = break_down(
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
    assert seconds(breakdown) == {"first": (6, 16), "second": (5, 8), GRADIENT_SUMS: (0, 8)}


def test_the_backward_pass_of_a_device_without_kernels_is_in_another_thread() -> None:
    """Torch starts a thread for each device; work of other threads, such as loading, is none."""
    breakdown = break_down(
        event(STEP, 0, 100),
        event(MODULE + "first", 0, 10),
        event("aten::mm", 2, 8, **{"Sequence number": 5}),
        event("aten::copy_", 0, 90, tid=2),
        event(BACKWARD + "MmBackward0", 40, 60, tid=3, **{"Sequence number": 5}),
        event("aten::mm", 42, 58, tid=3),
    )
    assert seconds(breakdown) == {"first": (6, 16)}


def test_a_product_inside_a_product_is_counted_once() -> None:
    """A device that passes an operation on to another library records it twice."""
    sizes = {"Input Dims": [[2, 3], [3, 4]]}
    breakdown = break_down(
        event(STEP, 0, 100),
        event(MODULE + "layer", 0, 50),
        event("aten::mm", 10, 40, **sizes),
        event("aten::mm", 15, 35, **sizes),
    )
    part = breakdown.by_module["layer"]
    assert part.flops == 2 * 2 * 3 * 4
    assert part.matmul_seconds == pytest.approx(30 * MICROSECOND)


def test_recomputation_counts_as_backward() -> None:
    breakdown = break_down(
        event(STEP, 0, 50),
        event(BACKWARD + "CheckpointBackward", 0, 40, **{"Sequence number": 1}),
        event(MODULE + "layers.3", 5, 30),
        event("aten::gelu", 6, 26),
    )
    assert seconds(breakdown) == {"layers.*": (0, 20)}


def test_the_optimizer_and_annotated_methods_count_as_modules() -> None:
    breakdown = break_down(
        event(STEP, 0, 60),
        event(PART + "gradient norm", 0, 10),
        event("aten::square", 1, 9),
        event("Optimizer.step#AdamW.step", 10, 50),
        event("aten::mul_", 20, 30),
    )
    assert seconds(breakdown) == {OPTIMIZER: (40, 0), "gradient norm": (8, 0)}
    assert breakdown.by_kind["optimizer"] == pytest.approx(40 * MICROSECOND)


def test_compiled_code_is_computation_and_its_wrappers_are_host_time() -> None:
    breakdown = break_down(
        event(STEP, 0, 60),
        event(MODULE + "layers.1", 0, 50),
        event("Torch-Compiled Region: 0/0", 2, 48),
        event("CompiledFunction", 5, 46),
        event("## Call CompiledFxGraph f00", 10, 44),
        event("aten::mm", 12, 22, **{"Input Dims": [[2, 3], [3, 4]]}),
    )
    assert seconds(breakdown) == {"layers.*": (34, 0)}
    assert breakdown.by_kind["matmul"] == pytest.approx(10 * MICROSECOND)
    assert breakdown.by_kind["other"] == pytest.approx(24 * MICROSECOND)


def test_communication_during_computation_is_hidden() -> None:
    breakdown = break_down(
        event(STEP, 0, 100),
        event("aten::gelu", 0, 40),
        event("nccl:all_reduce", 20, 70, tid=2),
        event("nccl:all_reduce", 200, 300, tid=2),
    )
    assert breakdown.by_kind["communication"] == pytest.approx(30 * MICROSECOND)
    assert breakdown.overlapped_communication == pytest.approx(20 * MICROSECOND)
    assert breakdown.by_kind["host"] == pytest.approx(30 * MICROSECOND)


def test_device_kernels_are_timed_if_there_are_any() -> None:
    shapes = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["c10::BFloat16"] * 2}
    breakdown = break_down(
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
    assert seconds(breakdown) == {"layers.*": (40, 0)}
    assert breakdown.by_module["layers.*"].flops == 2 * 2 * 3 * 4
    assert breakdown.by_kind["matmul"] == pytest.approx(30 * MICROSECOND)
    assert breakdown.by_kind["communication"] == pytest.approx(20 * MICROSECOND)
    assert breakdown.overlapped_communication == pytest.approx(20 * MICROSECOND)
    assert breakdown.by_kind["host"] == pytest.approx(40 * MICROSECOND)


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
def test_matmul_costs_follow_from_the_shapes(
    name: str, shapes: list[list[int]], flops: int, elements: int
) -> None:
    cost = count_matmul(name, {"Input Dims": shapes, "Input type": ["c10::BFloat16"] * len(shapes)})
    assert cost.flops == flops
    assert cost.bytes == 2 * elements


def test_the_backward_pass_of_fused_attention_has_five_products() -> None:
    shapes = {"Input Dims": [[2, 3, 8, 4]] * 5}
    name = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert count_matmul(name, shapes).flops == 2.5 * 6144


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no annotated step"):
        read_trace({"traceEvents": [event("aten::mm", 0, 1)]}, "gloo")
