"""The programs that are set beside each other, and how their figures are compared."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from turns import Program

HERE = Path(__file__).parent
SLOW_TURNS = 4
"""Turns of a program that takes many times as long; one step each."""
OURS, BEST, DEFAULT = "regauge", "trainer at its best", "trainer by default"


def ours(folder: Path, tables: dict[str, Any], steps: int) -> Program:
    """Return the command that trains a run file here, `steps` steps a turn."""
    folder.mkdir(parents=True)
    tracker = {"kind": "turns:Turns", "folder": str(folder)}
    output = {"folder": str(folder / "run"), "trackers": (tracker,), "every_steps": steps}
    evaluation = tables["evaluation"] | {"every_steps": steps}
    saving = {"checkpoint": {"every_steps": 10**9}}
    file = _written(folder, tables | {"output": output | saving, "evaluation": evaluation})
    command = [sys.executable, "-m", "regauge", "train", str(file)]
    return Program(OURS, command, folder, {"PYTHONPATH": str(HERE)})


def trainer(folder: Path, tables: dict[str, Any], style: str, steps: int) -> Program:
    """Return a program that trains the same with Trainer, at its best or by default."""
    folder.mkdir(parents=True)
    file = _written(folder, tables | {"output": {"folder": str(folder)}})
    script = [sys.executable, str(HERE / "peer_trainer.py"), str(folder), str(file)]
    options = ["--style", style, "--turn", str(steps if style == "best" else 1)]
    if style == "best":
        return Program(BEST, script + options, folder)
    return Program(DEFAULT, script + options, folder, most_turns=SLOW_TURNS)


def _written(folder: Path, tables: dict[str, Any]) -> Path:
    file = folder / "program.json"
    file.write_text(json.dumps(tables))
    return file


def ratio(one: Program, other: Program) -> dict[str, Any]:
    """Return how many times as fast one program is as another: the median over pairs of turns."""
    pairs = zip(one.rates(), other.rates(), strict=False)  # a slow one had fewer turns
    ratios = sorted(mine / others for mine, others in pairs)
    return {
        "times": round(statistics.median(ratios), 3),
        "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
    }


def seconds_to(program: Program, loss: float) -> float | None:
    """Return the seconds of training until a held-out loss, between two measurements by a line.

    What is compiled on the way does not count: the first turn takes what the others do.
    """
    usual = statistics.median(turn["seconds"] for turn in program.turns[1:])
    before, spent = None, 0.0
    for number, turn in enumerate(program.turns):
        after, seconds = turn["heldout"], turn["seconds"] if number else usual
        if after <= loss:
            share = 1.0 if before is None else (before - loss) / (before - after)
            return spent + share * seconds
        before, spent = after, spent + seconds
    return None


def compared(programs: list[Program], goals: dict[str, float]) -> dict[str, Any]:
    """Return the figures of programs; the first is compared with each of the others."""
    first, *others = programs
    return {
        "programs": {program.name: program.facts() for program in programs},
        "against": {other.name: _against(first, other, goals[other.name]) for other in others},
        "curves": {program.name: _curve(program) for program in programs},
    }


def _against(one: Program, other: Program, goal: float) -> dict[str, Any]:
    """Compare two programs; the loss that is reached is the higher one of their last."""
    faster = ratio(one, other)
    found = {**faster, "goal": goal, "met": faster["times"] >= goal}
    if other.most_turns is None:
        loss = max(program.turns[-1]["heldout"] for program in (one, other))
        own, theirs = seconds_to(one, loss), seconds_to(other, loss)
        sooner = theirs / own if own and theirs else 0.0
        found |= {
            "loss": loss,
            "seconds_to_loss": [own, theirs],
            "times_sooner": round(sooner, 3),
            "sooner_met": sooner >= goal,
        }
    return {
        **found,
        "memory_of_theirs": round(one.peak_bytes / other.peak_bytes, 3),
        "losses_differ_by_at_most": round(_difference(one, other), 4),
    }


def _curve(program: Program) -> list[list[float]]:
    return [[turn["step"], round(turn["heldout"], 4)] for turn in program.turns]


def _difference(one: Program, other: Program) -> float:
    """Return the largest relative difference of the held-out losses at equal steps."""
    theirs = dict(_curve(other))
    return max(abs(loss / theirs[step] - 1) for step, loss in _curve(one) if step in theirs)
