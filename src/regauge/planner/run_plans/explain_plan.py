"""Each plan formula with its numbers, one line per part of memory, time and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.planner import flops, memory_plan
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
    layer = memory_plan.layer_activation_bytes(job)
    kept = {"none": "1", "selective": f"{memory_plan.SELECTIVE_SHARE}", "full": "inputs only"}
    shards = memory_plan.count_shards(job, plan.devices)
    states = [
        ("weights", parameters, "parameters", shards.weights),
        ("gradients", trained, "trained parameters", shards.gradients),
        ("optimizer", trained, "trained parameters", shards.optimizer),
    ]
    return [
        *(
            f"{name} = {getattr(parts, name) * number / elements:.4g} B x {elements / GIGA:.4g}e9"
            f" {noun} / {number} shards{' (the largest)' if number > 1 else ''}"
            f" = {getattr(parts, name) / GIGA:.4g} GB"
            for name, elements, noun, number in states
        ),
        (
            f"activations = {shape.layers} layers x {layer / GIGA:.4g} GB for"
            f" {job.tokens_per_pass} tokens, kept: {kept[job.recomputation]}"
            f" = {parts.activations / GIGA:.4g} GB"
        ),
        (
            f"logits = vocabulary {shape.vocab} x tokens x"
            f" {memory_plan.LOGIT_BYTES[job.logits]:g} B = {parts.logits / GIGA:.4g} GB"
        ),
        f"working set = gathered layers or bf16 copies = {parts.working_set / GIGA:.4g} GB",
        (
            f"context = {parts.context / GIGA:.4g} GB, fragmentation"
            f" = {parts.fragmentation / GIGA:.4g} GB"
        ),
    ]


def _explain_time(plan: TrainingPlan) -> list[str]:
    job, constants, parts = plan.job, plan.constants, plan.step_parts
    shape, tokens = job.shape, job.tokens_per_pass * job.accumulation
    products = flops.matmul_flops(shape) + flops.head_flops(shape, job.head)
    efficiency = (
        constants.efficiency
        / (1 + constants.hidden_half / shape.hidden)
        / (1 + constants.token_half / job.tokens_per_pass)
    )
    rho = flops.recomputed_share(job.recomputation)
    return [
        (
            f"matmul = {tokens} tokens x {products / GIGA:.4g} GFLOP x (1 + {rho:g} / 3)"
            f" / ({constants.reference_flops / TERA:.4g} TFLOP/s x {efficiency:.3f})"
            f" = {parts.matmul:.4g} s"
        ),
        (
            f"efficiency = {constants.efficiency:.3f} / (1 + {constants.hidden_half:.0f} /"
            f" {shape.hidden}) / (1 + {constants.token_half:.0f} / {job.tokens_per_pass})"
            f" = {efficiency:.3f}"
        ),
        (
            f"attention = 12 x {shape.layers} layers x {shape.attention.width} x {job.length}"
            f" for each token{', half of it causal' if shape.attention.is_causal else ''}"
            f" = {parts.attention:.4g} s"
        ),
        (
            f"activation traffic = {constants.traffic:.3g} times the activations and logits /"
            f" {plan.machine.memory_bandwidth / GIGA:.4g} GB/s, and the casts of the weights"
            f" = {parts.traffic:.4g} s"
        ),
        (
            f"growth = compute x ((1 + {constants.growth:g})^log2({plan.count}) - 1)"
            f" = {parts.growth:.4g} s"
        ),
        (
            f"exposed = max(0, communication - {constants.overlap:g} x compute) + communication /"
            f" {shape.layers} = {parts.exposed:.4g} s"
        ),
        f"optimizer = {parts.optimizer:.4g} s, fixed = {parts.fixed:.4g} s",
    ]


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
