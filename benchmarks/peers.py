"""The programs that are set beside each other, and how their figures are compared."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from recording import RESULTS
from turns import Program, alternate

from regauge.data import mixture
from regauge.data.settings import DataSettings

HERE = Path(__file__).parent
SLOW_TURNS = 4
"""Turns of a program as it is by default, which takes many times as long."""
NEVER = 1e9
"""Seconds."""
OURS = "regauge"
STYLES = {
    "best": "{} at its best",
    "compiled": "{} compiled",
    "default": "{} by default",
    "minimal": "a loop by hand",
}
SCRIPTS = {"minimal": "peer_minimal.py"}
"""Of styles that are programs of their own."""
TOKENS = "tokens"


class Peer(NamedTuple):
    """Another way to train the same: a program of this folder."""

    name: str
    script: str
    goals: dict[str, float]
    """How many times as fast this project has to be, by style."""
    slow_steps: int | None = 1
    """Steps of a turn by default; None for those of the others."""
    rows: int | None = None
    """Rows that it computes at a time; None for all of a step."""


def arguments(doc: str | None, name: str, turns: int, steps: int) -> argparse.ArgumentParser:
    """Return what the command line of a benchmark says, whose results have a name."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, help="by default the documentation of this Python")
    parser.add_argument(
        "--turns", type=int, default=turns, help="of each program; one is a warm-up"
    )
    parser.add_argument("--steps", type=int, default=steps, help="of each turn")
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json")
    return parser


def raced(
    folder: Path, tables: dict[str, Any], peer: Peer, own: Any, unit: str = TOKENS
) -> list[Program]:
    """Train a run here and by a peer in each of its styles, in turns; return the programs."""
    programs = [
        _ours(folder / OURS, tables, own.steps, unit),
        *(_theirs(folder / style, tables, peer, style, own.steps) for style in own.peers),
    ]
    for program in programs:
        program.unit = unit
    alternate(programs, own.turns)
    return programs


def _ours(folder: Path, tables: dict[str, Any], steps: int, unit: str) -> Program:
    """Return the command that trains a run file here, `steps` steps a turn."""
    folder.mkdir(parents=True)
    tracker: dict[str, Any] = {"kind": "turns:Turns", "folder": str(folder)}
    if unit != TOKENS:
        manifest = mixture.read_data_manifest(DataSettings(**tables["data"]))
        tracker["counted"] = (manifest.splits["train"].rows, tables["batch"]["rows"])
    output = {"folder": str(folder / "run"), "trackers": (tracker,), "log_every_steps": steps}
    evaluation = tables["evaluation"] | {"every_steps": steps}
    saving = {"checkpoint": {"every_steps": 10**9}}
    patient = {"supervision": {"hang_timeout_seconds": NEVER}}  # others have their turns meanwhile
    execution = {"execution": tables["execution"] | patient}
    own = {"output": output | saving, "evaluation": evaluation}
    file = _written(folder, tables | execution | own)
    command = [sys.executable, "-m", "regauge", "train", str(file)]
    return Program(OURS, command, folder, {"PYTHONPATH": _with_this_folder()})


def _theirs(folder: Path, tables: dict[str, Any], peer: Peer, style: str, steps: int) -> Program:
    """Return a program that trains the same with a peer, in one of its styles."""
    folder.mkdir(parents=True)
    file = _written(folder, tables | {"output": {"folder": str(folder)}})
    slow = style == "default"
    turn = peer.slow_steps or steps if slow else steps
    path = HERE / SCRIPTS.get(style, peer.script)
    script = [sys.executable, str(path), str(folder), str(file)]
    command = [*script, "--style", style, "--turn", str(turn)]
    if peer.rows:
        command += ["--rows", str(peer.rows)]
    return Program(
        STYLES[style].format(peer.name),
        command,
        folder,
        goal=peer.goals.get(style),
        most_turns=SLOW_TURNS if slow else None,
    )


def _with_this_folder() -> str:
    """Return where Python looks for modules, with this folder behind what is there."""
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE)])


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


def faster(one: Program, other: Program) -> dict[str, Any]:
    """Return how many times as fast one is, and whether that is what it has to be."""
    found = ratio(one, other)
    if other.goal is not None:
        found |= {"goal": other.goal, "met": found["times"] >= other.goal}
    return found


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


def compared(programs: list[Program]) -> dict[str, Any]:
    """Return the figures of programs; the first is compared with each of the others."""
    first, *others = programs
    return {
        "programs": {program.name: program.facts() for program in programs},
        "against": {other.name: _against(first, other) for other in others},
        "curves": {program.name: _curve(program) for program in programs},
    }


def _against(one: Program, other: Program) -> dict[str, Any]:
    """Compare two programs; the loss that is reached is the higher one of their last."""
    found = faster(one, other)
    if other.most_turns is None:
        loss = max(program.turns[-1]["heldout"] for program in (one, other))
        own, theirs = seconds_to(one, loss), seconds_to(other, loss)
        sooner = theirs / own if own and theirs else 0.0
        found |= {
            "loss": loss,
            "seconds_to_loss": [own, theirs],
            "times_sooner": round(sooner, 3),
        }
        if other.goal is not None:
            found["sooner_met"] = sooner >= other.goal
    return {
        **found,
        "memory_of_theirs": round(one.peak_bytes / other.peak_bytes, 3),
        "losses_differ_by_at_most": _difference(one, other),
    }


def _curve(program: Program) -> list[list[float]]:
    return [[turn["step"], round(turn["heldout"], 4)] for turn in program.turns]


def _difference(one: Program, other: Program) -> float | None:
    """Return the largest relative difference of the held-out losses at equal steps, if any are."""
    theirs = dict(_curve(other))
    found = [abs(loss / theirs[step] - 1) for step, loss in _curve(one) if step in theirs]
    return round(max(found), 4) if found else None
