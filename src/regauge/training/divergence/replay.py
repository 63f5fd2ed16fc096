"""Steps of a run computed again from one state, to see where two computations of them part.

replay.jsonl      loss and gradient norm of each step
capture-*         what the watched steps computed, see `capture.py`
checkpoints/      the state before the step that is to be saved
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge import jsonl
from regauge.data.loader import in_turn
from regauge.errors import SettingsError
from regauge.faults import Chaos
from regauge.training import objectives
from regauge.training.defaults import decide
from regauge.training.divergence.capture import Capture
from regauge.training.divergence.inject import mistaken
from regauge.training.optimizer_step import advance
from regauge.training.session_setup import open_session

if TYPE_CHECKING:
    from regauge.processes import World
    from regauge.training.divergence.settings import Replay, Steps
    from regauge.training.session import Session

RECORD = "replay.jsonl"


def replay(settings: Replay, world: World) -> dict[str, Any]:
    """Compute steps again in `output.folder`; every process of the run calls this."""
    objectives.manifests(settings)
    decided = decide(settings, world)
    joined = dist.is_initialized()
    asked, folder = settings.replay, Path(settings.output.folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = torch.float64 if asked.float64 else None
    session = open_session(decided, world, dtype=dtype)
    session.chaos = Chaos.of(asked.faults, folder / "chaos.jsonl", world.rank, 1)
    try:
        if asked.state is not None:
            session.restore(Path(asked.state))
        if session.step >= asked.until:
            raise SettingsError(
                f"{asked.state} is at step {session.step}, beyond the steps to compute again",
                "name an earlier state",
            )
        session.rates.begin(session.step)
        _compute(session, asked, folder)
        session.saver.wait()
    finally:
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()
    return {"output": str(folder), "steps": session.step}


def _compute(session: Session, asked: Steps, folder: Path) -> None:
    steps = in_turn(session.arrays, session.step, asked.until, workers=0, ahead=0)
    session.interval.begin()
    for arrays in steps:
        if session.step == asked.save:
            session.save({})
        batches = [
            {name: torch.from_numpy(value).to(session.device) for name, value in part.items()}
            for part in arrays
        ]
        faults = session.chaos.strike("step", session.step)
        with mistaken(session, batches, faults):
            if session.step in asked.watch:
                capture = Capture(session, asked.noise)
                with capture.watching(batches):
                    totals, norm = advance(session, batches)
                capture.write(folder, session.step)
            else:
                totals, norm = advance(session, batches)
        loss, weight = totals.tolist()
        session.step += 1
        if session.world.first:
            line = {"step": session.step, "loss": loss / max(weight, 1e-9), "norm": float(norm)}
            jsonl.append(folder / RECORD, line)
