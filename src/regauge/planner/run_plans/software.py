"""Training software that a plan may assume instead of Regauge: what it stores, and its speed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from regauge.planner.run_plans.run_request import TrainingRequest
    from regauge.planner.training_job import TrainingJob

REGAUGE = "regauge"
MEGATRON = {"logits": "fused", "has_fused_norms": True, "has_fp32_gradients": True}
SOFTWARE: dict[str, dict[str, Any]] = {
    "hf": {"logits": "copied", "has_fused_norms": False, "has_fused_update": False},
    "liger": {"logits": "streamed", "has_fused_norms": True, "has_fused_update": False},
    "megatron": MEGATRON | {"stack": "MT-NLG"},
    "nemo": MEGATRON | {"stack": "NeMo"},
    "torchtitan": {"logits": "eager"},
}
"""Names for `plan --software` -> what differs from Regauge; hf is transformers' Trainer."""


def use_software(request: TrainingRequest, name: str) -> TrainingRequest:
    """Return a run as another software trains it; raises SettingsError for an unknown name."""
    if name == REGAUGE:
        note = f"planned for Regauge; --software plans {', '.join(SOFTWARE)}"
        return replace(request, notes=(*request.notes, note))
    if name not in SOFTWARE:
        problem = f"--software: unknown '{name}'"
        raise SettingsError(problem, did_you_mean(name, [REGAUGE, *SOFTWARE]))
    others = [other._replace(request=use_software(other.request, name)) for other in request.others]
    notes = (*request.notes, f"planned for {name}, not for Regauge")
    return replace(request, job=_describe(request.job, name), others=tuple(others), notes=notes)


def _describe(job: TrainingJob, name: str) -> TrainingJob:
    changes, precision = {"weights": None} | SOFTWARE[name], job.precision
    is_sharded = job.strategy.count_shards(2).optimizer > 1
    if name == "torchtitan":
        changes["stack"] = "torchtitan compile" if job.has_fused_norms else "torchtitan eager"
    elif precision == "autocast" and job.trained_fraction < 1:
        precision = "pure"  # frozen weights are loaded in half precision
    elif precision == "autocast" and (is_sharded or "stack" in changes):
        precision = "bf16-master"  # otherwise autocast casts fp32 weights
    return replace(job, precision=precision, **changes)
