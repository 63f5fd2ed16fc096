"""Each plan formula with its numbers, one line per part of memory, time and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.planner import flops, memory_plan
from regauge.planner.step_time import find_rates
from regauge.system.units import GIGA, SECONDS_PER_HOUR, SECONDS_PER_MINUTE, TERA

if TYPE_CHECKING:
    from regauge.planner.run_plans.option_search import Option
    from regauge.planner.training_plan import TrainingPlan


def explain_plan(option: Option) -> list[str]:
    """Return each formula with its numbers, one line per part of memory and time.

    With several tasks, the memory is the largest one's, and the time the first one's.
    """
    memory = _explain_memory(option.plan.largest_task)
    return [*memory, *_explain_time(option.plan), *_explain_cost(option)]


def _explain_memory(plan: TrainingPlan) -> list[str]:
    job, parts, shape = plan.job, plan.memory.parts, plan.job.shape
    parameters = shape.parameters(job.head)
    trained = parameters * job.trained_fraction
    layer = memory_plan.layer_activation_bytes(job) / GIGA
    kept = {"none": "1", "selective": f"{memory_plan.SELECTIVE_SHARE}", "full": "inputs only"}
    shards = memory_plan.count_shards(job, plan.devices)

    def explain(name: str, elements: float, noun: str, number: int) -> str:
        size = f"{getattr(parts, name) * number / elements:.4g} B x {elements / GIGA:.4g}e9 {noun}"
        return f"{size} / {number} shards{' (the largest)' if number > 1 else ''}"

    formulas = {
        "weights": explain("weights", parameters, "parameters", shards.weights),
        "gradients": explain("gradients", trained, "trained parameters", shards.gradients),
        "optimizer": explain("optimizer", trained, "trained parameters", shards.optimizer),
        "activations": f"{shape.layers} layers x {layer:.4g} GB for {job.tokens_per_pass} tokens,"
        f" kept: {kept[job.recomputation]}",
        "logits": f"vocabulary {shape.vocab}, {job.logits}, and gradients",
        "working_set": "gathered layers or bf16 copies",
        "context": "libraries and buffers",
        "fragmentation": "share of the above",
    }
    return [
        f"{name} = {text} = {getattr(parts, name) / GIGA:.4g} GB" for name, text in formulas.items()
    ]


def _explain_time(plan: TrainingPlan) -> list[str]:
    job, constants, parts = plan.job, plan.constants, plan.step_parts
    shape, tokens = job.shape, job.tokens_per_pass * job.accumulation
    products = (flops.matmul_flops(shape) + flops.head_flops(shape, job.head)) / GIGA
    speed, *_, slower = find_rates(job, plan.machine, constants)
    half = ", half of it causal" if shape.attention.is_causal else ""
    formulas = {
        "matmul": f"{tokens} tokens x {products:.4g} GFLOP x"
        f" (1 + {flops.RECOMPUTED[job.recomputation]:g} / 3) / {speed / TERA:.4g}"
        f" TFLOP/s x {slower:.3f} for small sizes",
        "attention": f"12 x {shape.layers} layers x {shape.attention.width} x {job.length} for each"
        f" token{half}",
        "traffic": f"{constants.traffic:.3g} times the moved activations and logits /"
        f" {plan.machine.memory_bandwidth / GIGA:.4g} GB/s, and the casts of the weights",
        "growth": f"compute x ((1 + {constants.growth:g})^log2({plan.count}) - 1)",
        "exposed": f"max(0, communication - {constants.overlap:g} x compute) + communication /"
        f" {shape.layers}",
    }
    return [f"{name} = {text} = {getattr(parts, name):.4g} s" for name, text in formulas.items()]


def _explain_cost(option: Option) -> list[str]:
    plan, goodput = option.plan, option.goodput
    minutes = goodput.interval_seconds / SECONDS_PER_MINUTE
    failures = f"{goodput.failures_per_day:.3g} failures per day"
    lines = [f"goodput = {goodput.share:.4f} (checkpoint every {minutes:.0f} min, {failures})"]
    if option.hours is not None:
        steps = option.hours.p50 * SECONDS_PER_HOUR * goodput.share / plan.step_seconds.p50
        lines.append(
            f"hours = {steps:.0f} steps x {plan.step_seconds.p50:.4g} s / {goodput.share:.4f}"
            f" / 3600 = {option.hours.p50:.4g} h"
        )
    if option.hours is not None and option.usd is not None:
        price = plan.machine.usd_per_hour
        lines.append(f"usd = {option.hours.p50:.4g} h x {plan.count} x {price:g} USD/h")
    return lines
