"""Which value of which step two runs part at: both are computed again from one state of the first.

<folder>/ours, theirs          the steps in which they part, from a checkpoint of the first run
<folder>/step-<n>/…            one step of them, module by module: ours, theirs, and what they are
                               measured by, a CPU in fp32 or fp64 (reference), and with rounding

What is there is not computed again, so that each half can be made on a machine of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import accelerators, config, files, jsonl, verbs
from regauge.checkpoint.layout import name_of, steps
from regauge.comparison.gaps import relative
from regauge.comparison.verdict import EXACT
from regauge.errors import NotShownError
from regauge.testing.faults import BUGS, RECORD
from regauge.training.divergence.settings import Replay

if TYPE_CHECKING:
    from regauge.comparison.verdict import Parity
    from regauge.training.divergence.localize import Four, Localised

DONE = "done.json"
REFERENCE: config.Tables = {
    "accelerator": {"kind": accelerators.REFERENCE},
    "strategy": {"kind": "single"},
    "execution": {
        "precision": "fp32",
        "processes": 1,
        "compile": "no",
        "activation_checkpointing": "none",
    },
}


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    tables: config.Tables
    """Its run file."""
    faults: str | None
    """Plan of the mistakes that were injected into it; None for none."""


def localise(runs: tuple[Path, Path], parity: Parity, folder: Path, *, float64: bool) -> Localised:
    """Return where the second of two runs parts from the first.

    `parity` says between which steps. Raises NotShownError for runs that do not part, and what
    `replay` raises where a device or the data is not here.
    """
    from regauge.training.divergence import localize as found

    if parity.parted is None:
        raise NotShownError(f"{parity.theirs} does not part from {parity.ours}", "nothing to find")
    last = parity.parted.gap.step
    agreed = max((gap.step for gap in parity.losses if gap.step < last), default=0)
    begun = max((step for step in steps(runs[0] / "checkpoints") if step <= agreed), default=0)
    state = str(runs[0] / "checkpoints" / name_of(begun)) if begun else None
    sides = _sides(runs, folder)
    for name, side in sides.items():
        _compute(side, folder / name, {"until": last, "state": state})
    parted = _parted(folder, 0.0 if parity.alike else EXACT)
    if parted is None:
        return found.Localised(last - 1, again=False)
    # What an update did wrong shows in the step after it.
    for step in range(max(begun, parted - 1), parted + 1):
        four = _computed(sides, folder / f"step-{step}", step, state, float64=float64)
        spots = found.spots(step, four, alike=parity.alike)
        named = found.first(spots)
        if named is not None or step == parted:
            return found.Localised(step, tuple(spots), named, found.chosen(four))
    raise AssertionError("a range of one step or more")


def _computed(
    sides: dict[str, Side], folder: Path, step: int, state: str | None, *, float64: bool
) -> Four:
    """Compute one step in every way."""
    from regauge.training.divergence import localize as found

    ours, theirs = sides["ours"], sides["theirs"]
    until = {"until": step + 1, "watch": [step]}
    begun = {"state": state, "save": step} if step else {}
    _compute(ours, folder / "ours", {**until, **begun})
    if step:
        until["state"] = str(folder / "ours" / "checkpoints" / name_of(step))
    _compute(theirs, folder / "theirs", until)
    plain = Side(config.merge(ours.tables, REFERENCE), None)
    _compute(plain, folder / "reference", {**until, "float64": float64})
    first, second = (found.read(folder / name, step) for name in ("ours", "theirs"))
    noise = max(found.ROUNDING[each.chosen["precision"]] for each in (first, second))
    _compute(plain, folder / "rounded", {**until, "float64": float64, "noise": noise})
    reference, rounded = (found.read(folder / name, step) for name in ("reference", "rounded"))
    return found.Four(first, second, reference, rounded)


def _sides(runs: tuple[Path, Path], folder: Path) -> dict[str, Side]:
    """Return both runs with the microbatches of the first: then they hold the same rows."""
    folder.mkdir(parents=True, exist_ok=True)
    sides: dict[str, Side] = {}
    for name, run in zip(("ours", "theirs"), runs, strict=True):
        tables = config.read(run / "run.json")
        if name == "theirs":
            own = sides["ours"].tables["batch"]["microbatch_rows"]
            tables = config.merge(tables, {"batch": {"microbatch_rows": own}})
        sides[name] = Side(tables, _faults(run, folder / f"faults-{name}.json"))
    return sides


def _faults(run: Path, plan: Path) -> str | None:
    """Write a plan of the mistakes that struck a run; return its file, None where none did."""
    struck = [line for line in jsonl.whole(run / RECORD) if line["kind"] in BUGS]
    if not struck:
        return None
    names = ("kind", "at", "rank", "layer")
    faults = [
        {**{name: line[name] for name in names}, "step": line["struck_at_step"], "attempt": 0}
        for line in struck
    ]
    # A fault of every process is written down by each of them, and strikes once.
    once = {json.dumps(fault): fault for fault in faults}
    plan.write_text(json.dumps({"fault": list(once.values())}))
    return str(plan)


def _compute(side: Side, folder: Path, asked: dict[str, Any]) -> None:
    """Compute steps of a run again, unless it was done already."""
    wanted = {name: value for name, value in asked.items() if value is not None}
    wanted |= {"faults": side.faults} if side.faults else {}
    done = folder / DONE
    if done.exists() and json.loads(done.read_text()) == wanted:
        return
    (folder / "replay.jsonl").unlink(missing_ok=True)
    tables = {**side.tables, "output": {"folder": str(folder)}, "replay": wanted}
    settings = config.build(Replay, tables, verbs.tables(), str(folder))
    verbs.module("replay").run(settings)
    files.write_json(done, wanted)


def _parted(folder: Path, exact: float) -> int | None:
    """Return the steps done before the first one that both computed differently, if any."""
    ours, theirs = (jsonl.whole(folder / name / "replay.jsonl") for name in ("ours", "theirs"))
    for one, other in zip(ours, theirs, strict=False):
        if any(relative(one[name], other[name]) > exact for name in ("loss", "norm")):
            return int(one["step"]) - 1
    return None
