"""Runs Regauge and its peers alternately, and compares their figures."""

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
"""Turns of a program in the style `default`, which is many times slower."""
NO_TIMEOUT_SECONDS = 1e9
REGAUGE = "regauge"
STYLES = ("best", "compiled", "default", "minimal", "ungrouped")
"""How a peer is configured."""
SCRIPTS = {"minimal": "peer_minimal.py"}
"""Scripts of the styles that have a separate one."""
TOKENS = "tokens"
NUM_STEPS = 2000
"""Steps of the run that all programs train: about an hour. They are killed after their turns."""


class Peer(NamedTuple):
    """Another system that trains the same model: a script in this folder."""

    labels: dict[str, str]
    """Name of each style in the results."""
    script: str
    goals: dict[str, float]
    """Speedup that Regauge must reach over each style."""
    slow_steps: int | None = 1
    """Steps of a turn in the style `default`; None for the steps of the other programs."""
    rows: int | None = None
    """Rows of a microbatch; None for all rows of a step."""


def build_parser(doc: str | None, name: str, repeats: int, steps: int) -> argparse.ArgumentParser:
    """Return the command line of a benchmark that writes `name`.json."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, help="text file; default: docs of this Python")
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="of each program; one is a warm-up"
    )
    parser.add_argument("--steps", type=int, default=steps, help="training steps of a repeat")
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json")
    return parser


def run_alternating(
    folder: Path, tables: dict[str, Any], peer: Peer, options: Any, unit: str = TOKENS
) -> list[Program]:
    """Train a run with Regauge and with each style of a peer, alternating; return the programs."""
    tables = tables | {"stop": {"steps": NUM_STEPS}}
    programs = [
        _build_regauge_program(folder / REGAUGE, tables, options.steps, unit),
        *(
            _build_peer_program(folder / style, tables, peer, style, options.steps)
            for style in options.peers
        ),
    ]
    for program in programs:
        program.unit = unit
    alternate(programs, options.repeats)
    return programs


def _build_regauge_program(folder: Path, tables: dict[str, Any], steps: int, unit: str) -> Program:
    """Return the command that trains a run file with Regauge, `steps` steps per turn."""
    folder.mkdir(parents=True)
    tracker: dict[str, Any] = {"kind": "turns:TurnTracker", "folder": str(folder)}
    if unit != TOKENS:
        manifest = mixture.read_data_manifest(DataSettings(**tables["data"]))
        tracker["rows_per_epoch_and_step"] = manifest.splits["train"].rows, tables["batch"]["rows"]
    output = {"folder": str(folder / "run"), "trackers": (tracker,), "log_every_steps": steps}
    evaluation = tables["evaluation"] | {"every_steps": steps}
    saving = {"checkpoint": {"every_steps": 10**9}}
    # The run waits while the other programs have their turns.
    supervision = {"supervision": {"hang_timeout_seconds": NO_TIMEOUT_SECONDS}}
    execution = {"execution": tables.get("execution", {}) | supervision}
    file = _write_tables(
        folder, tables | execution | {"output": output | saving, "evaluation": evaluation}
    )
    command = [sys.executable, "-m", "regauge", "train", str(file)]
    return Program(REGAUGE, command, folder, {"PYTHONPATH": _build_python_path()})


def _build_peer_program(
    folder: Path, tables: dict[str, Any], peer: Peer, style: str, steps: int
) -> Program:
    """Return the program that trains the same run with a peer, in one of its styles."""
    folder.mkdir(parents=True)
    file = _write_tables(folder, tables | {"output": {"folder": str(folder)}})
    is_slow = style == "default"
    turn_steps = peer.slow_steps or steps if is_slow else steps
    path = HERE / SCRIPTS.get(style, peer.script)
    script = [sys.executable, str(path), str(folder), str(file)]
    command = [*script, "--style", style, "--steps-per-turn", str(turn_steps)]
    if peer.rows:
        command += ["--rows", str(peer.rows)]
    return Program(
        peer.labels[style],
        command,
        folder,
        goal=peer.goals.get(style),
        max_turns=SLOW_TURNS if is_slow else None,
    )


def _build_python_path() -> str:
    """Return PYTHONPATH with this folder appended."""
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE)])


def _write_tables(folder: Path, tables: dict[str, Any]) -> Path:
    file = folder / "program.json"
    file.write_text(json.dumps(tables))
    return file


def compute_speedup(program: Program, peer: Program) -> dict[str, Any]:
    """Return the speedup over a peer and its range: the median over pairs of turns."""
    pairs = zip(program.rates(), peer.rates(), strict=False)  # a slow peer has fewer turns
    ratios = sorted(rate / peer_rate for rate, peer_rate in pairs)
    return {
        "speedup": round(statistics.median(ratios), 3),
        "range": [round(ratios[0], 3), round(ratios[-1], 3)],
    }


def compare_speed(program: Program, peer: Program) -> dict[str, Any]:
    """Return the speedup over a peer, and whether it reaches the goal if there is one."""
    figures = compute_speedup(program, peer)
    if peer.goal is not None:
        figures |= {"goal": peer.goal, "met": figures["speedup"] >= peer.goal}
    return figures


def seconds_to_loss(program: Program, loss: float) -> float | None:
    """Return the training seconds until a held-out loss, linear between two evaluations.

    Compilation does not count: the first turn counts as a median turn.
    """
    median = statistics.median(turn["seconds"] for turn in program.turns[1:])
    before, total = None, 0.0
    for index, turn in enumerate(program.turns):
        after, seconds = turn["heldout"], turn["seconds"] if index else median
        if after <= loss:
            share = 1.0 if before is None else (before - loss) / (before - after)
            return total + share * seconds
        before, total = after, total + seconds
    return None


def compare_programs(programs: list[Program]) -> dict[str, Any]:
    """Return the figures of programs; the first one is compared with each of the others."""
    first, *peers = programs
    return {
        "programs": {program.name: program.summarize() for program in programs},
        "peers": {peer.name: _compare_training(first, peer) for peer in peers},
        "curves": {program.name: _heldout_curve(program) for program in programs},
    }


def _compare_training(program: Program, peer: Program) -> dict[str, Any]:
    """Compare two programs; `loss` is the higher one of their last held-out losses."""
    figures = compare_speed(program, peer)
    if peer.max_turns is None:
        loss = max(item.turns[-1]["heldout"] for item in (program, peer))
        seconds, peer_seconds = seconds_to_loss(program, loss), seconds_to_loss(peer, loss)
        speedup = peer_seconds / seconds if seconds and peer_seconds else 0.0
        figures |= {
            "loss": loss,
            "seconds_to_loss": [seconds, peer_seconds],
            "time_to_loss_speedup": round(speedup, 3),
        }
        if peer.goal is not None:
            figures["time_to_loss_met"] = speedup >= peer.goal
    return {
        **figures,
        "peak_memory_ratio": round(program.peak_bytes / peer.peak_bytes, 3),
        "max_relative_loss_difference": _max_loss_difference(program, peer),
    }


def _heldout_curve(program: Program) -> list[tuple[int, float]]:
    """Return the step and the held-out loss of each turn."""
    return [(turn["step"], round(turn["heldout"], 4)) for turn in program.turns]


def _max_loss_difference(program: Program, peer: Program) -> float | None:
    """Return the largest relative difference of held-out losses; None without equal steps."""
    losses = dict(_heldout_curve(peer))
    differences = [
        abs(loss / losses[step] - 1) for step, loss in _heldout_curve(program) if step in losses
    ]
    return round(max(differences), 4) if differences else None
