"""Finds the first module whose values differ between two runs, by recomputing steps.

<folder>/{baseline,candidate}  the steps up to the divergence, from a baseline checkpoint
<folder>/step-<n>/…            one step, module by module: of both runs (baseline, candidate), on
                               a CPU in fp32 or fp64 (reference), and with rounding (rounded)

Finished computations are not repeated, so each half can be computed on another machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import accelerators, commands, config
from regauge.config.output_files import DONE, FAULTS
from regauge.evaluation.compare.gaps import relative_difference
from regauge.evaluation.compare.verdict import ROUNDING_TOLERANCE
from regauge.run_folders.checkpoint_files import CHECKPOINTS, checkpoint_name, list_steps
from regauge.supervision.faults.faults import BUGS, FaultLine
from regauge.system import files, jsonl
from regauge.system.errors import InconclusiveError
from regauge.system.json_files import DocumentShape, find_valid_json
from regauge.training.divergence.settings import ReplaySettings

if TYPE_CHECKING:
    from regauge.evaluation.compare.verdict import Parity
    from regauge.training.divergence.localize import Divergence, StepVariants

SIDES = ("baseline", "candidate")
"""The compared runs, and their folder names."""
REFERENCE_TABLES: config.Tables = {
    "accelerator": {"kind": accelerators.REFERENCE_KIND},
    "strategy": {"kind": "single"},
    "execution": {
        "precision": "fp32",
        "processes": 1,
        "compile": "off",
        "activation_checkpointing": "none",
    },
}


@dataclass(frozen=True)
class Side:
    tables: config.Tables
    """Run file tables."""
    fault_plan: str | None
    """File with the bugs injected into the run, if any."""


def localize_divergence(
    runs: tuple[Path, Path], parity: Parity, folder: Path, *, float64: bool
) -> Divergence:
    """Find the step and the value at which the second run diverges from the first.

    `parity` limits the step range. Raises InconclusiveError if the runs do not diverge, and the
    errors of `replay` if a device or the data is missing on this machine.
    """
    from regauge.training.divergence import localize

    if parity.first_divergence is None:
        problem = f"{parity.candidate} does not diverge from {parity.baseline}"
        raise InconclusiveError(problem, "compare runs that differ")
    last_step = parity.first_divergence.gap.step
    equal_step = max((gap.step for gap in parity.loss_gaps if gap.step < last_step), default=0)
    saved_steps = (step for step in list_steps(runs[0] / CHECKPOINTS) if step <= equal_step)
    first_step = max(saved_steps, default=0)
    checkpoint = str(runs[0] / CHECKPOINTS / checkpoint_name(first_step)) if first_step else None
    sides = _read_sides(runs, folder)
    for name, side in sides.items():
        _replay(side, folder / name, {"until": last_step, "checkpoint": checkpoint})
    tolerance = 0.0 if parity.expects_equal_bits else ROUNDING_TOLERANCE
    divergent_step = _find_divergent_step(folder, tolerance)
    if divergent_step is None:
        return localize.Divergence(last_step - 1, is_reproduced=False)
    # A wrong update shows in the loss of the next step, so the search starts one step earlier.
    for step in range(max(first_step, divergent_step - 1), divergent_step + 1):
        variants = _compute_step(sides, folder / f"step-{step}", step, checkpoint, float64=float64)
        differences = localize.compare_step(
            step, variants, is_same_execution=parity.expects_equal_bits
        )
        first = localize.find_first(differences)
        if first is not None or step == divergent_step:
            execution_differences = localize.compare_execution(variants)
            return localize.Divergence(step, tuple(differences), first, execution_differences)
    raise AssertionError("the range has at least one step")


def _compute_step(
    sides: dict[str, Side], folder: Path, step: int, checkpoint: str | None, *, float64: bool
) -> StepVariants:
    from regauge.training.divergence import localize

    baseline, candidate = sides["baseline"], sides["candidate"]
    options: dict[str, Any] = {"until": step + 1, "capture_steps": [step]}
    start = {"checkpoint": checkpoint, "save_at_step": step} if step else {}
    _replay(baseline, folder / "baseline", {**options, **start})
    if step:
        options["checkpoint"] = str(folder / "baseline" / CHECKPOINTS / checkpoint_name(step))
    _replay(candidate, folder / "candidate", options)
    reference_side = Side(config.merge(baseline.tables, REFERENCE_TABLES), None)
    _replay(reference_side, folder / "reference", {**options, "float64": float64})
    first, second = (localize.read_capture(folder / name, step) for name in SIDES)
    precisions = [capture.execution["precision"] for capture in (first, second)]
    noise = max(localize.UNIT_ROUNDOFF[precision] for precision in precisions)
    _replay(reference_side, folder / "rounded", {**options, "float64": float64, "noise": noise})
    reference = localize.read_capture(folder / "reference", step)
    rounded = localize.read_capture(folder / "rounded", step)
    return localize.StepVariants(first, second, reference, rounded)


def _read_sides(runs: tuple[Path, Path], folder: Path) -> dict[str, Side]:
    """Read both runs; the second gets the first one's microbatch size, and so the same rows."""
    folder.mkdir(parents=True, exist_ok=True)
    sides: dict[str, Side] = {}
    for name, run in zip(SIDES, runs, strict=True):
        tables = config.read_saved_run(run)
        if name == "candidate":
            microbatch_rows = sides["baseline"].tables["batch"]["microbatch_rows"]
            tables = config.merge(tables, {"batch": {"microbatch_rows": microbatch_rows}})
        sides[name] = Side(tables, _write_fault_plan(run, folder / f"faults-{name}.json"))
    return sides


def _write_fault_plan(run: Path, plan: Path) -> str | None:
    """Write a plan with the bugs injected into a run, if any."""
    bugs = [line for line in jsonl.read_lines(run / FAULTS, FaultLine) if line["kind"] in BUGS]
    if not bugs:
        return None
    names = ("kind", "at", "rank", "layer")
    faults = [
        {**{name: line[name] for name in names}, "step": line["triggered_at_step"], "attempt": 0}
        for line in bugs
    ]
    # Every rank records a fault of all ranks; the plan must contain it once.
    unique = {json.dumps(fault): fault for fault in faults}
    files.write_json(plan, {"fault": list(unique.values())})
    return str(plan)


def _replay(side: Side, folder: Path, options: dict[str, Any]) -> None:
    """Recompute a run's steps, unless the folder already has the result for these options."""
    replay = {name: value for name, value in options.items() if value is not None}
    replay |= {"fault_plan": side.fault_plan} if side.fault_plan else {}
    done = folder / DONE
    if find_valid_json(done) == replay:
        return
    (folder / "replay.jsonl").unlink(missing_ok=True)
    tables = {**side.tables, "output": {"folder": str(folder)}, "replay": replay}
    settings = config.build(ReplaySettings, tables, commands.table_names(), str(folder))
    commands.import_verb("replay").run(settings)
    files.write_json(done, replay)


class ReplayLine(DocumentShape):
    """A `replay.jsonl` line: one recomputed step."""

    step: jsonl.Count
    loss: float
    grad_norm: float


def _find_divergent_step(folder: Path, tolerance: float) -> int | None:
    """Return how many equal steps precede the first different one; None if all are equal."""
    baseline, candidate = (
        jsonl.read_lines(folder / name / "replay.jsonl", ReplayLine) for name in SIDES
    )
    for baseline_line, candidate_line in zip(baseline, candidate, strict=False):
        differences = (
            relative_difference(baseline_line[name], candidate_line[name])
            for name in ("loss", "grad_norm")
        )
        if any(difference > tolerance for difference in differences):
            return int(baseline_line["step"]) - 1
    return None
