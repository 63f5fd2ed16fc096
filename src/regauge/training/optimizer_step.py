"""One optimizer update: the same operations for a real step and for the rehearsal of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.training.gradients import Noise
from regauge.training.optimizer import set_learning_rate

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.accelerators import Batch
    from regauge.training.objectives import Objective
    from regauge.training.session import Session


def advance(
    session: Session, batches: list[Batch], objective: Objective | None = None
) -> tuple[Tensor, Tensor]:
    """Do one step; return [loss sum, weight] of the global batch and the gradient norm.

    The task is the one whose turn it is, unless another is given. Nothing is read from the device,
    unless the loss is scaled.
    """
    objective = objective or session.objective
    turn = session.objectives.index(objective)
    prepared, clip = session.prepared, session.settings.optimizer.clip_norm
    scale = session.scale.tensor(session.device)
    fault = session.chaos.gradient_factor(session.step)
    with session.computing():
        totals = objective.gradients.of(
            batches, scale if fault == 1 else scale * fault, _noise(session)
        )
        rate = session.rates.next()
        factor = 1 / (totals[1].clamp(min=1e-9) * scale)
        norm = prepared.gradient_norm() * factor
        if clip is not None:
            factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
        if session.scale.accepts(norm) and session.guard.admits(norm, totals, turn):
            prepared.scale_gradients(factor)
            set_learning_rate(session.optimizer, session.guard.disarmed(rate))
            session.saver.settle()
            session.optimizer.step()
            prepared.publish()
        prepared.clear_gradients()
        session.interval.add(totals.where(norm.isfinite(), totals.new_zeros(())), norm, turn)
        session.accelerator.end_step()
    return totals, norm


def _noise(session: Session) -> Noise | None:
    if session.settings.model.dropout_kind == "counter":
        return None
    return Noise(session.accelerator, session.settings.seed, session.step, session.world.rank)
